"""What is to happen, in order: calls at exact absolute times, by (time, priority, number).

The part of the virtual clock that every event passes. It refuses to know priority classes, host time and SimPy: entries
that are not calls are handed to whoever runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Callback = Callable[[Any], object]


def ignore(arg: Any) -> None:
    """What a cancelled call does."""


class Call:
    """One scheduled callback that can be cancelled."""

    __slots__ = ("arg", "callback")

    def __init__(self, callback: Callback, arg: Any) -> None:
        self.callback = callback
        self.arg = arg

    def cancel(self) -> None:
        """Do nothing when the time comes. O(1): the entry stays in the heap and is still counted as an event."""
        self.callback = ignore
        self.arg = None


def _make(call: Call) -> None:
    call.callback(call.arg)


class Agenda:
    """A heap of calls, each one tuple: (time, priority, number, callback, argument). `now` in seconds."""

    __slots__ = ("events", "heap", "now", "number", "stopped")

    def __init__(self, now: float) -> None:
        self.now = now
        self.heap: list[Any] = []
        self.number = 0
        """Entries made so far."""
        self.events = 0
        """Entries that have happened."""
        self.stopped = False
        """Set by a callback: `run` returns after it."""

    def next_number(self) -> int:
        self.number = number = self.number + 1
        return number

    def put(self, time: float, priority: int, callback: Callback, arg: Any) -> None:
        """Call `callback(arg)` at `time` (s, absolute), after everything of the same time with a lower priority
        number or the same number and an earlier `put`.

        Raises ValueError if `time` is before now or not a number.
        """
        if not time >= self.now:
            raise ValueError(f"time {time!r} s is before now ({self.now!r} s)")
        self.number = number = self.number + 1
        heappush(self.heap, (time, priority, number, callback, arg))

    def at(self, time: float, priority: int, callback: Callback, arg: Any = None) -> Call:
        """As `put`, with a handle to cancel it by."""
        call = Call(callback, arg)
        self.put(time, priority, _make, call)
        return call

    def run(self, most: int, until: float, other: Callable[[], None]) -> None:
        """Up to `most` entries; fewer if there is none any more up to `until` (s), or `stopped` is set meanwhile.

        `other` makes the first entry happen if it is not a call, and counts it.
        """
        heap = self.heap
        done = 0
        while heap and done < most and not self.stopped:
            entry = heap[0]
            time: float = entry[0]
            if time > until:
                break
            if len(entry) == 5:
                heappop(heap)
                self.now = time
                done += 1
                entry[3](entry[4])
            else:
                other()
        self.events += done
