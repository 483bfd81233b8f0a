"""What makes the simulator fast, counted: events a turn, core calls a rollout, objects alive. No time is measured."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import GROUP, PROMPT, scenario
from benchmarks.growth import exponent
from sim.driver import SimulatedBackend
from sim.engine import Request
from sim.experience_store import Conversation
from testbed.core.actions import Action
from testbed.core.events import Event, TrainStepFinished
from testbed.core.records import Trajectory
from testbed.metrics import RunMetrics
from testbed.metrics.trajectory import Life
from testbed.policies.routing.prefixes import PrefixTracking
from testbed.scenario import Scenario

CASES = [
    ("single_turn", {"rollouts": 4096, "engines": 16}),
    ("multi_turn", {"rollouts": 1024, "engines": 4}),
    ("serving", {"rollouts": 1000}),
]
PER_ROLLOUT = (Trajectory, Request, Conversation, Life)
"""What exists once for a living rollout (of `Request`: once for its turn in an engine)."""


def played(config: Scenario, observers: Sequence[Any] = ()) -> SimulatedBackend:
    backend = SimulatedBackend(config, Path(), observers)
    backend.run()
    return backend


def events_per_turn(backend: SimulatedBackend) -> float:
    """Entries of the clock that did something."""
    return (backend.clock.events - backend.fleet.stale) / backend.fleet.finished_turns


@pytest.mark.parametrize(("case", "options"), CASES)
def test_one_to_three_events_a_turn(case: str, options: dict[str, int]) -> None:
    backend = played(scenario(case, **options))
    assert 1.0 <= events_per_turn(backend) <= 3.2  # weight updates take their share of so short a run
    assert 1.0 <= backend.fleet.wake_ups / backend.fleet.finished_turns <= 2.2
    assert backend.fleet.stale <= backend.fleet.finished_turns  # at most one wake-up made void by each arrival


def test_events_do_not_depend_on_the_tokens_of_a_rollout() -> None:
    few, many = [
        events_per_turn(played(scenario("single_turn", 2048, engines=64, tokens=tokens))) for tokens in (300, 10_000)
    ]
    assert many == pytest.approx(few, rel=0.1)


def test_core_calls_are_those_that_the_contract_asks_for() -> None:
    """A call for each end of a turn, each reward and each task; for each update a few, and five from each engine."""
    engines, seen = 16, Counter()

    def count(event: Event, actions: Sequence[Action]) -> None:
        seen.update([type(event).__name__, *[type(a).__name__ for a in actions]])

    backend = played(scenario("single_turn", 4096, engines=engines), [count])
    updates = seen["PrepareWeights"]
    expected = seen["TurnFinished"] + seen["SignalReady"] + seen["TaskArrived"]
    assert seen["TurnFinished"] <= seen["TaskArrived"] * GROUP and seen["SignalReady"] <= seen["TurnFinished"]
    assert backend.core.events <= expected + updates * (5 * engines + 4) + 1


def alive() -> Counter[type]:
    kinds = set(PER_ROLLOUT)
    return Counter(type(o) for o in gc.get_objects() if type(o) in kinds)


def peak_alive(batches: int) -> tuple[Counter[type], Scenario]:
    """The most objects of each kind at the end of any batch, and how the run was set up."""
    config = scenario("single_turn", batches * 1024, engines=16, tokens=400)
    peak: Counter[type] = Counter()

    def look(event: Event, actions: Sequence[Action]) -> None:
        if type(event) is TrainStepFinished:
            peak.update({kind: n - peak[kind] for kind, n in alive().items() if n > peak[kind]})

    backend = SimulatedBackend(config, Path())
    metrics = RunMetrics(config, backend.core.layout)
    backend.use([metrics.observe, look])
    backend.run()
    return peak, config


def test_objects_alive_are_bounded_by_what_admission_lets_in() -> None:
    """Submitted, not dropped and not trained: at most (eta + 1) batches (the bound of AReaL), however long the run.

    A batch that has just been trained is let go with the call that reports it, which the observer sees before its
    memory is free: one batch more."""
    gc.collect()
    before = alive()
    peak, config = peak_alive(batches=12)
    eta, batch = 2, config.algorithm.trajectories_per_batch
    for kind in PER_ROLLOUT:
        assert peak[kind] - before[kind] <= (eta + 2) * batch, kind.__name__
    gc.collect()
    assert alive() == before


def remembered(case: str, batches: int) -> tuple[list[int], Scenario]:
    """Prompts in the router's tree, over all engines, at the end of each batch. A prompt without blocks is one node."""
    config = scenario(case, batches * 1024, engines=16, tokens=400)
    backend = SimulatedBackend(config, Path())
    router, nodes = backend.core.rollouts.router, []
    assert isinstance(router, PrefixTracking)

    def look(event: Event, actions: Sequence[Action]) -> None:
        if type(event) is TrainStepFinished:
            nodes.append(sum(router.tree.tokens(e.index) for e in backend.core.layout.engines) // PROMPT)

    backend.use([look])
    backend.run()
    return nodes, config


def test_a_router_that_is_told_remembers_prompts_of_the_living_version_only() -> None:
    """At most what was sent since the last update: what admission lets in. One that is not told remembers the rest."""
    nodes, config = remembered("single_turn", batches=12)
    assert max(nodes) <= (2 + 1) * config.algorithm.trajectories_per_batch
    assert max(nodes[6:]) <= 1.1 * max(nodes[:6])
    longer, _ = remembered("not_told", batches=12)
    assert longer[-1] > 2 * max(nodes) and longer == sorted(longer)


@pytest.mark.parametrize("power", [-0.5, 0.0, 1.0, 2.5])
def test_a_power_law_has_its_exponent(power: float) -> None:
    assert exponent([(x, 7.0 * x**power) for x in (1, 10, 300, 4096)]) == pytest.approx(power, abs=1e-12)


def test_an_exponent_needs_two_points() -> None:
    with pytest.raises(ValueError, match="two different x"):
        exponent([(3, 1.0), (3, 2.0)])
