"""Whole runs on the real rig, with what the questions about routing and caches need of them: events and actions, the
token ids of every turn, and what the trainer was given.

A run whose questions are about generation may end where training would begin: nothing after that is looked at, and on
CPUs the step takes as long as the rest."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from real.driver import RealBackend
from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.run import RunMetrics
from testbed.metrics.summary import RunSummary
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of
from tests.support.cached_tokens import Turn
from tests.support.invariants import Record, Watch, replayed


class _Generated(Exception):
    """The batch is there, and nobody wants it trained."""


@dataclass
class RealRun:
    scenario: Scenario
    records: list[Record] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """Ends of turns, with the token ids of prompt and output."""
    conversations: dict[int, Any] = field(default_factory=dict)
    """Trajectory -> what the trainer was given of it."""

    @property
    def ends(self) -> list[said.TurnFinished]:
        return [e for e, _ in self.turns]

    @property
    def summary(self) -> RunSummary:
        metrics = RunMetrics(self.scenario, layout_of(self.scenario))
        for event, actions in self.records:
            metrics.observe(event, actions)
        return metrics.summary()


def carried_out(rig: Any, config: Scenario, *, trains: bool = True) -> RealRun:
    """A run on the rig that keeps the contract and that a fresh core decides in the same way; without `trains`, until
    its first batch is to be trained."""
    run = RealRun(config)

    async def go() -> None:
        await rig.deployment.reset(config)

        def observe(event: said.Event, actions: list[do.Action]) -> None:
            run.records.append((event, list(actions)))
            if isinstance(event, said.TurnFinished):
                run.turns.append((event, tuple(backend.store.find(event.trajectory).ids)))
            for a in actions:
                if isinstance(a, do.Train):
                    run.conversations |= {x.trajectory: backend.store.find(x.trajectory) for x in a.experiences}
                    if not trains:
                        raise _Generated  # before the action is carried out

        backend = RealBackend(config, rig.deployment, [observe])
        with contextlib.suppress(_Generated):
            await backend.run()

    rig.wait(go())
    watch = Watch(config)
    for event, actions in run.records:
        watch(event, actions)
    if trains:
        watch.done()
    replayed(config, run.records)
    return run
