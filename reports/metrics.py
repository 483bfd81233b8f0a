"""Which figures a report has: one table of name, unit, how it is read, how it is written, and what it rests on.

CSV, JSON, Markdown and HTML all walk this table, so they cannot disagree. It refuses to know variants and comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean

from msgspec import Struct

from reports import numbers, tails
from reports.kinds import result_kind, weakest
from reports.palette import IDLE, TRAJECTORY
from testbed.metrics.scores import fifth
from testbed.metrics.summary import ProgramFigures, RunSummary, StalenessReading

ENGINES_IDLE = tuple(c for c in IDLE if c != "idle_data")
"""Idle causes of the generating side; the training side has `idle_data` alone. A shared pool has both."""

Read = Callable[[RunSummary], float]
Write = Callable[[float, float], str]
"""(value, spread) -> text."""


class Metric(Struct, frozen=True):
    label: str
    unit: str
    read: Read
    write: Write
    term: str = ""
    """Glossary id."""
    difference: str = "relative"
    """How two are compared: `relative`, `points` (shares) or `none`."""
    better: int = 0
    """1: more is better, −1: less is better, 0: neither."""
    families: tuple[str, ...] = ()
    """Input families besides the run itself that the number takes its kind from."""


def gpu_share(
    run: RunSummary, causes: tuple[str, ...], lanes: tuple[str, ...] = ("engines", "trainer", "shared")
) -> float:
    """Share of the GPU time of these lanes that went to these causes; 0 if the run has no such lane."""
    pools = [p for p in run.pools if p.lane in lanes]
    total = sum(sum(p.gpu_seconds.values()) for p in pools)
    return sum(p.gpu_seconds.get(c, 0.0) for p in pools for c in causes) / total if total else 0.0


def default_reading(run: RunSummary) -> StalenessReading:
    """Staleness by the scenario's own measure. Raises KeyError when the run lacks it."""
    return run.staleness[run.staleness_measure]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def _percent(value: float, spread: float) -> str:
    return numbers.percent(value, 1)


def _tenths(value: float, spread: float) -> str:
    return numbers.tenths(value)


def _whole(value: float, spread: float) -> str:
    return numbers.grouped(value)


def _short_seconds(value: float, spread: float) -> str:
    """Parts of a weight update: a tenth of a second is enough from one second on."""
    return numbers.seconds(value, max(spread, 0.1) if value >= 1 else spread)


def reward_ends(run: RunSummary) -> tuple[float, float]:
    """Mean reward of the first and of the last fifth of the batches, one batch at least.

    Batches of the warm-up count: it is there for the times, and the policy learns from its first batch.
    """
    rewards = [s.reward_mean for s in run.steps]
    n = fifth(len(rewards))
    return fmean(rewards[:n]), fmean(rewards[-n:])


def _rise(run: RunSummary) -> float:
    first, last = reward_ends(run)
    return last - first


