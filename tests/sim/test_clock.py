"""The clock: exact times, the stated order at equal times, and SimPy's own events beside plain calls."""

from __future__ import annotations

import math

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import clock as priorities
from sim.clock import ARRIVE, COMPLETE, ENGINE, REPORT, TIMER, WATCHDOG, WEIGHTS, Clock


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3, 2.5]), st.sampled_from([COMPLETE, ARRIVE, TIMER])), max_size=30)
)
def test_order_is_time_then_priority_class_then_sequence_number(calls: list[tuple[float, int]]) -> None:
    clock, seen = Clock(), []
    for number, (time, priority) in enumerate(calls):
        clock.at(time, priority, seen.append, (time, priority, number))
    clock.run()
    assert seen == sorted((time, priority, number) for number, (time, priority) in enumerate(calls))
    assert clock.events == len(calls)


def test_now_is_exactly_the_time_asked_for() -> None:
    """In binary 0.1 + 0.2 is not 0.3: a clock that adds delays would lose the last bits, of 1e9 + 1/3 most of all."""
    clock, seen = Clock(), []
    times = [0.1, 0.3, 1.0 / 3.0, 1e9 + 1.0 / 3.0, math.nextafter(1e9 + 1.0 / 3.0, math.inf)]

    def note(rest: list[float]) -> None:
        seen.append(clock.now)
        if rest:
            clock.at(rest[0], COMPLETE, note, rest[1:])

    clock.at(0.1, COMPLETE, note, sorted(times)[1:])
    clock.run()
    assert seen == sorted(times)


def test_a_call_made_now_for_now_happens_now_after_what_was_there_before() -> None:
    clock, seen = Clock(), []

    def first(_: None) -> None:
        seen.append("first")
        clock.at(clock.now, COMPLETE, seen.append, "third")

    clock.at(1.0, COMPLETE, first)
    clock.at(1.0, COMPLETE, seen.append, "second")
    clock.at(1.0, ARRIVE, seen.append, "fourth")
    clock.run()
    assert seen == ["first", "second", "third", "fourth"]
    assert clock.now == 1.0


def test_classes_are_ordered_and_after_simpys_urgent_events() -> None:
    assert 0 < COMPLETE < WEIGHTS < ARRIVE < ENGINE < TIMER < REPORT < WATCHDOG
    clock, seen = Clock(), []
    clock.at(5.0, COMPLETE, seen.append, "not yet")
    clock.run(until=5.0)
    assert seen == [] and clock.now == 5.0


@pytest.mark.parametrize("time", [0.5, -1.0, math.nan])
def test_a_time_before_now_is_refused(time: float) -> None:
    clock = Clock()
    clock.at(1.0, COMPLETE, lambda _: None)
    clock.run()
    with pytest.raises(ValueError, match="is before now"):
        clock.at(time, COMPLETE, lambda _: None)


def test_a_cancelled_call_does_nothing() -> None:
    clock, seen = Clock(), []
    call = clock.at(1.0, COMPLETE, seen.append, "cancelled")
    clock.at(2.0, COMPLETE, seen.append, "kept")
    call.cancel()
    clock.run()
    assert seen == ["kept"] and clock.events == 2


def test_simpy_processes_run_beside_calls_and_are_counted() -> None:
    clock, seen = Clock(), []

    def process(env: simpy.Environment):
        yield env.timeout(1.5)
        seen.append(("process", env.now))

    clock.process(process(clock))
    clock.at(1.0, COMPLETE, lambda _: seen.append(("call", clock.now)))
    clock.at(2.0, COMPLETE, lambda _: seen.append(("call", clock.now)))
    clock.run()
    assert seen == [("call", 1.0), ("process", 1.5), ("call", 2.0)]
    assert clock.events == 5  # two calls; the process's start, timeout and end


def test_an_error_in_a_callback_comes_out_of_the_run() -> None:
    clock = Clock()
    clock.at(1.0, COMPLETE, lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clock.run()


def test_every_priority_class_has_its_own_number() -> None:
    names = [name for name in vars(priorities) if name.isupper()]
    assert len({getattr(priorities, name) for name in names}) == len(names) == 7
