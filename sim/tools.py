"""Queues outside the GPUs: tool servers, verifiers, and the environments that trajectories live in.

Responsible for who waits and for how long. It refuses to know how long a service takes (that is in the workload's
plan) and what becomes of the result: a station is told seconds and calls back. No process per request: one pending
call per busy slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sim.agenda import Callback, ignore
from sim.clock import COMPLETE, Clock

Done = Callable[[Any], object]


class Job:
    """One request at a station. Times in seconds; `started` is -1 while it waits."""

    __slots__ = ("arg", "arrived", "done", "service_s", "started")

    def __init__(self, arrived: float, service_s: float, done: Done, arg: Any, started: float = -1.0) -> None:
        self.arrived = arrived
        self.service_s = service_s
        self.done = done
        self.arg = arg
        self.started = started


class Station:
    """`slots` equal servers and one FIFO queue (G/G/c); `slots` = 0: as many servers as needed (G/G/inf).

    A freed slot is given to the head of the queue before the finished job's callback runs, so a callback that
    submits again queues behind those who waited. Totals since the start, read with `settle` when the areas are
    wanted at a given time:

    - `arrived`, `completed`: jobs; `queued`, `busy`: jobs waiting and in service now; `most_queued`: the longest queue;
    - `wait_s`: waiting time of all started jobs; `service_s`: service time of all completed jobs; `sojourn_s`:
      their time in all;
    - `queued_area_s`, `busy_area_s`: integrals over time of `queued` and `busy` (job-seconds). Little's law is
      their identity with `wait_s` and `service_s` when the station is empty.
    """

    __slots__ = (
        "_agenda",
        "_on_finish",
        "_queue",
        "_settled",
        "arrived",
        "busy",
        "busy_area_s",
        "clock",
        "completed",
        "most_queued",
        "queued_area_s",
        "service_s",
        "slots",
        "sojourn_s",
        "wait_s",
    )

    def __init__(self, clock: Clock, slots: int = 0) -> None:
        if slots < 0:
            raise ValueError(f"slots must be >= 0, not {slots}")
        self.clock = clock
        self._agenda = clock.agenda
        self.slots = slots
        self._queue: deque[Job] = deque()
        self._on_finish: Callback = self._finish
        """Made once: a bound method is an object."""
        self._settled = clock.agenda.now
        self.arrived = self.completed = self.busy = self.most_queued = 0
        self.wait_s = self.service_s = self.sojourn_s = self.queued_area_s = self.busy_area_s = 0.0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def taken(self) -> bool:
        """Whether a job would have to wait."""
        return 0 < self.slots <= self.busy

    def submit(self, service_s: float, done: Done, arg: Any = None) -> Job:
        """Serve for `service_s` seconds when a slot is free, then call `done(arg)`."""
        now = self._agenda.now
        self.settle(now)
        self.arrived += 1
        if self.slots == 0 or self.busy < self.slots:
            job = Job(now, service_s, done, arg, now)
            self.busy += 1
            self._agenda.put(now + service_s, COMPLETE, self._on_finish, job)
        else:
            job = Job(now, service_s, done, arg)
            self._queue.append(job)
            self.most_queued = max(self.most_queued, len(self._queue))
        return job

    def settle(self, now: float) -> None:
        """Bring the areas up to `now`."""
        elapsed = now - self._settled
        if elapsed > 0.0:
            if self._queue:
                self.queued_area_s += elapsed * len(self._queue)
            self.busy_area_s += elapsed * self.busy
            self._settled = now

    def _start(self, job: Job, now: float) -> None:
        """The head of the queue gets a slot that has come free."""
        job.started = now
        self.busy += 1
        self.wait_s += now - job.arrived
        self._agenda.put(now + job.service_s, COMPLETE, self._on_finish, job)

    def _finish(self, job: Job) -> None:
        now = self._agenda.now
        self.settle(now)
        self.busy -= 1
        self.completed += 1
        self.service_s += now - job.started
        self.sojourn_s += now - job.arrived
        if self._queue:
            self._start(self._queue.popleft(), now)
        job.done(job.arg)


class _Environment:
    """One trajectory's environment. `state`: waiting, preparing, held, releasing."""

    __slots__ = ("arg", "arrived", "key", "prepare_s", "ready", "release_s", "since", "state")

    def __init__(self, key: int, arrived: float, prepare_s: float, ready: Done, arg: Any) -> None:
        self.key = key
        self.state = "waiting"
        self.arrived = arrived
        self.since = arrived
        self.prepare_s = prepare_s
        self.release_s = -1.0
        self.ready = ready
        self.arg = arg