METRICS: dict[str, Metric] = {
    "step_time_s": Metric("Step time", "s", lambda r: r.step_time_mean_s, numbers.seconds, "g-step", "relative", -1),
    "trained_tokens_per_s_per_gpu": Metric(
        "Trained tokens",
        "actor tokens in the loss per s per GPU",
        lambda r: r.trained_tokens_per_s_per_gpu,
        numbers.plain,
        "g-tps",
        "relative",
        1,
    ),
    "generated_tokens_per_s_per_gpu": Metric(
        "Generated tokens",
        "output tokens, dropped ones included, per s per GPU",
        lambda r: r.generated_tokens_per_s_per_gpu,
        numbers.plain,
        "g-gps",
        "relative",
        1,
    ),
    "trajectories_per_s": Metric(
        "Trained trajectories", "per s", lambda r: r.trajectories_per_s, numbers.plain, "g-trajs", "relative", 1
    ),
    "trained_tokens_per_step": Metric(
        "Trained tokens per step",
        "actor tokens in the loss",
        lambda r: _ratio(r.waste.trained_tokens, r.measured_steps),
        _whole,
        "",
        "relative",
    ),
    "cost_usd_per_1000_steps": Metric(
        "Cost",
        "USD per 1,000 steps",
        lambda r: r.cost_usd_per_1000_steps,
        numbers.dollars,
        "g-usd",
        "relative",
        -1,
        families=("price",),
    ),
    "staleness_dequeue_mean": Metric(
        "Staleness at dequeue, mean",
        "versions",
        lambda r: default_reading(r).dequeue.mean,
        _tenths,
        "g-stale",
        "none",
        -1,
    ),
    "staleness_dequeue_p95": Metric(
        "Staleness at dequeue, p95", "versions", lambda r: default_reading(r).dequeue.p95, _whole, "g-stale", "none"
    ),
    "staleness_dequeue_max": Metric(
        "Staleness at dequeue, max", "versions", lambda r: default_reading(r).dequeue.max, _whole, "g-stale", "none"
    ),
    "staleness_completion_mean": Metric(
        "Staleness at completion, mean",
        "versions",
        lambda r: default_reading(r).completion.mean,
        _tenths,
        "g-stale",
        "none",
    ),
    "staleness_in_generation": Metric(
        "of it, arose in generation",
        "versions",
        lambda r: r.staleness_in_generation * default_reading(r).dequeue.mean,
        _tenths,
        "g-ages",
        "none",
    ),
    "staleness_in_buffer": Metric(
        "of it, arose in the buffer",
        "versions",
        lambda r: r.staleness_in_buffer * default_reading(r).dequeue.mean,
        _tenths,
        "g-ages",
        "none",
    ),
    "waste_share": Metric("Waste", "of generated tokens", lambda r: r.waste.share, _percent, "g-waste", "points", -1),
    "dropped_trajectories_share": Metric(
        "Dropped trajectories",
        "of all that ended",
        lambda r: _ratio(
            sum(r.waste.dropped_trajectories.values()),
            r.waste.trained_trajectories + sum(r.waste.dropped_trajectories.values()),
        ),
        _percent,
        "g-waste",
        "points",
    ),
    "corrected_share": Metric(
        "Corrected trajectories",
        "of trained ones",
        lambda r: _ratio(r.waste.corrected_trajectories, r.waste.trained_trajectories),
        _percent,
        "g-corrected",
        "points",
    ),
    "masked_share": Metric(
        "Masked tokens",
        "of generated tokens",
        lambda r: _ratio(r.waste.masked_tokens, r.waste.generated_tokens),
        _percent,
        "g-masked",
        "points",
    ),
    "gpu_idle_share": Metric("GPU idle", "of GPU time", lambda r: gpu_share(r, IDLE), _percent, "g-idle", "points", -1),
    "engines_idle_share": Metric(
        "Engines idle",
        "of their GPU time",
        lambda r: gpu_share(r, ENGINES_IDLE, ("engines", "shared")),
        _percent,
        "g-idle",
        "points",
    ),
    "trainer_idle_share": Metric(
        "Trainer idle",
        "of its GPU time",
        lambda r: gpu_share(r, ("idle_data",), ("trainer", "shared")),
        _percent,
        "g-idle",
        "points",
    ),
    "tail_share": Metric(
        "Generate, under ¼ full",
        "of GPU time",
        lambda r: gpu_share(r, ("generate_tail",)),
        _percent,
        "g-c-generate_tail",
        "points",
    ),
    "hidden_generation_share": Metric(
        "Hidden generation",
        "of engine-seconds of generation",
        lambda r: r.hidden_generation_share,
        _percent,
        "g-over",
        "points",
    ),
    "overlap_s_per_step": Metric(
        "Trains while engines generate", "s per step", lambda r: r.overlap_s_per_step, numbers.seconds, "g-over", "none"
    ),
    "trainer_waits_empty_s": Metric(
        "Trainer waits, buffer empty",
        "s per step",
        lambda r: r.buffer.empty_s,
        numbers.seconds,
        "g-c-idle_data",
        "none",
    ),
    "trainer_waits_not_ready_s": Metric(
        "Trainer waits, groups present, not ready",
        "s per step",
        lambda r: r.buffer.not_ready_s,
        numbers.seconds,
        "g-c-idle_data",
        "none",
    ),
    "trainer_waits_too_few_ready_s": Metric(
        "Trainer waits, fewer ready than a batch",
        "s per step",
        lambda r: r.buffer.too_few_ready_s,
        numbers.seconds,
        "g-c-idle_data",
        "none",
    ),
    "producer_blocked_s": Metric(
        "Admission held back by a full buffer",
        "s per step",
        lambda r: r.buffer.producer_blocked_s,
        numbers.seconds,
        "g-c-idle_buffer_full",
        "none",
    ),
    "kv_cached_share": Metric(
        "Prompt tokens from the cache",
        "of prompt tokens",
        lambda r: _ratio(r.kv.cached_tokens, r.kv.prompt_tokens),
        _percent,
        "g-reuse",
        "points",
    ),
    "kv_recomputed_share": Metric(
        "Tokens computed again",
        "relative to prompt tokens",
        lambda r: _ratio(r.kv.recomputed_tokens, r.kv.prompt_tokens),
        _percent,
        "g-c-recompute_kv",
        "points",
    ),
    "kv_retractions": Metric(
        "Retractions", "in the measured steps", lambda r: float(r.kv.retractions), _whole, "g-retract", "none"
    ),
    "output_length_mean": Metric(
        "Output length, mean",
        "tokens",
        lambda r: r.output_length.mean,
        _whole,
        "",
        "relative",
        families=("reply_lengths",),
    ),
    "output_length_p95": Metric(
        "Output length, p95",
        "tokens",
        lambda r: r.output_length.p95,
        _whole,
        "",
        "relative",
        families=("reply_lengths",),
    ),
    "capped_share": Metric(
        "Ended by the length cap",
        "of trajectories",
        lambda r: r.capped_share,
        _percent,
        "",
        "points",
        families=("reply_lengths",),
    ),
    "update_total_s": Metric(
        "Weight update, total",
        "s",
        lambda r: r.weight_update.total_s,
        _short_seconds,
        "g-update",
        "relative",
        -1,
        families=("links",),
    ),
    "update_prepare_s": Metric(
        "Weight update, prepare",
        "s",
        lambda r: r.weight_update.prepare_s,
        _short_seconds,
        "g-update",
        "none",
        families=("links",),
    ),
    "update_drain_s": Metric(
        "Weight update, drain", "s", lambda r: r.weight_update.drain_s, _short_seconds, "g-drain", "none"
    ),
    "update_copy_s": Metric(
        "Weight update, copy",
        "s",
        lambda r: r.weight_update.copy_s,
        _short_seconds,
        "g-update",
        "none",
        families=("links",),
    ),
    "update_requantize_s": Metric(
        "Weight update, requantise",
        "s",
        lambda r: r.weight_update.requantize_s,
        _short_seconds,
        "g-update",
        "none",
        families=("links",),
    ),
    "update_barrier_s": Metric(
        "Weight update, barrier", "s", lambda r: r.weight_update.barrier_s, _short_seconds, "g-barrier", "none"
    ),
    "update_pause_s": Metric(
        "Engines paused", "s per update", lambda r: r.weight_update.pause_s, _short_seconds, "g-pause", "relative", -1
    ),
    "update_to_first_request_s": Metric(
        "Effective to first request",
        "s",
        lambda r: r.weight_update.effective_to_first_request_s,
        _short_seconds,
        "g-effective",
        "none",
    ),
    "update_failed": Metric(
        "Failed weight updates", "in the measured steps", lambda r: float(r.weight_update.failed), _whole, "", "none"
    ),
    **{
        f"trajectory_{name}_s": Metric(
            f"Trajectory, {part.label}",
            "s",
            attrgetter(f"trajectory.{name}"),
            numbers.seconds,
            f"g-t-{name}",
            "none",
        )
        for name, part in TRAJECTORY.items()
    },
    "trajectory_total_s": Metric(
        "Trajectory, total", "s", lambda r: r.trajectory.total, numbers.seconds, "g-t-total", "relative"
    ),
    "measured_steps": Metric("Measured steps", "steps", lambda r: float(r.measured_steps), _whole, "g-step", "none"),
}

