"""The real backend: asyncio and the wall clock around the core. Actions become tasks, results become events.

It carries out and never decides. Events reach the core in the order in which they happened, stamped with monotonic
seconds since the start of the run. Observers (journal, metrics) see every event with its actions, in order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from real.deployment import Deployment
from real.fleet import Fleet
from real.services import Services
from real.store import ExperienceStore
from real.trainer.trainer import CriticStats, StepStats
from real.weight_steps import WeightSteps
from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.core import Core
from testbed.dispatch import dispatch_table
from testbed.scenario import Scenario

Observer = Callable[[said.Event, list[do.Action]], None]


class StuckError(RuntimeError):
    """Work is queued and nothing finishes."""


class Status(Struct):
    """Where a run stands, for a progress line."""

    seconds: float
    batches_trained: int
    deployed: int
    trainer_version: int
    reward: float
    """Mean of the last batch."""
    in_flight: int
    """Turns in engines."""
    waiting: int
    """Turns that wait for an engine."""
    loads: tuple[int, ...]
    """Turns in each engine."""


class Trained(Struct):
    """One optimizer update of a real run."""

    batch: int
    update: int
    t: float
    seconds: float
    reward_mean: float
    response_tokens_mean: float
    stats: StepStats
    critic: CriticStats | None = None
    """Of the critic's update on the same records, where there is one."""


Progress = Callable[[Status], None]


