"""Tool servers, verifiers and environments: who waits, for how long, and what late reclamation costs (AP-06)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.clock import ARRIVE, Clock
from sim.tools import Environments, Station


def makespan(slots: int, services: list[float]) -> float:
    clock = Clock()
    station = Station(clock, slots)
    for service_s in services:
        station.submit(service_s, lambda _: None)
    clock.run()
    return clock.now


def test_ap_06_doubling_tool_slots_halves_the_makespan_when_tools_are_the_bottleneck() -> None:
    services = [1.0] * 12
    assert makespan(2, services) == 6.0
    assert makespan(4, services) == 3.0
    assert makespan(0, services) == 1.0


def test_ap_06_the_queue_is_first_come_first_served() -> None:
    clock, seen = Clock(), []
    station = Station(clock, 1)
    for name, service_s in (("long", 5.0), ("short", 1.0), ("middle", 2.0)):
        station.submit(service_s, lambda name: seen.append((name, clock.now)), name)
    assert station.busy == 1 and station.queued == 2 and station.most_queued == 2
    clock.run()
    assert seen == [("long", 5.0), ("short", 6.0), ("middle", 8.0)]
    assert station.wait_s == 5.0 + 6.0
    assert station.service_s == station.busy_area_s == 8.0


def test_ap_06_a_callback_that_submits_again_queues_behind_those_who_waited() -> None:
    clock, seen = Clock(), []
    station = Station(clock, 1)

    def done(name: str) -> None:
        seen.append((name, clock.now))
        if name == "a":
            station.submit(1.0, done, "a again")

    for name in ("a", "b"):
        station.submit(1.0, done, name)
    clock.run()
    assert seen == [("a", 1.0), ("b", 2.0), ("a again", 3.0)]


def test_a_slot_freed_at_an_instant_serves_an_arrival_of_that_instant() -> None:
    clock = Clock()
    station = Station(clock, 1)
    for k in range(10):
        clock.at(float(k), ARRIVE, lambda _: station.submit(1.0, lambda _: None))
    clock.run()
    assert station.wait_s == 0.0 and clock.now == 10.0


def test_negative_slots_are_refused() -> None:
    for model in (Station, Environments):
        with pytest.raises(ValueError, match="slots must be >= 0"):
            model(Clock(), -1)


# --- environments -----------------------------------------------------------------------------------------------------


def hold(slots: int, count: int, prepare_s: float, hold_s: float, release_s: float) -> Environments:
    """`count` trajectories, all there at 0, that hold their environment for `hold_s` seconds."""
    clock = Clock()
    environments = Environments(clock, slots)

    def ready(key: int) -> None:
        clock.at(clock.now + hold_s, ARRIVE, lambda key: environments.release(key, release_s), key)

    for key in range(count):
        environments.prepare(key, prepare_s, ready, key)
    clock.run()
    return environments


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 1.0, 4.0]))
def test_ap_06_late_reclamation_shrinks_effective_slots(
    slots: int, count: int, prepare_s: float, release_s: float
) -> None:
    """All times constant: ceil(count / slots) rounds of prepare + hold + release; a release delays the next."""
    environments = hold(slots, count, prepare_s, 1.0, release_s)
    assert environments.clock.now == math.ceil(count / slots) * (prepare_s + 1.0 + release_s)
    assert environments.wait_s == sum(k // slots for k in range(count)) * (prepare_s + 1.0 + release_s)


def test_ap_03_every_environment_is_reclaimed() -> None:
    environments = hold(3, 10, 0.5, 1.0, 0.25)
    assert environments.alive == environments.waiting == 0
    assert environments.prepared == environments.released == 10
    assert (environments.prepare_s, environments.held_s, environments.release_s) == (5.0, 10.0, 2.5)


def test_ap_03_one_that_waits_leaves_the_queue_when_its_trajectory_is_aborted() -> None:
    clock, seen = Clock(), []
    environments = Environments(clock, 1)
    for key in range(3):
        environments.prepare(key, 1.0, lambda key: seen.append((key, clock.now)), key)
    clock.at(0.5, ARRIVE, lambda _: environments.release(1, 0.0))
    clock.at(4.0, ARRIVE, lambda _: environments.release(0, 2.0))
    clock.at(9.0, ARRIVE, lambda _: environments.release(2, 0.0))
    clock.run()
    assert seen == [(0, 1.0), (2, 7.0)]  # 0 is held to 4 and reclaimed to 6; 1 never starts; 2 prepares from 6 to 7
    assert environments.alive == environments.waiting == 0
    assert environments.wait_s == 0.5 + 6.0


def test_ap_03_one_in_preparation_is_reclaimed_once_prepared_and_never_reported_ready() -> None:
    clock, seen = Clock(), []
    environments = Environments(clock, 1)
    environments.prepare(7, 3.0, seen.append, 7)
    environments.prepare(8, 1.0, lambda key: seen.append((key, clock.now)), 8)
    clock.at(1.0, ARRIVE, lambda _: environments.release(7, 0.5))
    clock.run()
    assert seen == [(8, 4.5)]
    assert environments.alive == 1 and environments.held_s == 0.0


def test_releasing_twice_and_preparing_twice_are_errors() -> None:
    clock = Clock()
    environments = Environments(clock)
    environments.prepare(1, 0.0, lambda _: None)
    with pytest.raises(ValueError, match="environment 1 exists already"):
        environments.prepare(1, 0.0, lambda _: None)
    clock.run()
    environments.release(1, 0.0)
    with pytest.raises(KeyError):
        environments.release(1, 0.0)
