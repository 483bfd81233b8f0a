"""Engines and a trainer on one machine slow each other down while both work (memory bandwidth, caches).

While the trainer works, engines take their steps from a slower cost model; while engines work, the trainer's jobs go
on at a lower speed. By how much, a calibration says that had all engines work; with a part of them, a job takes that
part of the extra time. It refuses to know what the jobs are and why engines work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.agenda import Call
from sim.clock import COMPLETE, Clock
from sim.costs.base import CostModel
from sim.costs.calibrated import CalibratedCostModel
from testbed.scenario import Scenario


class Job:
    """Work of the trainer under way: seconds that it has left, at full speed."""

    __slots__ = ("arg", "call", "done", "left", "since")

    def __init__(self, left: float, since: float, done: Callable[[Any], None], arg: Any) -> None:
        self.left = left
        self.since = since
        self.done = done
        self.arg = arg
        self.call: Call | None = None


class SharedMachine:
    """`slow_down`: how much longer the trainer's jobs take while all `engines` work. `switch` has every engine take its
    steps from these costs from now on."""

    def __init__(
        self,
        clock: Clock,
        alone: CostModel,
        beside: CostModel,
        slow_down: float,
        engines: int,
        switch: Callable[[CostModel], None],
    ) -> None:
        self._clock = clock
        self._alone = alone
        self._beside = beside
        self._longer_by_each = (slow_down - 1.0) / engines
        self._switch = switch
        self._jobs: list[Job] = []
        self._slowed = False
        """Whether engines are."""
        self._engines: set[int] = set()
        """Those that work."""

    def engine_works(self, index: int, works: bool) -> None:
        """Said again when nothing has changed, it changes nothing."""
        if (index in self._engines) == works:
            return
        speed = self._speed
        if works:
            self._engines.add(index)
        else:
            self._engines.discard(index)
        if self._speed != speed:
            for job in self._jobs:
                self._aim(job, speed)

    def work(self, seconds: float, done: Callable[[Any], None], arg: Any) -> None:
        """The trainer begins what takes `seconds` alone; `done(arg)` when it is over."""
        job = Job(seconds, self._clock.now, done, arg)
        self._jobs.append(job)
        self._aim(job, self._speed)
        if not self._slowed:
            self._slowed = True
            self._switch(self._beside)

    @property
    def _speed(self) -> float:
        return 1.0 / (1.0 + self._longer_by_each * len(self._engines))

    def _aim(self, job: Job, speed: float) -> None:
        """Its end, now that the speed is no longer `speed`."""
        now = self._clock.now
        job.left = max(job.left - (now - job.since) * speed, 0.0)
        job.since = now
        if job.call is not None:
            job.call.cancel()
        job.call = self._clock.at(now + job.left / self._speed, COMPLETE, self._over, job)

    def _over(self, job: Job) -> None:
        self._jobs.remove(job)
        job.done(job.arg)
        if not self._jobs:
            self._slowed = False
            self._switch(self._alone)


def shared_machine(
    scenario: Scenario, clock: Clock, costs: CostModel, engines: int, switch: Callable[[CostModel], None]
) -> SharedMachine | None:
    """None where nothing was measured, or engines and trainer take turns."""
    if not isinstance(costs, CalibratedCostModel) or costs.beside is None or scenario.placement.mode == "colocated":
        return None
    beside, slow_down = costs.beside
    return SharedMachine(clock, costs, beside, slow_down, engines, switch)
