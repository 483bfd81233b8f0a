"""What is to happen, in order: calls at exact absolute times, by (time, priority, number).

The part of the virtual clock that every event passes. It refuses to know priority classes, host time and SimPy.

Not a heap, whose entries are compared ten times each before they are first. Calls that are far away are only collected.
When the near ones have happened, the far ones are sorted, which is little work as most of them were sorted before, and
the first quarter of them is near.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from math import inf
from operator import itemgetter
from typing import Any, Final

Callback = Callable[[Any], object]

_TIME: Final = itemgetter(0)
_insort: Final = insort
_AT_LEAST = 16
"""So many calls become near at once, if there are as many."""


def ignore(arg: Any) -> None:
    """What a cancelled call does."""


class Call:
    """One scheduled callback that can be cancelled."""

    __slots__ = ("arg", "callback")

    def __init__(self, callback: Callback, arg: Any) -> None:
        self.callback = callback
        self.arg = arg

    def cancel(self) -> None:
        """Do nothing when the time comes. O(1): the entry stays in the agenda and is still counted as an event."""
        self.callback = ignore
        self.arg = None


def _make(call: Call) -> None:
    call.callback(call.arg)


class Agenda:
    """Calls to come, each one tuple: (time, priority, number, callback, argument). `now` in seconds."""

    __slots__ = ("_far", "_horizon", "_near", "_next", "events", "now", "number", "stopped")

    def __init__(self, now: float) -> None:
        self.now = now
        self._near: list[Any] = []
        """Calls up to the horizon, in order; those before the `_next`-th have happened and are None."""
        self._next = 0
        self._far: list[Any] = []
        """Calls beyond the horizon: first those that were sorted, then those that have come since."""
        self._horizon = -inf
        """Seconds."""
        self.number = 0
        """Calls entered so far."""
        self.events = 0
        """Calls that have happened."""
        self.stopped = False
        """Set by a callback: `run` returns after it."""

    @property
    def next_t(self) -> float:
        """Time of the first call; infinite if there is none."""
        return self._near[self._next][0] if self._is_any() else inf

    def put(self, time: float, priority: int, callback: Callback, arg: Any) -> None:
        """Call `callback(arg)` at `time` (s, absolute), after everything of the same time with a lower priority
        number or the same number and an earlier `put`.

        Raises ValueError if `time` is before now or not a number.
        """
        if not time >= self.now:
            raise ValueError(f"time {time!r} s is before now ({self.now!r} s)")
        self.number = number = self.number + 1
        if time > self._horizon:
            self._far.append((time, priority, number, callback, arg))
        else:
            _insort(self._near, (time, priority, number, callback, arg), self._next)

    def at(self, time: float, priority: int, callback: Callback, arg: Any = None) -> Call:
        """As `put`, with a handle to cancel it by."""
        call = Call(callback, arg)
        self.put(time, priority, _make, call)
        return call

    def _is_any(self) -> bool:
        """Whether there are calls; then the first of them is near."""
        if self._next == len(self._near) and self._far:
            self._come_near()
        return self._next < len(self._near)

    def _come_near(self) -> None:
        """No call is near any more: the first of the far ones are from now on."""
        far = self._far
        far.sort(key=_TIME)  # floats alone compare fast
        total = len(far)
        count = min(max(_AT_LEAST, total >> 2), total)
        horizon: float = far[count - 1][0]
        while count < total and far[count][0] == horizon:
            count += 1
        self._near = near = far[:count]
        for place in range(1, count):
            if near[place][0] == near[place - 1][0]:  # calls of one time are in no order yet
                near.sort()
                break
        self._next = 0
        self._horizon = horizon
        del far[:count]

    def step(self) -> None:
        """The first call happens. Raises IndexError if there is none."""
        if not self._is_any():
            raise IndexError("nothing is to happen")
        near, place = self._near, self._next
        call: tuple[float, int, int, Callback, Any] = near[place]
        near[place] = None
        self._next = place + 1
        self.now, _, _, callback, arg = call
        self.events += 1
        callback(arg)

    def run(self, most: int, until: float) -> None:
        """Up to `most` calls; fewer if there is none any more up to `until` (s), or `stopped` is set meanwhile."""
        done = 0
        while done < most and not self.stopped and self._is_any():
            t: float = self._near[self._next][0]
            if t > until:
                break
            self.step()
            done += 1