class Environments:
    """A limited number of environments alive at once (0: as many as needed), each prepared, held over all turns,
    and reclaimed.

    The slot stays taken from the start of preparation to the end of reclamation, so slow reclamation shortens the
    supply. n that are prepared at once take 1 + (n / `slows_at`)^2 times as long each, by the n at its start. Totals in
    seconds over environments: `wait_s`, `prepare_s`, `held_s`, `release_s`; `alive` slots taken
    and `waiting` requests now; `prepared` and `released` count environments.
    """

    __slots__ = (
        "_environments",
        "_queue",
        "alive",
        "clock",
        "held_s",
        "most_waiting",
        "prepare_s",
        "prepared",
        "preparing",
        "release_s",
        "released",
        "slots",
        "slows_at",
        "wait_s",
        "waiting",
    )

    def __init__(self, clock: Clock, slots: int = 0, slows_at: int | None = None) -> None:
        if slots < 0:
            raise ValueError(f"slots must be >= 0, not {slots}")
        self.clock = clock
        self.slots = slots
        self.slows_at = slows_at
        self.preparing = 0
        self._environments: dict[int, _Environment] = {}
        self._queue: deque[_Environment] = deque()
        self.alive = self.waiting = self.most_waiting = self.prepared = self.released = 0
        self.wait_s = self.prepare_s = self.held_s = self.release_s = 0.0

    def prepare(self, key: int, prepare_s: float, ready: Done, arg: Any = None) -> None:
        """Get a slot, prepare for `prepare_s` seconds, then call `ready(arg)`; the environment is held until
        `release(key)`.

        Raises ValueError if `key` has an environment already.
        """
        if key in self._environments:
            raise ValueError(f"environment {key} exists already")
        environment = _Environment(key, self.clock.now, prepare_s, ready, arg)
        self._environments[key] = environment
        if self.slots == 0 or self.alive < self.slots:
            self._start(environment)
        else:
            self._queue.append(environment)
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)

    def release(self, key: int, release_s: float) -> None:
        """Reclaim, which keeps the slot for `release_s` more seconds. On success, failure and abort alike:

        one that waits leaves the queue, one in preparation is reclaimed when prepared; neither calls `ready` any more.
        Raises KeyError if `key` has no environment (never prepared, or released before).
        """
        environment = self._environments.pop(key)
        if environment.state == "waiting":
            environment.state = "releasing"  # a tombstone in the queue
            self.waiting -= 1
            self.wait_s += self.clock.now - environment.arrived
        elif environment.state == "preparing":
            environment.release_s = release_s
            environment.ready = ignore
        else:
            self.held_s += self.clock.now - environment.since
            self._reclaim(environment, release_s)

    def _start(self, environment: _Environment) -> None:
        now = self.clock.now
        self.alive += 1
        self.wait_s += now - environment.arrived
        environment.state = "preparing"
        environment.since = now
        self.preparing += 1
        seconds = environment.prepare_s
        if self.slows_at is not None:
            seconds *= 1.0 + (self.preparing / self.slows_at) ** 2
        self.clock.at(now + seconds, COMPLETE, self._ready, environment)

    def _ready(self, environment: _Environment) -> None:
        now = self.clock.now
        self.prepared += 1
        self.preparing -= 1
        self.prepare_s += now - environment.since
        environment.since = now
        environment.state = "held"
        if environment.release_s >= 0.0:
            self._reclaim(environment, environment.release_s)
        else:
            environment.ready(environment.arg)

    def _reclaim(self, environment: _Environment, release_s: float) -> None:
        now = self.clock.now
        environment.state = "releasing"
        environment.since = now
        self.clock.at(now + release_s, COMPLETE, self._freed, environment)

    def _freed(self, environment: _Environment) -> None:
        self.alive -= 1
        self.released += 1
        self.release_s += self.clock.now - environment.since
        while self._queue:
            head = self._queue.popleft()
            if head.state == "waiting":
                self.waiting -= 1
                self._start(head)
                break
