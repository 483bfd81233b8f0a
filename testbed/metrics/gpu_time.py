"""GPU time by cause: which state each engine and the training pool are in, from events, actions and notes.

Engines of a pool that generates each have their own state; a pool that trains or switches phase has one for all its
GPUs. `lanes` does the reckoning. It refuses to know tokens, trajectories and steps. Two costs inside `generate` (work
done twice, work thrown away) are not states: `lanes.split_generate` moves them out afterwards.
"""

from __future__ import annotations

from math import ceil

from testbed.core.actions import (
    ComputeSignals,
    HandOver,
    Note,
    PrepareEnvironment,
    PrepareWeights,
    Retire,
    RunTool,
    StartTurn,
    SwitchPool,
    Train,
)
from testbed.core.events import (
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineResumed,
    EnvironmentReady,
    LoadReported,
    PoolSwitched,
    PrefillFinished,
    SignalReady,
    ToolFinished,
    TrainerReleased,
    TrainStepFinished,
    TurnFailed,
    TurnFinished,
    WeightUpdateFailed,
)
from testbed.metrics.fold import Handlers
from testbed.metrics.lanes import (
    GENERATE,
    IDLE,
    IDLE_BUFFER_FULL,
    IDLE_DATA,
    IDLE_LONGEST,
    IDLE_NO_WORK,
    IDLE_TRAINER,
    NONE,
    PHASE_SWITCH,
    SIGNALS,
    TAIL,
    TRAIN,
    WEIGHT_UPDATE,
    EngineTime,
    Lane,
    tail_slots,
)
from testbed.scenario.layout import Layout
from testbed.scenario.scenario import Scenario


