"""The scheduling core: `handle(event) -> list[Action]`.

Sans-I/O: no clock, no waiting, no randomness but a generator seeded by the scenario. The same scenario and event
sequence give the same actions, always. This module only dispatches events to the components and decides when a run is
over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.context import Context
from testbed.core.errors import ProtocolError
from testbed.core.experience import ExperienceStore
from testbed.core.pools import TrainingPool
from testbed.core.publication import Publications
from testbed.core.rollouts import Rollouts
from testbed.policies.placement import JobMap
from testbed.scenario import Scenario
from testbed.scenario.layout import Layout, layout_of


class Core:
    """One run's decisions. Feed it every event of a backend, in order; carry out what it returns, in order.

    Raises `ProtocolError` or `IllegalTransition` if an event cannot be true; its state is then undefined.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.layout: Layout = layout_of(scenario)
        self.context = ctx = Context(scenario, self.layout)
        jobs = JobMap(scenario, self.layout)
        self._jobs = jobs
        self.experience = ExperienceStore(ctx, jobs)
        self.rollouts = Rollouts(ctx, self.experience, np.random.default_rng([scenario.run.seed, 0x5EED]))
        self.publications = Publications(ctx, self.experience, self.rollouts)
        self.pool = TrainingPool(ctx, jobs, self.experience, self.rollouts, self.publications)
        r, u = self.rollouts, self.publications
        self._handlers: dict[type[said.Event], Callable[[Any], None]] = {
            said.RunStarted: self._run_started,
            said.TaskArrived: self._task_arrived,
            said.TasksExhausted: self._tasks_exhausted,
            said.EnvironmentReady: r.environment_ready,
            said.TurnFinished: self._turn_finished,
            said.PrefillFinished: self._prefill_finished,
            said.TurnFailed: self._turn_failed,
            said.ToolFinished: self._tool_finished,
            said.SignalReady: self._signal_ready,
            said.TrainStepFinished: self._after(self.pool.train_step_finished),
            said.WeightsPrepared: self._after(u.prepared),
            said.TrainerReleased: self._after(u.trainer_released),
            said.EnginePaused: u.paused,
            said.WeightsCopied: u.copied,
            said.EngineReady: u.ready,
            said.EngineResumed: self._after(u.resumed),
            said.WeightUpdateFailed: self._after(u.failed),
            said.PoolSwitched: self._after(self.pool.switched),
            said.EngineLost: self._engine_lost,
            said.EngineJoined: self._after(self._engine_joined),
            said.LoadReported: r.load_reported,
            said.TimerFired: self._timer_fired,
        }
        self.events = 0
        self.looks = 0
        """Events that say nothing: looks at memory that come by themselves."""
        self._reason = "completed"

    @property
    def finished(self) -> bool:
        return self.context.finished

    def handle(self, event: said.Event) -> list[do.Action]:
        """What follows from `event`. After `Finish` every event is ignored."""
        ctx, t = self.context, event.t
        if ctx.finished:
            return []
        if t < ctx.now:
            raise ProtocolError(f"time went back from {ctx.now} to {t} ({type(event).__name__})")
        ctx.now = t
        out: list[do.Action] = []
        ctx.out = out
        self.events += 1
        self._handlers[type(event)](event)
        return out

    # --- handlers that touch several components -----------------------------------------------------------------------

    def _after(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """Control-plane events may free anything: give every component a chance to go on."""

        def handle(event: Any) -> None:
            handler(event)
            self._pump()

        return handle

    def _pump(self) -> None:
        if any(all(e.state == "lost" for e in side) for side in self.context.sides):
            self._finish("no_engine_left")
            return
        self.publications.pump()
        self.pool.pump()
        self.rollouts.pump()
        self.pool.note()
        self._maybe_finish()

    def _run_started(self, event: said.RunStarted) -> None:
        self.publications.run_started(event)
        if self.rollouts.programs is not None:
            self.rollouts.programs.run_started(event)
        self._pump()

    def _task_arrived(self, event: said.TaskArrived) -> None:
        self.rollouts.task_arrived(event)
        if self.rollouts.queue and self.pool.phase == "train":
            self.pool.pump()  # a shared pool may come back for turns that no engine takes
            self.pool.note()

    def _turn_finished(self, event: said.TurnFinished) -> None:
        engine = self.rollouts.turn_finished(event)
        if engine.state == "draining":
            self.publications.turn_left(engine)
        phase = self.pool.phase
        if phase == "draining" or (phase == "generate" and not self.rollouts.in_flight):
            self.pool.pump()
            self.pool.note()
            self._maybe_finish()
        if not self._jobs.external and not event.continues:
            self._pump()

    def _prefill_finished(self, event: said.PrefillFinished) -> None:
        self.publications.turn_left(self.rollouts.prefill_finished(event))
        self._pump()

    def _turn_failed(self, event: said.TurnFailed) -> None:
        engine = self.rollouts.turn_failed(event)
        self.publications.turn_left(engine)
        self._pump()

    def _tool_finished(self, event: said.ToolFinished) -> None:
        self.rollouts.tool_finished(event)
        if event.failed:
            self._pump()

    def _signal_ready(self, event: said.SignalReady) -> None:
        lots_changed = self.experience.signal_ready(event)
        on_trainer = self._jobs.on_trainer
        if on_trainer and event.signal in on_trainer:
            self.pool.signal_ready(event)
            self._pump()
        elif lots_changed:
            self._lots_changed()

    def _lots_changed(self) -> None:
        self.publications.pump()
        self.pool.pump()
        self.rollouts.pump()
        self.pool.note()
        if self.rollouts.exhausted or self.experience.drops_too_much:
            self._maybe_finish()

    def _tasks_exhausted(self, event: said.TasksExhausted) -> None:
        self.rollouts.tasks_exhausted(event)
        self._maybe_finish()

    def _engine_lost(self, event: said.EngineLost) -> None:
        self.publications.engine_lost(self.context.engines[event.engine])
        self._pump()

    def _timer_fired(self, event: said.TimerFired) -> None:
        programs = self.rollouts.programs
        if programs is not None and event.timer == programs.timer:
            self.looks += 1
            self.rollouts.look_at_memory()
            return
        self.publications.timer_fired(event)
        self._pump()

    def _engine_joined(self, event: said.EngineJoined) -> None:
        self.pool.engine_joined(event)
        self.rollouts.engine_joined(event.engine)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _maybe_finish(self) -> None:
        ctx = self.context
        if ctx.finished:
            return
        if self.experience.drops_too_much:
            self._finish("too_many_dropped")
            return
        if self.pool.job:
            return
        if not ctx.closed and self.rollouts.exhausted and not self._anything_left():
            ctx.closed = True
            self._reason = "tasks_exhausted"
            self.publications.pump()  # a publication that waited for more training goes out now
        if ctx.closed and not self.publications.busy and not self.pool.phase.startswith("to_"):
            self._finish(self._reason)

    def _anything_left(self) -> bool:
        """Whether another batch can still come about."""
        e, r = self.experience, self.rollouts
        pending = r.in_flight or r.queue or e.awaited or e.retry_tasks or r.has_arrivals
        return bool(pending) or self.context.progress.open_groups > 0 or e.trainable >= e.lots_per_batch

    def _finish(self, reason: str) -> None:
        ctx = self.context
        self.experience.close()
        ctx.finished = True
        ctx.out.append(do.Finish(reason))

    def explain(self) -> str:
        """Where everything stands, for a message when nothing moves any more."""
        ctx, p, r, e = self.context, self.context.progress, self.rollouts, self.experience
        engines: dict[str, int] = {}
        for engine in ctx.engines:
            engines[engine.state] = engines.get(engine.state, 0) + 1
        states: dict[str, int] = {}
        for t in ctx.trajectories.values():
            states[t.state] = states.get(t.state, 0) + 1
        return (
            f"batches trained {p.batches_trained}, deployed version {p.deployed}; "
            f"groups submitted {p.submitted}, dropped {p.dropped}, open {p.open_groups}; "
            f"trajectories {states or 'none'}; turns in engines {r.in_flight}, waiting for an engine {len(r.queue)}; "
            f"buffer {e.buffer.present} present, {e.buffer.num_ready} ready of {e.lots_per_batch} wanted; "
            f"engines {engines}; training pool in phase {self.pool.phase}, job {self.pool.job or 'none'}; "
            f"programs {r.programs.counts() if r.programs else 'not paused'}; "
            f"admission {ctx.noted('admission')}, trainer {ctx.noted('trainer')}"
        )
