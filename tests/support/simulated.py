"""Whole simulated runs for tests: what happened, in order, and the questions that requirements ask of it.

Knows the simulated backend's driver and nothing inside its models. Times in seconds. `LINEAR` are engine costs with
which a turn's time has a closed form: see `turn_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from sim.driver import SimulatedBackend
from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics import RunMetrics
from testbed.metrics.summary import RunSummary
from testbed.scenario import Scenario
from testbed.scenario.rules import check
from tests.support.invariants import Record, Watch
from tests.support.scenarios import scenario

HERE = Path(__file__).parent
STEP, PREFILL = 0.01, 0.1
LINEAR: dict[str, Any] = {
    "type": "linear",
    "base_s": STEP,
    "per_sequence_s": 0.0,
    "per_context_token_s": 0.0,
    "prefill_base_s": PREFILL,
    "prefill_per_token_s": 0.0,
}
"""A decode step takes 10 ms and a prefill batch 100 ms, whatever they hold."""
QUICK: dict[str, Any] = {
    "simulation__engine_costs": LINEAR,
    "training__cost": {"type": "rate", "samples_per_s": 1.0},
}
"""The linear engine, and a trainer of one trajectory per second."""


def turn_seconds(output_tokens: int) -> float:
    """A turn on an engine that prefills it at once: one prefill gives the first token, each decode step one more."""
    return PREFILL + (output_tokens - 1) * STEP


def fixed(tokens: int) -> dict[str, Any]:
    return {"type": "fixed", "tokens": tokens}


def split(rollout: int, trainer: int, per_engine: int = 1) -> dict[str, Any]:
    """A disaggregated placement."""
    return {
        "mode": "disaggregated",
        "rollout_num_gpus": rollout,
        "actor_num_gpus": trainer,
        "rollout_num_gpus_per_engine": per_engine,
    }


class Run:
    """One run: `records` are (event, actions), `log` is (time, event or action), both in order."""

    def __init__(self, config: Scenario, faults: Iterable[said.Event] = ()) -> None:
        self.scenario = config
        self.records: list[Record] = []
        self.log: list[tuple[float, Any]] = []
        self.present: list[int] = []
        """Groups (or trajectories) in the buffer after each record, ready or not."""
        self.backend = SimulatedBackend(config, HERE, (), tuple(faults))
        self._metrics = RunMetrics(config, self.backend.core.layout, self.backend.store.planned)
        self.backend.use([self._note, self._metrics.observe])
        self.finish_reason = ""

    def _note(self, event: said.Event, actions: list[do.Action]) -> None:
        self.records.append((event, list(actions)))
        self.present.append(self.backend.core.experience.buffer.present)
        self.log.append((event.t, event))
        self.log.extend((event.t, a) for a in actions)

    def go(self) -> Run:
        self.finish_reason = self.backend.run()
        return self

    def of(self, *kinds: type) -> list[tuple[float, Any]]:
        """(time, what) of every event or action of these kinds."""
        return [(t, x) for t, x in self.log if isinstance(x, kinds)]

    @property
    def summary(self) -> RunSummary:
        return self._metrics.summary()

    def checked(self) -> Watch:
        """All invariants of the contract, over the whole run."""
        watch = Watch(self.scenario)
        for event, actions in self.records:
            watch(event, actions)
        watch.done()
        return watch

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> list[do.Train]:
        return [a for _, a in self.of(do.Train)]

    @property
    def steps(self) -> list[float]:
        """When each batch's last update was done."""
        updates = self.scenario.algorithm.num_steps_per_rollout
        return [t for t, e in self.of(said.TrainStepFinished) if e.update + 1 == updates]

    @property
    def cycles(self) -> list[float]:
        """Seconds from one batch's end to the next one's."""
        ends = self.steps
        return [b - a for a, b in pairwise(ends)]

    def turns(self) -> list[tuple[float, said.TurnFinished, do.StartTurn]]:
        """(sent at, how it ended, how it was sent) of every turn that ended in an engine."""
        sent: dict[tuple[int, int], tuple[float, do.StartTurn]] = {}
        ended = []
        for t, x in self.log:
            if isinstance(x, do.StartTurn):
                sent[x.trajectory, x.turn] = (t, x)
            elif isinstance(x, said.TurnFinished):
                start, turn = sent[x.trajectory, x.turn]
                ended.append((start, x, turn))
        return ended

    def journal_lines(self) -> list[bytes]:
        """What a journal of the run would hold, line by line."""
        encode = msgspec.json.Encoder().encode
        return [encode([event, actions]) for event, actions in self.records]


def run(config: Scenario | None = None, faults: Iterable[said.Event] = (), **changes: Any) -> Run:
    """Run a scenario (or the base with `changes`) to its end; the scenario must pass every rule."""
    config = config or scenario(**changes)
    refused = check(config, HERE)
    assert not refused, [str(f) for f in refused]
    return Run(config, faults).go()


def linear_run(**changes: Any) -> Run:
    """As `run`, with the linear engine and trainer unless `changes` say otherwise."""
    return run(None, **{**QUICK, **changes})
