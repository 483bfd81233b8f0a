"""Engines and a trainer on one machine slow each other down while they work (memory bandwidth, caches, cores).

While the trainer or other engines work, an engine takes its steps from a slower cost model; while engines work, the
trainer's jobs go on at a lower speed. By how much, a calibration says that had all engines work; with a part of them, a
job and a step take that part of the extra time. It refuses to know what the jobs are and why engines work.
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
    """`slow_down`: how much longer the trainer's jobs take while all `engines` work. `costs` answers with an engine's
    step times while the trainer works or not, and that part of the other engines; `switch` has the engine of an index
    take its steps from them from now on."""

    def __init__(
        self,
        clock: Clock,
        costs: Callable[[bool, float], CostModel],
        slow_down: float,
        engines: int,
        switch: Callable[[int, CostModel], None],
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._longer_by_each = (slow_down - 1.0) / engines
        self._switch = switch
        self._jobs: list[Job] = []
        self._working: set[int] = set()
        """Engines that work."""
        self._others = max(engines - 1, 1)
        self._alone = engines == 1
        self._given = [costs(False, 1.0)] * engines
        """What each engine takes its steps from; at first, as while all work."""
        for index in range(engines):
            self._give(index)

    def engine_works(self, index: int, works: bool) -> None:
        """Said again when nothing has changed, it changes nothing."""
        if (index in self._working) == works:
            return
        speed = self._speed
        if works:
            self._working.add(index)
        else:
            self._working.discard(index)
        if self._speed != speed:
            for job in self._jobs:
                self._aim(job, speed)
        for other in range(len(self._given)):
            if other != index:
                self._give(other)

    def joins(self, index: int) -> CostModel:
        """The step times that a new engine in this place begins with."""
        return self._given[index]

    def _give(self, index: int) -> None:
        """The engine's step times in the state of the machine."""
        others = 1.0 if self._alone else (len(self._working) - (index in self._working)) / self._others
        costs = self._costs(bool(self._jobs), others)
        if costs is not self._given[index]:
            self._given[index] = costs
            self._switch(index, costs)

    def work(self, seconds: float, done: Callable[[Any], None], arg: Any) -> None:
        """The trainer begins what takes `seconds` alone; `done(arg)` when it is over."""
        job = Job(seconds, self._clock.now, done, arg)
        self._jobs.append(job)
        self._aim(job, self._speed)
        if len(self._jobs) == 1:
            self._give_all()

    def _give_all(self) -> None:
        for index in range(len(self._given)):
            self._give(index)

    @property
    def _speed(self) -> float:
        return 1.0 / (1.0 + self._longer_by_each * len(self._working))

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
            self._give_all()


def shared_machine(
    scenario: Scenario, clock: Clock, costs: CostModel, engines: int, switch: Callable[[int, CostModel], None]
) -> SharedMachine | None:
    """None where nothing was measured. Engines and a trainer that take turns slow only each other engine down."""
    if not isinstance(costs, CalibratedCostModel) or not costs.shared:
        return None
    if scenario.placement.mode == "colocated":
        if not costs.crowded:
            return None
        return SharedMachine(clock, lambda trainer, others: costs.among(False, others), 1.0, engines, switch)
    return SharedMachine(clock, costs.among, costs.beside.train, engines, switch)