"""Of every run."""

REWARD: dict[str, Metric] = {
    "reward_first": Metric(
        "Reward, first fifth",
        "mean of the batches",
        lambda r: reward_ends(r)[0],
        numbers.hundredths,
        "g-reward",
        "none",
        families=("rewards",),
    ),
    "reward_last": Metric(
        "Reward, last fifth",
        "mean of the batches",
        lambda r: reward_ends(r)[1],
        numbers.hundredths,
        "g-reward",
        "none",
        1,
        families=("rewards",),
    ),
    "reward_rise": Metric(
        "Reward, rise", "last fifth minus first", _rise, numbers.hundredths, "g-rise", "none", 1, families=("rewards",)
    ),
}
"""Of real runs besides: they alone learn."""

_ENDS = {
    "shortest": ("length", False, "quarter with the shortest replies"),
    "longest": ("length", True, "quarter with the longest replies"),
    "hardest": ("difficulty", False, "quarter with the hardest tasks"),
    "easiest": ("difficulty", True, "quarter with the easiest tasks"),
}

TAILS: dict[str, Metric] = {
    **{
        f"given_up_{end}": Metric(
            "Given up",
            f"share, {words}",
            partial(tails.given_up, by=by, high=high),
            _percent,
            "g-bias",
            "points",
            families=("reply_lengths", "rewards"),
        )
        for end, (by, high, words) in _ENDS.items()
    },
    **{
        f"delay_{end}": Metric(
            "Delay of what is trained",
            f"RL steps, {words}",
            partial(tails.delay_steps, by=by, high=high),
            numbers.hundredths,
            "g-bias",
            "none",
            families=("reply_lengths", "rewards"),
        )
        for end, (by, high, words) in _ENDS.items()
    },
}
"""Of runs with a tail rule: its sampling bias."""


