"""Whatever the settings, durations and failures: the run ends, its invariants hold, and a replay takes the same
actions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.core import actions as do
from tests.support.invariants import replayed, watched
from tests.support.random_runs import random_run, random_scenario
from tests.support.scenarios import scenario
from tests.support.scripted import Scripted

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_every_run_without_failures_trains_what_was_asked(seed: int) -> None:
    r = random.Random(seed)
    backend = random_run(r, random_scenario(r), faults=False).run(max_events=20_000)
    watch = watched(backend.scenario, backend.records)
    if watch.finished == "completed":
        assert watch.batches == backend.scenario.run.num_rollout
    else:
        assert watch.finished == "tasks_exhausted"


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_every_run_ends_and_keeps_the_invariants_whatever_fails(seed: int) -> None:
    r = random.Random(seed)
    backend = random_run(r, random_scenario(r)).run(max_events=20_000)
    assert backend.core.finished, backend.core.explain()
    watched(backend.scenario, backend.records)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_br_14_a_fresh_core_fed_with_the_same_events_takes_the_same_actions(seed: int) -> None:
    r = random.Random(seed)
    backend = random_run(r, random_scenario(r)).run(max_events=20_000)
    assert replayed(backend.scenario, backend.records) == sum(len(actions) for _, actions in backend.records)


@pytest.mark.parametrize("routing", ["least_load", "random", "power_of_two"])
def test_br_14_same_seed_same_event_trace_no_record_lost_or_trained_twice(routing: str) -> None:
    config = scenario(
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 3},
        rollout__routing={"type": routing},
        run__num_rollout=6,
    )
    first, second = (Scripted(config, turn=lambda a: 5.0 + a.trajectory % 7).run() for _ in range(2))
    assert first.records == second.records
    watched(config, first.records)
    trained = [x.trajectory for _, a in first.of(do.Train) for x in a.experiences]
    assert len(trained) == len(set(trained)) == 6 * 2 * 2


def test_br_14_another_seed_changes_random_choices_only() -> None:
    """The seed reaches the core's generator, and nothing else is random."""
    config = scenario(rollout__routing={"type": "random"}, run__num_rollout=6)
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
    routes = [[a.engine for _, a in Scripted(c).run().of(do.StartTurn)] for c in (config, other)]
    assert routes[0] != routes[1] and len(routes[0]) == len(routes[1])
