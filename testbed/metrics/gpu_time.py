"""GPU time by cause, as a partition: every GPU is in exactly one state at any time, so the causes sum to wall time x
GPUs.

A pool is a lane. The engines of a pool that generates each have their own state; a pool that trains or switches phase
has one for all its GPUs. `held[state]` counts GPUs; when a state changes, the two states concerned are settled: O(1) an
event. Idle engines share one pseudo-state whose cause is global, because it changes rarely and for all of them at once.

It refuses to know tokens, trajectories and steps. Two costs inside `generate` (work done twice, work thrown away) are
not states; `split_generate` moves them out afterwards, keeping the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from testbed.core.actions import (
    ComputeSignals,
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
    SignalReady,
    ToolFinished,
    TrainerReleased,
    TrainStepFinished,
    TurnFailed,
    TurnFinished,
    WeightUpdateFailed,
)
from testbed.metrics.summary import CAUSES
from testbed.scenario.layout import Layout, PoolSpec
from testbed.scenario.scenario import Scenario

Handlers = Mapping[type, Callable[[float, Any], None]]
"""Type of an event or action -> what a fold does with it, given the time."""

(
    _GENERATE,
    _TAIL,
    _TRAIN,
    _SIGNALS,
    _UPDATE,
    _SWITCH,
    _RECOMPUTE,
    _DROPPED,
    _LONGEST,
    _TRAINER,
    _DATA,
    _FULL,
    _NO_WORK,
) = range(len(CAUSES))
_IDLE = len(CAUSES)
"""Pseudo-state of an engine that is idle for the current global cause."""
_NONE = -1
"""An engine whose pool does not generate, a pool whose engines have states of their own."""


def tail_slots(scenario: Scenario, layout: Layout) -> int:
    """Turns that fill an engine: its slots, or its even part of a batch where that is less."""
    a_part = ceil(scenario.algorithm.trajectories_per_batch / max(1, len(layout.engines)))
    return min(scenario.rollout.engine.max_running_requests, a_part)


def split_generate(seconds: dict[str, float], recompute_s: float, dropped_share: float) -> float:
    """Move GPU-seconds of recomputed prompts and of dropped tokens out of `generate`, in place; the sum stays.

    `recompute_s` is taken from `generate`, then from `generate_tail`; what neither can give is returned.
    `generate_dropped` is `dropped_share` (dropped over generated tokens) of what is left in `generate`: a tail is slow
    for other reasons.
    """
    left = recompute_s
    for cause in ("generate", "generate_tail"):
        moved = min(left, seconds[cause])
        seconds[cause] -= moved
        seconds["recompute_kv"] += moved
        left -= moved
    dropped = seconds["generate"] * min(1.0, dropped_share)
    seconds["generate"] -= dropped
    seconds["generate_dropped"] += dropped
    return left


class Lane:
    """The GPUs of one pool, and how many of them are in which state since when."""

    __slots__ = (
        "engines",
        "gpus",
        "held",
        "last",
        "name",
        "phase",
        "recompute",
        "seconds",
        "shared",
        "state",
        "trains",
    )

    def __init__(self, pool: PoolSpec) -> None:
        self.name = pool.name
        self.gpus = pool.gpus
        self.shared = pool.shared
        self.trains = pool.trains
        self.phase = ""
        self.state = _NONE
        self.engines: list[EngineTime] = []
        self.held = [0] * (_IDLE + 1)
        self.last = [0.0] * (_IDLE + 1)
        self.seconds = [0.0] * (_IDLE + 1)
        self.recompute = 0.0
        """GPU-seconds of prompt tokens computed again, as engines reported them."""

    @property
    def kind(self) -> str:
        return "shared" if self.shared else "trainer" if self.trains else "engines"

    def shift(self, old: int, new: int, gpus: int, t: float) -> None:
        """`gpus` of the lane change from one state to another."""
        seconds, held, last = self.seconds, self.held, self.last
        seconds[old] += held[old] * (t - last[old])
        seconds[new] += held[new] * (t - last[new])
        last[old] = last[new] = t
        held[old] -= gpus
        held[new] += gpus

    def settle(self, t: float, idle_cause: int) -> None:
        """Bring all states up to `t`; what was idle goes to its cause."""
        for state in range(_IDLE + 1):
            self.seconds[state] += self.held[state] * (t - self.last[state])
            self.last[state] = t
        self.settle_idle(t, idle_cause)

    def settle_idle(self, t: float, idle_cause: int) -> None:
        self.seconds[idle_cause] += self.seconds[_IDLE] + self.held[_IDLE] * (t - self.last[_IDLE])
        self.seconds[_IDLE] = 0.0
        self.last[_IDLE] = t


class EngineTime:
    """One engine: what decides its state."""

    __slots__ = ("gpus", "in_flight", "lane", "lost", "paused", "recompute_s", "state")

    def __init__(self, lane: Lane, gpus: int) -> None:
        self.lane = lane
        self.gpus = gpus
        self.in_flight = 0
        self.paused = False
        self.lost = False
        self.state = _NONE
        self.recompute_s = 0.0


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
        self._cause = _TRAINER
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
        engine = self._engines[a.engine]
        engine.in_flight = n = engine.in_flight + 1
        self._in_flight += 1
        if n == 1 or n == self._tail_at:
            self._place(engine, t)
            self._recheck_cause(t)

    def _end_turn(self, t: float, e: TurnFinished | TurnFailed) -> None:
        engine = self._engines[e.engine]
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
        owed = self._signals.get(e.signal)
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
        """Its turns are lost with it, whether or not they are reported one by one."""
        engine = self._engines[e.engine]
        engine.lost = True
        engine.paused = False
        self._in_flight -= engine.in_flight
        engine.in_flight = 0
        self._leave_publication(e.engine, t)
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
            return _NO_WORK
        if engine.paused:
            return _UPDATE
        if engine.in_flight:
            return _GENERATE if engine.in_flight >= self._tail_at else _TAIL
        return _UPDATE if engine.lane.shared and self._publishing else _IDLE

    def _trainer_state(self) -> int:
        if self._updates:
            return _TRAIN
        if self._owed:
            return _SIGNALS
        return _UPDATE if self._publishing else _DATA

    def _place(self, engine: EngineTime, t: float) -> None:
        """Put an engine into the state that follows from its flags; a pool that does not generate has its own."""
        if engine.lane.phase != "generate":
            return
        old, new = engine.state, self._engine_state(engine)
        if old == new:
            return
        engine.lane.shift(old, new, engine.gpus, t)
        engine.state = new
        change = (new <= _TAIL) - (old <= _TAIL)
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
        lane.held = [0] * (_IDLE + 1)
        self._generating -= sum(0 <= e.state <= _TAIL for e in lane.engines)
        lane.phase = phase
        lane.state = _NONE
        for engine in lane.engines:
            engine.state = self._engine_state(engine) if phase == "generate" else _NONE
        if phase == "generate":
            for engine in lane.engines:
                lane.held[engine.state] += engine.gpus
            lane.held[_NO_WORK] += lane.gpus - sum(lane.held)
            self._generating += sum(0 <= e.state <= _TAIL for e in lane.engines)
        else:
            lane.state = self._trainer_state() if phase == "train" else _SWITCH
            lane.held[lane.state] = lane.gpus
        self._recheck_cause(t)

    def _recheck_cause(self, t: float) -> None:
        """Why idle engines are idle now."""
        if self._admission == "buffer_full":
            cause = _FULL
        elif self._admission == "no_task":
            cause = _TRAINER if not self._in_flight and self._trainer_works else _NO_WORK
        elif self._in_flight:
            cause = _LONGEST
        else:
            cause = _NO_WORK if self._outside else _TRAINER
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
            if self._trainer.state == _TRAIN:
                self.overlap_s += dt
                self.hidden_generation_s += self._generating * dt