def _programs(run: RunSummary) -> ProgramFigures:
    assert run.programs is not None
    return run.programs


PROGRAMS: dict[str, Metric] = {
    "turns_per_min": Metric(
        "Model calls", "per minute", lambda r: _programs(r).turns_per_min, numbers.hundredths, "g-programs", "relative"
    ),
    "context_share_mean": Metric(
        "Contexts of all programs",
        "over all KV, mean",
        lambda r: _programs(r).context_share_mean,
        numbers.hundredths,
        "g-thrash",
        "none",
    ),
    "program_pauses": Metric(
        "Programs paused", "in the measured steps", lambda r: float(_programs(r).pauses), _whole, "g-programs", "none"
    ),
    "programs_waiting": Metric(
        "Programs waiting", "mean", lambda r: _programs(r).waiting_mean, numbers.hundredths, "g-programs", "none"
    ),
    "tool_faults": Metric(
        "Tool calls beyond a limit",
        "in the measured steps",
        lambda r: float(sum(_programs(r).tool_faults.values())),
        _whole,
        "g-programs",
        "none",
    ),
}
"""Of runs whose trajectories are several model calls."""

EVERY: dict[str, Metric] = METRICS | REWARD | TAILS | PROGRAMS


def metrics_for(runs: Sequence[RunSummary], rewarded: bool) -> dict[str, Metric]:
    """Those that all of these runs have."""
    found = METRICS | (REWARD if rewarded and all(r.rewarded for r in runs) else {})
    found |= TAILS if all(r.bias for r in runs) else {}
    return found | (PROGRAMS if all(r.programs is not None for r in runs) else {})


def kind_of(metric: Metric, run: RunSummary) -> str:
    """Kind of this number in this run: the weakest of the run's own kind and its input families."""
    return weakest([result_kind(run.backend), *(run.kinds[f] for f in metric.families if f in run.kinds)])
