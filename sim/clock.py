"""The virtual clock: SimPy's event loop with plain callbacks at exact absolute times.

Responsible for the order of what happens: (time, priority class, sequence number), the same in every run. `agenda`
keeps it, SimPy's own events among the calls. It refuses to know what a callback does, host time, and processes per
request: one pending call per engine, trainer, link or tool is all that models need.
"""

from __future__ import annotations

from math import inf
from typing import Any, Final

import simpy
from simpy import events as simpys
from simpy.core import EmptySchedule

from sim.agenda import Agenda, Call, Callback

# Priority classes: what goes first among calls of one instant. Gaps leave room; SimPy's own events use 0 (urgent)
# and 1 (normal), so `run(until=t)` stops before anything of instant t happens.
COMPLETE: Final = 10
"""A tool, verifier, link or trainer is done. First, because what it frees can be taken at the same instant (D/D/1
never waits)."""
WEIGHTS: Final = 20
"""A step of a weight update. After completions: work that ends at the instant of a pause has ended before it."""
ARRIVE: Final = 30
"""New work arrives. After completions and versions: it sees the free slots and the version of this instant."""
ENGINE: Final = 40
"""An engine's wake-up. After arrivals: an iteration takes in every request that came no later than its start."""
TIMER: Final = 50
"""Timers of the core. After all work of the instant, so that a tick decides on a settled state."""
REPORT: Final = 60
"""Load reports and samples: they read and change nothing, so they read what everything else has left behind."""
WATCHDOG: Final = 70
"""Last: only if the whole instant brought no progress is anything stuck."""


class Clock(simpy.Environment):
    """Virtual time in seconds. `events` counts the calls and SimPy events that have happened.

    A time is never a sum the clock makes: `at` takes the absolute time, and `now` is exactly that float when the
    callback runs.
    """

    def __init__(self, initial_time: float = 0.0) -> None:
        self.agenda = Agenda(initial_time)
        """For models that are asked often."""
        super().__init__(initial_time)

    @property
    def now(self) -> float:
        return self.agenda.now

    @property
    def _now(self) -> float:
        return self.agenda.now

    @_now.setter
    def _now(self, time: float) -> None:
        self.agenda.now = time

    @property
    def events(self) -> int:
        return self.agenda.events

    def stop(self) -> None:
        """Called by a callback: `run_events` returns after it."""
        self.agenda.stopped = True

    @property
    def stopped(self) -> bool:
        return self.agenda.stopped

    @property
    def next_t(self) -> float:
        """`Agenda.next_t`."""
        return self.agenda.next_t

    def at(self, time: float, priority: int, callback: Callback, arg: Any = None) -> Call:
        """`Agenda.at`."""
        return self.agenda.at(time, priority, callback, arg)

    def schedule(self, event: simpy.Event, priority: int = simpys.NORMAL, delay: float = 0) -> None:
        """One of SimPy's own events: a call like any other."""
        self.agenda.put(self.agenda.now + delay, priority, self._happen, event)

    def _happen(self, event: simpy.Event) -> None:
        self._queue.append((self.agenda.now, simpys.NORMAL, 0, event))  # SimPy's `step` takes it from here
        super().step()

    def peek(self) -> float:
        return self.agenda.next_t

    def step(self) -> None:
        """The next event. Raises EmptySchedule if nothing is scheduled."""
        if self.agenda.next_t == inf:
            raise EmptySchedule
        self.agenda.step()

    def run_events(self, most: int, until: float = inf) -> None:
        """`Agenda.run`."""
        self.agenda.run(most, until)
