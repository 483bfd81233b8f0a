"""The training pool: what it does next, and the phases of a pool that also generates.

Jobs of one pool run one at a time: signals, training, the trainer's part of a publication. It asks the placement policy
when a shared pool goes back to generation. It refuses to know what a batch contains and how weights travel."""

from __future__ import annotations

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.context import Context
from testbed.core.errors import ProtocolError
from testbed.core.experience import ExperienceStore
from testbed.core.publication import Publications
from testbed.core.records import Lot
from testbed.core.rollouts import Rollouts
from testbed.core.states import step
from testbed.policies.placement import JobMap, back_to_generation
from testbed.policies.publication import is_due


class TrainingPool:
    """Owns the phase and the running job of the training pool."""

    def __init__(
        self,
        ctx: Context,
        jobs: JobMap,
        experience: ExperienceStore,
        rollouts: Rollouts,
        publications: Publications,
    ) -> None:
        self._ctx = ctx
        self._p = ctx.progress
        self._jobs = jobs
        self._experience = experience
        self._rollouts = rollouts
        self._publications = publications
        placement = ctx.scenario.placement
        self._colocated = placement.mode == "colocated"
        self._min_pending = placement.min_pending_trajectories if placement.mode == "hybrid" else 1
        self._spec = ctx.layout.pools[ctx.layout.train_pool]
        self.phase = self._spec.phase
        self.job = ""
        """`train`, `signals`, or empty."""
        self._batch = -1
        self._updates_left = 0
        self._signals_left: list[str] = []
        self._signal_lots: list[int] = []
        self._awaited = 0

    # --- what next? ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Give the pool work, or change its phase, or note why it waits."""
        ctx = self._ctx
        if ctx.finished:
            return
        if self.phase in ("generate", "draining"):
            self._maybe_leave_generation()
        if self.phase == "train" and not self.job and not self._publications.holds_trainer:
            self._next_job()
        if self.phase == "train" and not self.job:
            self._maybe_return()

    def _next_job(self) -> None:
        experience = self._experience
        if self._ctx.closed:
            return
        batch = experience.take_batch(self._spec.index)
        if batch is not None:
            self.job = "train"
            self._p.trainer_busy = True
            self._batch = batch.batch
            self._updates_left = batch.updates
            self._ctx.out.append(batch)
            self._publications.pump()
        elif experience.for_trainer and (not self._spec.shared or experience.batch_possible):
            self._start_signals(experience.next_for_trainer())

    def _start_signals(self, lots: list[Lot]) -> None:
        """One job over these lots, signal after signal."""
        if lots:
            self._signal_lots = [t.id for lot in lots for t in lot.members]
            self._signals_left = list(self._jobs.on_trainer)
            self.job = "signals"
            self._next_signal()

    def _next_signal(self) -> None:
        signal = self._signals_left.pop(0)
        self._awaited = len(self._signal_lots)
        self._ctx.out.append(do.ComputeSignals(signal, tuple(self._signal_lots), self._spec.index))

    def signal_ready(self, event: said.SignalReady) -> None:
        """Called for signals that this pool computes."""
        if self.job != "signals":
            raise ProtocolError(f"signal {event.signal!r} came from the training pool, which runs no such job")
        self._awaited -= len(event.trajectories)
        if self._awaited > 0:
            return
        if self._signals_left:
            self._next_signal()
        else:
            self.job = ""

    def train_step_finished(self, event: said.TrainStepFinished) -> None:
        if self.job != "train" or event.batch != self._batch:
            raise ProtocolError(f"TrainStepFinished for batch {event.batch}, which is not being trained")
        self._p.trainer_version += 1
        self._updates_left -= 1
        if self._updates_left:
            return
        self.job = ""
        self._p.trainer_busy = False
        self._experience.batch_done()
        if self._p.batches_trained >= self._ctx.scenario.run.num_rollout:
            self._ctx.closed = True
        if is_due(self._ctx.scenario.weights, self._p.batches_trained):
            self._publications.request()

    # --- phases of a shared pool --------------------------------------------------------------------------------------

    def _move(self, given: str) -> None:
        self.phase = step("pool", self._spec.name, self.phase, given)

    def _maybe_leave_generation(self) -> None:
        """Enough for a batch: the pool's engines stop, then it switches (invariant 10)."""
        ctx, experience = self._ctx, self._experience
        engines = [ctx.engines[i] for i in self._spec.engines]
        if self.phase == "generate":
            if ctx.closed or not experience.batch_possible:
                return
            if any(e.state not in ("serving", "lost") for e in engines):
                return
            if any(e.in_flight for e in engines):
                self._move("drain")
                for e in engines:
                    e.leaving = True
                    self._rollouts.close(e.index)
                    if not self._colocated:
                        self._rollouts.take_back(e, "pool_switch")
                return
        elif any(e.in_flight for e in engines):
            return
        self._move("switch")
        for e in engines:
            if e.state != "lost":
                self._publications.leave(e)
        ctx.out.append(do.SwitchPool(self._spec.index, "train", "a batch can be trained"))

    def _maybe_return(self) -> None:
        if not self._spec.shared or (self._publications.holds_trainer and not self._publications.waits_for_pool):
            return
        if not self._publications.waits_for_pool:
            available = self._experience.batch_possible
            if self._ctx.closed or available:
                return
            wanting = self._p.open_trajectories
            others = any(e.state != "lost" and e.pool != self._spec.index for e in self._ctx.engines)
            alone = self._colocated or not others
            if not back_to_generation(alone, available, wanting, self._min_pending):
                return
        self._move("switch")
        self._ctx.out.append(do.SwitchPool(self._spec.index, "generate", "nothing to train"))

    def switched(self, event: said.PoolSwitched) -> None:
        self._move("switched")
        if event.phase != self.phase:
            raise ProtocolError(f"pool {event.pool} switched to {event.phase}, the core asked for {self.phase}")
        if self.phase == "generate":
            self._publications.returned(
                [self._ctx.engines[i] for i in self._spec.engines if self._ctx.engines[i].state != "lost"]
            )

    def engine_joined(self, event: said.EngineJoined) -> None:
        """An engine is back: it takes part in the phase that its GPUs are in."""
        engine = self._ctx.engines[event.engine]
        mine = event.engine in self._spec.engines
        engine.leaving = mine and self.phase == "draining"
        self._publications.joined(event, away=mine and self.phase in ("to_train", "train", "to_generate"))

    # --- why it waits -------------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Say why the trainer waits, if the reason changed."""
        if self.job:
            state = "busy"
        elif self._publications.holds_trainer:
            state = "publishing"
        elif self.phase != "train":
            state = "switching"
        else:
            buffer = self._experience.buffer
            if buffer.num_ready:
                state = "too_few_ready"
            else:
                state = "not_ready" if buffer.present else "empty"
        self._ctx.note("trainer", state)