class RealBackend:
    """Runs one scenario on a deployment (engines, trainer, environment that are up).

    `faults`: engines to kill or to bring back at given times (`EngineLost`, `EngineJoined`), for tests. `checkpoints`:
    folder for those that the scenario asks for. Raises `StuckError` when nothing moves any more; an error of a task
    ends the run and is raised.
    """

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        observers: Sequence[Observer] = (),
        faults: Iterable[said.Event] = (),
        checkpoints: Path | None = None,
    ) -> None:
        self.scenario = scenario
        self.deployment = deployment
        self.core = Core(scenario)
        self._observers = tuple(observers)
        self._faults = tuple(faults)
        self._checkpoints = checkpoints
        self._started = 0.0
        self.finish_reason = ""
        self.core_s = 0.0
        """Seconds in `core.handle`."""
        self.observers_s = 0.0
        """Seconds in journal and metrics."""
        self.wall_s = 0.0
        self.trained: list[Trained] = []
        self._pending: deque[said.Event] = deque()
        self._telling = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over: asyncio.Future[str]
        self.store = ExperienceStore(deployment.environment)
        self.fleet = Fleet(
            scenario,
            deployment.engines,
            self.store,
            deployment.environment,
            self.tell,
            self._spawn,
            self.now,
            lambda t: t - self._started,
        )
        self.services = Services(
            scenario,
            self.store,
            deployment.environment,
            deployment.trainer,
            deployment.teacher_of,
            self.tell,
            self._spawn,
            self.now,
            self._before_step,
            self._trained,
        )
        self.weights = WeightSteps(
            scenario,
            self.core.layout,
            self.fleet,
            deployment.trainer,
            deployment.paths,
            deployment.agreement,
            self.tell,
            self._spawn,
            self.now,
        )
        self._do = dispatch_table(
            self.fleet, self.services, self.weights, set_timer=self._set_timer, finish=self._finish
        )

    def use(self, observers: Sequence[Observer]) -> None:
        """Replace the observers; before the run starts."""
        self._observers = tuple(observers)

    def now(self) -> float:
        """Monotonic seconds since the start of the run."""
        return time.monotonic() - self._started

    # --- the run ------------------------------------------------------------------------------------------------------

    async def run(self, progress: Progress | None = None) -> str:
        """Run to the end; returns the reason that the core gave for finishing."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        costs = await self.deployment.path_costs(self.scenario)
        await self.fleet.begin()
        await self.weights.begin()
        self._started = time.monotonic()
        for fault in self._faults:
            loop.call_later(fault.t, self._fault, fault)
        interval = self.core.rollouts.concurrency.report_interval_s
        if interval:
            self._spawn(self._report_all(interval))
        self._spawn(self._watch(progress))
        try:
            self.tell(said.RunStarted(self.now(), costs, self.fleet.kv_tokens))
            self.services.start()
            return await self._over
        finally:
            self.wall_s = self.now()
            await self._end()

    async def _end(self) -> None:
        """No task of this run goes on, and no engine works for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.deployment.quiet(self.fleet.slots)
        await self.weights.end()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def tell(self, event: said.Event) -> None:
        """Hand an event to the core and carry out what follows; events that follow at once are told in order."""
        pending = self._pending
        pending.append(event)
        if self._telling:
            return
        self._telling = True
        clock = time.perf_counter
        try:
            while pending and not self.core.finished:
                event = pending.popleft()
                begin = clock()
                actions = self.core.handle(event)
                decided = clock()
                for observe in self._observers:
                    observe(event, actions)
                self.core_s += decided - begin
                self.observers_s += clock() - decided
                for action in actions:
                    self._do[type(action)](action)
        except Exception as error:
            self._fail(error)
        finally:
            self._telling = False

    def _finish(self, a: do.Finish) -> None:
        self.finish_reason = a.reason
        if not self._over.done():
            self._over.set_result(a.reason)

    # --- clocks -------------------------------------------------------------------------------------------------------

    def _set_timer(self, a: do.SetTimer) -> None:
        def fire() -> None:
            self.tell(said.TimerFired(self.now(), a.timer))

        asyncio.get_running_loop().call_later(max(a.at - self.now(), 0.0), fire)

    async def _report_all(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            await self.fleet.report_each()

    async def _watch(self, progress: Progress | None) -> None:
        """Show where the run stands, and end one in which nothing happens any more."""
        limit, seen, since = self.scenario.real.watchdog_s, -1, self.now()
        while True:
            if progress is not None:
                progress(self.status())
            await asyncio.sleep(min(1.0, limit))
            happened = self.core.events - self.core.looks
            if happened != seen:
                seen, since = happened, self.now()
            elif self.now() - since >= limit:
                raise StuckError(f"nothing happened for {limit:.0f} s: {self.core.explain()}")

    def status(self) -> Status:
        p = self.core.context.progress
        return Status(
            self.now(),
            p.batches_trained,
            p.deployed,
            p.trainer_version,
            self.trained[-1].reward_mean if self.trained else 0.0,
            self.core.rollouts.in_flight,
            len(self.core.rollouts.queue),
            tuple(len(slot.turns) for slot in self.fleet.slots),
        )

    async def _before_step(self, batch: int) -> None:
        """Engines report their load, and a checkpoint is written where one is due."""
        await self.fleet.report_each()
        interval = self.scenario.real.save_interval
        if self._checkpoints is not None and interval and (batch + 1) % interval == 0:
            position = {"batches": batch + 1, "tasks": self.deployment.skipped + self.services.drawn}
            await self.deployment.trainer.save(self._checkpoints / f"step-{batch + 1}", position)

    def _trained(self, stats: StepStats, critic: CriticStats | None, a: do.Train, seconds: float) -> None:
        n = len(a.experiences)
        reward = sum(x.reward for x in a.experiences) / n
        tokens = sum(x.output_tokens for x in a.experiences) / n
        self.trained.append(Trained(a.batch, stats.update, self.now(), seconds, reward, tokens, stats, critic))

    # --- faults -------------------------------------------------------------------------------------------------------

    def _fault(self, event: said.Event) -> None:
        if not self._over.done():
            if isinstance(event, said.EngineLost):
                self._spawn(self._kill(event.engine))
            elif isinstance(event, said.EngineJoined):
                self._spawn(self._rejoin(event.engine))

    async def _kill(self, engine: int) -> None:
        await self.deployment.kill(engine)
        self.fleet.gone(self.fleet.slots[engine])

    async def _rejoin(self, engine: int) -> None:
        handle = await self.deployment.relaunch(engine)
        self.fleet.joined(self.fleet.slots[engine], handle, 0)