class GpuTime:
    """The fold. Time starts at 0 with every pool in its first phase."""

    def __init__(self, scenario: Scenario, layout: Layout) -> None:
        self.lanes = [Lane(p) for p in layout.pools]
        self._engines = [EngineTime(self.lanes[e.pool], e.gpus) for e in layout.engines]
        for engine in self._engines:
            engine.lane.engines.append(engine)
        self._train_pool = layout.train_pool
        self._trainer = self.lanes[layout.train_pool]
        self._tail_at = ceil(tail_slots(scenario, layout) / 4)
        """From this many turns on, an engine has a quarter of its slots full."""
        self._updates: dict[int, int] = {}
        """Batch in training -> its optimizer updates."""
        self._signals: dict[str, int] = {}
        """Signal -> trajectories whose values the training pool still owes."""
        self._owed = 0
        self._releasing = False
        self._participants: set[int] = set()
        self._in_flight = 0
        self._outside: set[int] = set()
        """Trajectories in a tool, or waiting for their environment."""
        self._admission = "open"
        self._cause = IDLE_TRAINER
        self._generating = 0
        self._overlap_from = 0.0
        self.overlap_s = 0.0
        """Seconds in which the trainer trained while at least one engine generated."""
        self.generation_s = 0.0
        """Engine-seconds of generation."""
        self.hidden_generation_s = 0.0
        """Of these, while the trainer trained."""
        for lane, pool in zip(self.lanes, layout.pools, strict=True):
            self._enter(lane, pool.phase, 0.0)
        self.handlers: Handlers = {
            StartTurn: self._start_turn,
            TurnFinished: self._end_turn,
            PrefillFinished: self._end_turn,
            HandOver: lambda t, a: self.enter_engine(t, a.to),
            TurnFailed: self._end_turn,
            RunTool: self._goes_outside,
            PrepareEnvironment: self._goes_outside,
            ToolFinished: self._comes_back,
            EnvironmentReady: self._comes_back,
            Retire: self._retire,
            Note: self._note,
            Train: self._train,
            TrainStepFinished: self._train_step,
            ComputeSignals: self._compute_signals,
            SignalReady: self._signal_ready,
            PrepareWeights: self._prepare_weights,
            TrainerReleased: self._trainer_released,
            WeightUpdateFailed: self._update_failed,
            EnginePaused: self._engine_paused,
            EngineResumed: self._engine_resumed,
            EngineLost: self._engine_lost,
            EngineJoined: self._engine_joined,
            SwitchPool: self._switch_pool,
            PoolSwitched: self._pool_switched,
            LoadReported: self._load_reported,
        }

    def settle(self, t: float) -> None:
        """Bring every figure up to `t`."""
        for lane in self.lanes:
            lane.settle(t, self._cause)
        self._settle_overlap(t)

    # --- turns, tools, notes ------------------------------------------------------------------------------------------

    def _start_turn(self, t: float, a: StartTurn) -> None:
        self.enter_engine(t, a.engine)

    def enter_engine(self, t: float, index: int) -> None:
        engine = self._engines[index]
        engine.in_flight = n = engine.in_flight + 1
        self._in_flight += 1
        if n == 1 or n == self._tail_at:
            self._place(engine, t)
            self._recheck_cause(t)

    def _end_turn(self, t: float, e: TurnFinished | PrefillFinished | TurnFailed) -> None:
        self.leave_engine(t, e.engine)

    def leave_engine(self, t: float, index: int) -> None:
        engine = self._engines[index]
        if engine.lost:
            return
        engine.in_flight = n = engine.in_flight - 1
        self._in_flight -= 1
        if n == 0 or n == self._tail_at - 1:
            self._place(engine, t)
            self._recheck_cause(t)

    def _goes_outside(self, t: float, a: RunTool | PrepareEnvironment) -> None:
        self._outside.add(a.trajectory)
        self._recheck_cause(t)

    def _comes_back(self, t: float, e: ToolFinished | EnvironmentReady) -> None:
        self._outside.discard(e.trajectory)
        self._recheck_cause(t)

    def _retire(self, t: float, a: Retire) -> None:
        if self._outside:
            self._outside.difference_update(a.trajectories)
            self._recheck_cause(t)

    def _note(self, t: float, a: Note) -> None:
        if a.subject == "admission":
            self._admission = a.state
            self._recheck_cause(t)
        elif a.state == "removed":
            self._lose(t, int(a.subject.removeprefix("engine:")))

    # --- trainer ------------------------------------------------------------------------------------------------------

    def _train(self, t: float, a: Train) -> None:
        self._updates[a.batch] = a.updates
        self._place_trainer(t)

    def _train_step(self, t: float, e: TrainStepFinished) -> None:
        if e.update + 1 >= self._updates.get(e.batch, 0):
            self._updates.pop(e.batch, None)
            self._place_trainer(t)

    def _compute_signals(self, t: float, a: ComputeSignals) -> None:
        if a.pool == self._train_pool:
            self._signals[a.signal] = self._signals.get(a.signal, 0) + len(a.trajectories)
            self._owed += len(a.trajectories)
            self._place_trainer(t)

    def _signal_ready(self, t: float, e: SignalReady) -> None:
        owed = self._signals.get(e.signal) if self._owed else 0
        if owed:
            done = min(owed, len(e.trajectories))
            self._signals[e.signal] = owed - done
            self._owed -= done
            if not self._owed:
                self._place_trainer(t)

    def _prepare_weights(self, t: float, a: PrepareWeights) -> None:
        self._releasing = True
        self._participants = set(a.participants)
        self._publication_changed(t)

    def _trainer_released(self, t: float, e: TrainerReleased) -> None:
        self._releasing = False
        self._publication_changed(t)

    def _update_failed(self, t: float, e: WeightUpdateFailed) -> None:
        """Engines that were paused for it will resume with the old version; nobody else takes part any longer."""
        self._participants = {p for p in self._participants if self._engines[p].paused}
        if not self._participants:
            self._releasing = False
        self._publication_changed(t)

    def _publication_changed(self, t: float) -> None:
        self._place_trainer(t)
        if self._trainer.phase == "generate":
            for engine in self._trainer.engines:
                self._place(engine, t)
            self._recheck_cause(t)

    @property
    def _publishing(self) -> bool:
        """Whether the trainer's GPUs are taken by a publication: its own part, or on a shared pool the engines' part
        too."""
        return bool(self._participants) if self._trainer.shared else self._releasing

    # --- engines and pools --------------------------------------------------------------------------------------------

    def _engine_paused(self, t: float, e: EnginePaused) -> None:
        self._engines[e.engine].paused = True
        self._place(self._engines[e.engine], t)

    def _engine_resumed(self, t: float, e: EngineResumed) -> None:
        self._engines[e.engine].paused = False
        self._leave_publication(e.engine, t)

    def _engine_lost(self, t: float, e: EngineLost) -> None:
        self._lose(t, e.engine)

    def _lose(self, t: float, index: int) -> None:
        """Its turns are lost with it, whether or not they are reported one by one."""
        engine = self._engines[index]
        if engine.lost:
            return
        engine.lost = True
        engine.paused = False
        self._in_flight -= engine.in_flight
        engine.in_flight = 0
        self._leave_publication(index, t)
        self._recheck_cause(t)

    def _engine_joined(self, t: float, e: EngineJoined) -> None:
        self._engines[e.engine].lost = False
        self._place(self._engines[e.engine], t)

    def _leave_publication(self, engine: int, t: float) -> None:
        self._place(self._engines[engine], t)
        if engine not in self._participants:
            return
        self._participants.remove(engine)
        if not self._participants:
            self._releasing = False
            self._publication_changed(t)

    def _switch_pool(self, t: float, a: SwitchPool) -> None:
        self._enter(self.lanes[a.pool], "switch", t)

    def _pool_switched(self, t: float, e: PoolSwitched) -> None:
        self._enter(self.lanes[e.pool], e.phase, t)

    def _load_reported(self, t: float, e: LoadReported) -> None:
        engine = self._engines[e.engine]
        engine.lane.recompute += max(0.0, e.recompute_s - engine.recompute_s) * engine.gpus
        engine.recompute_s = e.recompute_s

    # --- states -------------------------------------------------------------------------------------------------------

    def _engine_state(self, engine: EngineTime) -> int:
        if engine.lost:
            return IDLE_NO_WORK
        if engine.paused:
            return WEIGHT_UPDATE
        if engine.in_flight:
            return GENERATE if engine.in_flight >= self._tail_at else TAIL
        return WEIGHT_UPDATE if engine.lane.shared and self._publishing else IDLE

    def _trainer_state(self) -> int:
        if self._updates:
            return TRAIN
        if self._owed:
            return SIGNALS
        return WEIGHT_UPDATE if self._publishing else IDLE_DATA

    def _place(self, engine: EngineTime, t: float) -> None:
        """Put an engine into the state that follows from its flags; a pool that does not generate has its own."""
        if engine.lane.phase != "generate":
            return
        old, new = engine.state, self._engine_state(engine)
        if old == new:
            return
        engine.lane.shift(old, new, engine.gpus, t)
        engine.state = new
        change = (new <= TAIL) - (old <= TAIL)
        if change:
            self._settle_overlap(t)
            self._generating += change

    def _place_trainer(self, t: float) -> None:
        lane = self._trainer
        if lane.phase == "train":
            new = self._trainer_state()
            if new != lane.state:
                self._settle_overlap(t)
                lane.shift(lane.state, new, lane.gpus, t)
                lane.state = new
        self._recheck_cause(t)

    def _enter(self, lane: Lane, phase: str, t: float) -> None:
        """The whole pool changes phase: `generate`, `train` or `switch` (on its way to either)."""
        self._settle_overlap(t)
        lane.settle(t, self._cause)
        lane.held = [0] * (IDLE + 1)
        self._generating -= sum(0 <= e.state <= TAIL for e in lane.engines)
        lane.phase = phase
        lane.state = NONE
        for engine in lane.engines:
            engine.state = self._engine_state(engine) if phase == "generate" else NONE
        if phase == "generate":
            for engine in lane.engines:
                lane.held[engine.state] += engine.gpus
            lane.held[IDLE_NO_WORK] += lane.gpus - sum(lane.held)
            self._generating += sum(0 <= e.state <= TAIL for e in lane.engines)
        else:
            lane.state = self._trainer_state() if phase == "train" else PHASE_SWITCH
            lane.held[lane.state] = lane.gpus
        self._recheck_cause(t)

    def _recheck_cause(self, t: float) -> None:
        """Why idle engines are idle now."""
        if self._admission == "buffer_full":
            cause = IDLE_BUFFER_FULL
        elif self._admission == "no_task":
            cause = IDLE_TRAINER if not self._in_flight and self._trainer_works else IDLE_NO_WORK
        elif self._in_flight:
            cause = IDLE_LONGEST
        else:
            cause = IDLE_NO_WORK if self._outside else IDLE_TRAINER
        if cause != self._cause:
            for lane in self.lanes:
                lane.settle_idle(t, self._cause)
            self._cause = cause

    @property
    def _trainer_works(self) -> bool:
        return bool(self._updates or self._owed or self._publishing)

    def _settle_overlap(self, t: float) -> None:
        dt = t - self._overlap_from
        self._overlap_from = t
        if self._generating:
            self.generation_s += self._generating * dt
            if self._trainer.state == TRAIN:
                self.overlap_s += dt
                self.hidden_generation_s += self._generating * dt
