"""All figures of one run, streamed: give every event with its actions to `observe`, ask for `summary` at the end.

A step ends with the last update of its batch. The measured steps are those after the warm-up; what came before them,
and what came after the last step that was completed, counts in nothing but `wall_s` and `events`. Each fold's figures
are taken at the end of each step, so that steps, pools and totals agree with each other to rounding. It refuses to know
backends and files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from msgspec.structs import replace

from testbed.core.actions import Action, AnyAction, StartTurn, Train
from testbed.core.events import AnyEvent, Event, TrainStepFinished, TurnFinished
from testbed.fields import fields_of
from testbed.metrics.batch import LOST_TURN, BatchFold, BatchTotals
from testbed.metrics.bias import BiasFold, PlanOf, has_tail_rule
from testbed.metrics.fold import Handler, Handlers
from testbed.metrics.gpu_time import GpuTime
from testbed.metrics.lanes import split_generate
from testbed.metrics.meta import RunMeta
from testbed.metrics.programs import ProgramFold, added, mean_figures
from testbed.metrics.sketch import Sketch
from testbed.metrics.staleness import sizes_of
from testbed.metrics.summary import (
    CAUSES,
    BufferTime,
    Distribution,
    KvReuse,
    PoolTime,
    ProgramFigures,
    RunSummary,
    StepRecord,
    Waste,
)
from testbed.metrics.tokens import TokenCounts, Tokens
from testbed.metrics.trajectory import Lives
from testbed.metrics.updates import Updates, mean_update
from testbed.metrics.waits import Waits
from testbed.scenario.layout import Layout
from testbed.scenario.scenario import Scenario
from testbed.scenario.workload import FixedLength, LengthsWorkload, TraceWorkload

_SECONDS = ("overlap", "generation", "hidden_generation", "producer_blocked", "empty", "not_ready", "too_few_ready")


class EventCounter:
    """Counts core calls and nothing else: the observer of a run that wants no figures."""

    def __init__(self) -> None:
        self.events = 0

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        self.events += 1


class RunMetrics:
    """The folds of one run behind one `observe`. Memory is constant in finished trajectories; one `StepRecord` stays
    per step."""

    def __init__(self, scenario: Scenario, layout: Layout, plan_of: PlanOf | None = None) -> None:
        self._scenario = scenario
        self._layout = layout
        self._sizes = sizes_of(scenario)
        self._measure = scenario.experience.staleness.measure
        self._warmup = scenario.run.warmup_steps
        self._gpu = GpuTime(scenario, layout)
        self._lives = Lives(layout)
        self._tokens = Tokens(layout, self._lives, scenario.weights.transition.kv == "keep")
        self._updates = Updates()
        self._waits = Waits()
        self._bias = BiasFold(plan_of) if plan_of is not None and has_tail_rule(scenario) else None
        self._programs = ProgramFold() if several_turns(scenario) else None
        self._training: dict[int, BatchFold] = {}
        self._update_times: list[float] = []
        self.events = 0
        self._t = 0.0
        # totals of the measured steps
        self._steps: list[StepRecord] = []
        self._step_time = Sketch()
        self._batches = BatchTotals(self._sizes)
        self._counts = TokenCounts()
        self._update_sums: defaultdict[str, float] = defaultdict(float)
        self._update_path = ""
        self._program_sums = ProgramFigures()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lane_seconds = [dict.fromkeys(CAUSES, 0.0) for _ in self._gpu.lanes]
        # the state of the running figures at the end of the last step
        self._step_start = 0.0
        self._seconds_then = dict.fromkeys(_SECONDS, 0.0)
        self._lanes_then = [[0.0] * len(CAUSES) for _ in self._gpu.lanes]
        self._recompute_then = [0.0] * len(self._gpu.lanes)
        self._recompute_left = [0.0] * len(self._gpu.lanes)
        """GPU-seconds of recomputation that a step's generation could not hold: reported late."""
        turns: Handlers = {StartTurn: self._start_turn, TurnFinished: self._turn_finished}
        self._handlers = _merge(
            # a step is closed with what was before its last update; `Tokens` ends the `Life` that `_train` reads
            {Train: self._train, TrainStepFinished: self._train_step, **turns},
            _without(turns, self._gpu.handlers),
            _without(turns, self._lives.handlers),
            _without(turns, self._tokens.handlers),
            _without(turns, self._updates.handlers),
            self._waits.handlers,
            {} if self._programs is None else self._programs.handlers,
            {} if self._bias is None else self._bias.handlers,
        )

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        """One core call: the event, then its actions, which happen at the event's time."""
        self.events += 1
        t: Any = event.t  # as an object: handlers take it as one
        self._t = t
        handlers = self._handlers
        for handle in handlers[type(event)]:
            handle(t, event)
        for action in actions:
            for handle in handlers[type(action)]:
                handle(t, action)

    # Turns are most of what happens, and several folds read them: they are taken apart once.

    def _start_turn(self, t: float, a: StartTurn) -> None:
        trajectory: int
        engine: int
        trajectory, _, engine, _, _, _, _, _ = fields_of(a)
        self._gpu.enter_engine(t, engine)
        self._lives.start_turn(t, trajectory, engine)
        self._updates.request(t, engine)

    def _turn_finished(self, t: float, e: TurnFinished) -> None:
        trajectory: int
        engine: int
        prompt: int
        outputs: int
        cached: int
        first_t: float
        started_t: float
        again: int
        kv_version: int
        retractions: int
        (
            _,
            trajectory,
            _,
            engine,
            prompt,
            outputs,
            _,
            cached,
            first_t,
            started_t,
            reason,
            continues,
            again,
            kv_version,
            retractions,
        ) = fields_of(e)
        self._gpu.leave_engine(t, engine)
        self._lives.finish_turn(
            t, trajectory, engine, outputs, started_t, first_t, reason == "length" and not continues
        )
        self._tokens.finish_turn(engine, prompt, outputs, cached, again, kv_version, retractions)

    def _train(self, t: float, a: Train) -> None:
        self._training[a.batch] = BatchFold(a, self._lives, self._update_times, self._sizes)

    def _train_step(self, t: float, e: TrainStepFinished) -> None:
        self._update_times.append(t)
        batch = self._training.get(e.batch)
        if batch is not None and e.update + 1 >= batch.updates:
            del self._training[e.batch]
            self._end_step(t, batch)

    def _end_step(self, t: float, batch: BatchFold) -> None:
        measured = len(self._steps) >= self._warmup
        lanes = self._take_lanes(t)
        seconds = self._take_seconds(t)
        counts = self._tokens.take()
        updates = self._updates.take()
        programs = None if self._programs is None else self._programs.take(t)
        mean, largest = batch.staleness(self._measure, self._sizes)
        self._steps.append(
            StepRecord(
                batch=batch.batch,
                start_t=self._step_start,
                end_t=t,
                gpu_seconds={c: sum(lane[c] for lane in lanes) for c in CAUSES},
                trained_tokens=batch.trained_tokens,
                generated_tokens=counts.generated,
                staleness_mean=mean,
                staleness_max=largest,
                reward_mean=batch.reward_mean,
            )
        )
        if measured:
            self._step_time.add(t - self._step_start)
            self._batches.add(batch)
            self._counts.add(counts)
            if programs is not None:
                self._program_sums = added(self._program_sums, programs)
            _add(self._update_sums, updates)
            _add(self._seconds, seconds)
            for total, lane in zip(self._lane_seconds, lanes, strict=True):
                for cause in CAUSES:
                    total[cause] += lane[cause]
            if updates.get("count"):
                self._update_path = self._updates.path
        self._step_start = t

    def _take_lanes(self, t: float) -> list[dict[str, float]]:
        """GPU-seconds of every lane by cause since the last step, with recomputation moved out of generation."""
        self._gpu.settle(t)
        taken = []
        for i, lane in enumerate(self._gpu.lanes):
            now = lane.seconds[: len(CAUSES)]
            seconds = {c: now[j] - self._lanes_then[i][j] for j, c in enumerate(CAUSES)}
            recompute = lane.recompute - self._recompute_then[i] + self._recompute_left[i]
            self._recompute_left[i] = split_generate(seconds, recompute, 0.0)
            self._recompute_then[i] = lane.recompute
            self._lanes_then[i] = now
            taken.append(seconds)
        return taken

    def _take_seconds(self, t: float) -> dict[str, float]:
        """Waits and overlap since the last step."""
        self._waits.settle(t)
        waits = self._waits.seconds
        now = {
            "overlap": self._gpu.overlap_s,
            "generation": self._gpu.generation_s,
            "hidden_generation": self._gpu.hidden_generation_s,
            "producer_blocked": waits.get(("admission", "buffer_full"), 0.0),
            **{s: waits.get(("trainer", s), 0.0) for s in ("empty", "not_ready", "too_few_ready")},
        }
        taken = {key: now[key] - self._seconds_then[key] for key in _SECONDS}
        self._seconds_then = now
        return taken

    def summary(self, meta: RunMeta | None = None, **changes: Any) -> RunSummary:
        """The figures so far; `changes` are fields of `RunMeta`. May be asked at any time; nothing is used up."""
        meta = replace(meta or RunMeta(), **changes)
        scenario, totals = self._scenario, self._batches
        num_gpus = self._layout.num_gpus
        steps = max(0, len(self._steps) - self._warmup)
        measured_s = self._steps[-1].end_t - self._steps[-steps].start_t if steps else 0.0
        gpu_s = measured_s * num_gpus
        step_s = measured_s / steps if steps else 0.0
        waste = self._waste()
        staleness = totals.staleness()
        default = staleness["oldest_token"]
        in_generation = _ratio(default.completion.mean, default.dequeue.mean)
        return RunSummary(
            name=meta.name or scenario.name,
            backend=meta.backend,
            seed=scenario.run.seed if meta.seed is None else meta.seed,
            scenario_hash=meta.scenario_hash,
            workload_hash=meta.workload_hash,
            num_gpus=num_gpus,
            measured_steps=steps,
            warmup_steps=min(self._warmup, len(self._steps)),
            measured_s=measured_s,
            wall_s=self._t,
            step_time=self._step_time.distribution(),
            step_time_mean_s=step_s,
            pools=self._pools(waste.share),
            trained_tokens_per_s_per_gpu=_ratio(totals.trained_tokens, gpu_s),
            generated_tokens_per_s_per_gpu=_ratio(self._counts.generated, gpu_s),
            trajectories_per_s=_ratio(totals.trajectories, measured_s),
            cost_usd_per_1000_steps=1000 * step_s * num_gpus * scenario.cluster.price_usd_per_gpu_hour / 3600,
            staleness_measure=self._measure,
            staleness=staleness,
            staleness_in_generation=in_generation,
            staleness_in_buffer=1 - in_generation if default.dequeue.mean else 0.0,
            staleness_bound=scenario.experience.staleness.bound,
            output_length=totals.lengths.distribution(),
            capped_share=_ratio(totals.capped, totals.trajectories),
            waste=waste,
            buffer=self._buffer(steps),
            kv=self._kv(),
            weight_update=mean_update(self._update_sums, self._update_path),
            trajectory=totals.mean_time(),
            overlap_s_per_step=_ratio(self._seconds["overlap"], steps),
            hidden_generation_share=_ratio(self._seconds["hidden_generation"], self._seconds["generation"]),
            steps=self._step_records(waste.share, meta),
            events=self.events,
            backend_events=meta.backend_events,
            finish_reason=meta.finish_reason,
            kinds=dict(meta.kinds),
            marks=dict(meta.marks),
            held_out=list(meta.held_out),
            bias=[] if self._bias is None else self._bias.bins(),
            programs=None if self._programs is None else mean_figures(self._program_sums, measured_s),
            rewarded="reward" in self._scenario.algorithm.signals,
            engine_weight_bytes=meta.engine_weight_bytes,
            clip=meta.clip,
            engine_precision=scenario.rollout.engine.weight_precision,
            training_precision=scenario.training.precision,
        )

    def _pools(self, dropped_share: float) -> list[PoolTime]:
        pools = []
        for lane, seconds in zip(self._gpu.lanes, self._lane_seconds, strict=True):
            moved = dict(seconds)
            split_generate(moved, 0.0, dropped_share)
            pools.append(PoolTime(lane.name, lane.kind, lane.gpus, moved))
        return pools

    def _step_records(self, dropped_share: float, meta: RunMeta) -> list[StepRecord]:
        """With the run's share of dropped tokens, not the step's: a drop ends generation of earlier steps."""
        records = []
        for step in self._steps:
            moved = dict(step.gpu_seconds)
            split_generate(moved, 0.0, dropped_share)
            learning, ratios = meta.learning.get(step.batch, {}), meta.ratios.get(step.batch, {})
            records.append(replace(step, gpu_seconds=moved, learning=dict(learning), ratios=dict(ratios)))
        return records

    def _waste(self) -> Waste:
        dropped = dict(self._counts.dropped_tokens)
        if self._batches.lost_tokens:
            dropped[LOST_TURN] = self._batches.lost_tokens
        return Waste(
            generated_tokens=self._counts.generated,
            trained_tokens=self._batches.trained_once_tokens,
            dropped_tokens=dropped,
            masked_tokens=self._batches.masked_tokens,
            corrected_trajectories=self._batches.corrected,
            trained_trajectories=self._batches.trajectories,
            dropped_trajectories=dict(self._counts.dropped_trajectories),
        )

    def _buffer(self, steps: int) -> BufferTime:
        return BufferTime(
            empty_s=_ratio(self._seconds["empty"], steps),
            not_ready_s=_ratio(self._seconds["not_ready"], steps),
            too_few_ready_s=_ratio(self._seconds["too_few_ready"], steps),
            ready_wait_s=_ratio(self._batches.ready_wait_s, self._batches.groups),
            producer_blocked_s=_ratio(self._seconds["producer_blocked"], steps),
        )

    def _kv(self) -> KvReuse:
        c = self._counts
        age = c.kv_age.distribution() if c.kv_age.count else Distribution()
        return KvReuse(c.prompt, c.cached, c.recomputed, c.retractions, age)


def several_turns(scenario: Scenario) -> bool:
    """Whether a trajectory may be more than one model call."""
    w = scenario.workload
    if isinstance(w, LengthsWorkload):
        return w.turns != FixedLength(tokens=1) or w.environment is not None
    return not isinstance(w, TraceWorkload)


def _without(kinds: Handlers, table: Handlers) -> Handlers:
    """The rest of a table."""
    return {kind: handle for kind, handle in table.items() if kind not in kinds}


def _merge(*tables: Handlers) -> dict[type, tuple[Handler, ...]]:
    """One table: type of event or action -> what every fold does with it, in the order of the folds."""
    kinds: tuple[type, ...] = (*get_args(AnyEvent), *get_args(AnyAction))
    return {kind: tuple(table[kind] for table in tables if kind in table) for kind in kinds}


def _add(total: defaultdict[str, float], part: Mapping[str, float]) -> None:
    for key, value in part.items():
        total[key] += value


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
