"""Skipping runs of decode steps gives what going through every iteration gives, and nothing is lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import Aborted, EngineModel, Finished, Paused
from tests.support.engine_workloads import Driver, random_workload, same

COUNTERS = ("iterations", "steps", "prefill_tokens", "cached_tokens", "recomputed_tokens", "retractions")
SECONDS = ("prefill_s", "recompute_s", "decode_s")


def both(seed: int, **fixed):
    drivers = []
    for mode in ("iterate", "skip"):
        work = random_workload(seed, **fixed)
        engine = EngineModel(work.options, work.costs, mode)
        engine.cache.log = []
        drivers.append(Driver(work, engine).run())
    return drivers


def assert_same(seed: int, **fixed) -> list[Driver]:
    iterate, skip = both(seed, **fixed)
    assert len(iterate.said) == len(skip.said)
    for a, b in zip(iterate.said, skip.said, strict=True):
        assert same(a, b), (a, b)
    assert iterate.flushed == skip.flushed
    a, b = iterate.engine, skip.engine
    for name in COUNTERS:
        assert getattr(a, name) == getattr(b, name), name
    for name in SECONDS:
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-11, abs=1e-12), name
    assert [(w, g) for w, g, _ in a.cache.log] == [(w, g) for w, g, _ in b.cache.log], "evictions, wanted and got"
    assert (a.cache.free, a.cache.evictable) == (b.cache.free, b.cache.evictable)
    assert a.ratio.value() == b.ratio.value()
    return [iterate, skip]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_skip_equals_iterate(seed: int) -> None:
    """Arrivals, shared prefixes, aborts, pauses of each mode with new versions, retraction, chunks: all fields, times
    to 1e-12."""
    assert_same(seed)


@pytest.mark.parametrize("forward", ["device", "host"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_skip_equals_iterate_in_every_configuration(forward: str, overlap: bool, page: int, policy: str) -> None:
    for seed in range(4):
        assert_same(seed, forward=forward, disable_overlap_schedule=not overlap, page_size=page, schedule_policy=policy)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "fixed",
    [
        {"enable_priority_scheduling": True},
        {"enable_priority_scheduling": True, "disable_priority_preemption": True, "retraction_policy": "priority"},
        {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True, "prefill_decode_interval": 3},
        {"prefill_decode_interval": 2},
        {"prefill_decode_interval": 9, "prefill_decode_interval_min_bs": 3},
    ],
    ids=["preempting", "priority", "low first", "interval", "interval from 3"],
)
def test_skip_equals_iterate_with_priorities_and_intervals(fixed: dict[str, object], overlap: bool) -> None:
    for seed in range(12):
        assert_same(seed, schedule_policy="fcfs", disable_overlap_schedule=not overlap, **fixed)


def test_the_workloads_reach_what_they_are_for() -> None:
    """The property test would be empty if nothing were retracted, aborted, paused or evicted."""
    retractions = aborts = pauses = evictions = spans = again = 0
    saved = [0, 0]
    for seed in range(120):
        iterate, skip = assert_same(seed)
        retractions += skip.engine.retractions
        aborts += sum(isinstance(n, Aborted) for n in skip.said)
        pauses += sum(isinstance(n, Paused) for n in skip.said)
        finished = [n for n in skip.said if isinstance(n, Finished)]
        spans += sum(len(n.spans) > 1 for n in finished)
        again += sum(n.recomputed_tokens > 0 for n in finished)
        evictions += sum(got > 0 for _, got, _ in skip.engine.cache.log)
        saved[0] += iterate.wake_ups
        saved[1] += skip.wake_ups
    assert min(retractions, spans) >= 5
    assert min(aborts, pauses, evictions, again) >= 50
    assert saved[1] < saved[0] / 3


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_reading_counters_changes_nothing(seed: int) -> None:
    """`sync` in the middle of runs leaves every result as it was (times to rounding)."""
    results = []
    for every in (0.0, 0.113):
        work = random_workload(seed)
        results.append(Driver(work, EngineModel(work.options, work.costs), sync_every=every).run().said)
    assert len(results[0]) == len(results[1])
    assert all(same(a, b, 1e-11) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("page", [1, 16])
def test_skip_equals_iterate_with_host_memory(page: int, policy: str) -> None:
    """Two tiers, loading that is now hidden and now not; some of it is used."""
    loads = 0
    for seed in range(12):
        fixed = {"page_size": page, "schedule_policy": policy, "load_back_tokens_per_s": 2e3}
        with_host = assert_same(seed, host_tokens=4096, **fixed)[1].engine
        without = both(seed, **fixed)[1].engine
        loads += with_host.prefill_tokens != without.prefill_tokens
    assert loads >= 3
