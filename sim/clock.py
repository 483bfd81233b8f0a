"""The virtual clock: SimPy's event loop with plain callbacks at exact absolute times.

Responsible for the order of what happens: (time, priority class, sequence number), the same in every run. It
refuses to know what a callback does, host time, and processes per request: one pending call per engine, trainer,
link or tool is all that models need.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

import simpy
from msgspec import Struct
from simpy.core import EmptySchedule

# Priority classes: what goes first among calls of one instant. Gaps leave room; SimPy's own events use 0 (urgent)
# and 1 (normal), so `run(until=t)` stops before anything of instant t happens.
COMPLETE = 10
"""A tool, verifier, link or trainer is done. First, because what it frees can be taken at the same instant (D/D/1
never waits)."""
WEIGHTS = 20
"""A step of a weight update. After completions: work that ends at the instant of a pause has ended before it."""
ARRIVE = 30
"""New work arrives. After completions and versions: it sees the free slots and the version of this instant."""
ENGINE = 40
"""An engine's wake-up. After arrivals: an iteration takes in every request that came no later than its start."""
TIMER = 50
"""Timers of the core. After all work of the instant, so that a tick decides on a settled state."""
REPORT = 60
"""Load reports and samples: they read and change nothing, so they read what everything else has left behind."""
WATCHDOG = 70
"""Last: only if the whole instant brought no progress is anything stuck."""


def ignore(arg: Any) -> None:
    """What a cancelled call does."""


class Call(Struct, eq=False):
    """One scheduled callback that can be cancelled."""

    callback: Callable[[Any], object]
    arg: Any

    def cancel(self) -> None:
        """Do nothing when the time comes. O(1): the entry stays in the heap and is still counted as an event."""
        self.callback = ignore
        self.arg = None


def _make(call: Call) -> None:
    call.callback(call.arg)


class Clock(simpy.Environment):
    """Virtual time in seconds. `events` counts the calls and SimPy events that have happened.

    A time is never a sum the clock makes: `at` takes the absolute time, and `now` is exactly that float when the
    callback runs.
    """

    def __init__(self, initial_time: float = 0.0) -> None:
        super().__init__(initial_time)
        self.events = 0
        self.stopped = False
        """Set by a callback: `run_events` returns after it."""
        # SimPy's own heap. A call is an entry of five, (time, priority, number, callback, argument): one tuple is all
        # that it costs. SimPy's own entries are of four, and end with the event.
        self._heap: list[Any] = self._queue

    def at(self, time: float, priority: int, callback: Callable[[Any], object], arg: Any = None) -> Call:
        """Call `callback(arg)` at `time` (s, absolute), after everything of the same time with a lower priority
        number or the same number and an earlier `at`.

        Raises ValueError if `time` is before now or not a number.
        """
        if not time >= self._now:
            raise ValueError(f"time {time!r} s is before now ({self._now!r} s)")
        call = Call(callback, arg)
        heappush(self._heap, (time, priority, next(self._eid), _make, call))
        return call

    def put(self, time: float, priority: int, callback: Callable[[Any], object], arg: Any) -> None:
        """As `at`, without a handle to cancel it by."""
        if not time >= self._now:
            raise ValueError(f"time {time!r} s is before now ({self._now!r} s)")
        heappush(self._heap, (time, priority, next(self._eid), callback, arg))

    def step(self) -> None:
        """The next event; SimPy's `step` with a short way for calls. Raises EmptySchedule if nothing is scheduled."""
        queue = self._heap
        if not queue:
            raise EmptySchedule
        self.events += 1
        if len(queue[0]) != 5:  # not a call
            super().step()
            return
        entry = heappop(queue)
        self._now = entry[0]
        entry[3](entry[4])

    def run_events(self, most: int, until: float = inf) -> None:
        """Up to `most` events; fewer if nothing is scheduled any more up to `until` (s), or `stopped` is set
        meanwhile."""
        queue = self._heap
        done = 0
        while queue and done < most and not self.stopped:
            entry = queue[0]
            time = entry[0]
            if time > until:
                break
            if len(entry) == 5:  # a call
                heappop(queue)
                self._now = time
                done += 1
                entry[3](entry[4])
            else:
                self.step()
        self.events += done
