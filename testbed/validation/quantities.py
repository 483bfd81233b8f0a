"""What is compared between a real run and a simulation: name, unit, how it is read, how far it may be off.

It refuses to know errors and which run is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from testbed.metrics.summary import CAUSES
from testbed.validation.observed import Observed

STEP_TIME = "step_time"
UPDATE_PARTS = ("prepare", "drain", "copy", "requantize", "barrier", "pause", "total")


class Quantity(Struct, frozen=True):
    """`group`: `steps`, `split` (of a lane's time by cause), `turns`, `updates`."""

    name: str
    group: str
    label: str
    unit: str
    limit: float | None = None
    """Relative error that is accepted where the real side's own spread is not larger; None: not judged."""


Values = list[tuple[Quantity, float]]


def values(run: Observed) -> Values:
    """All quantities of one run, over its measured steps."""
    return [*_steps(run), *_split(run), *_turns(run), *_updates(run)]


def _steps(run: Observed) -> Values:
    s = run.summary
    return [
        (Quantity(STEP_TIME, "steps", "step time", "s", 0.03), s.step_time_mean_s),
        (
            Quantity("trained_tokens_per_s", "steps", "trained tokens per second", "1/s", 0.03),
            s.trained_tokens_per_s_per_gpu * s.num_gpus,
        ),
        (
            Quantity("generated_tokens_per_s", "steps", "generated tokens per second", "1/s", 0.03),
            s.generated_tokens_per_s_per_gpu * s.num_gpus,
        ),
        (Quantity("trajectories_per_s", "steps", "trained trajectories per second", "1/s", 0.03), s.trajectories_per_s),
        (Quantity("dropped_share", "steps", "dropped share of generated tokens", ""), s.waste.share),
    ]


def _split(run: Observed) -> Values:
    """Seconds per step that a lane's GPUs spend on each cause; a lane's causes sum to the step time."""
    found: Values = []
    s = run.summary
    for pool in s.pools:
        for cause in CAUSES:
            label = f"{pool.name}: {cause.replace('_', ' ')}"
            seconds = pool.gpu_seconds.get(cause, 0.0) / pool.gpus / s.measured_steps
            found.append((Quantity(f"split/{pool.name}/{cause}", "split", label, "s"), seconds))
    return found


def _turns(run: Observed) -> Values:
    turns = run.measured
    if not turns:
        return []
    latency = sorted(t.latency_s for t in turns)
    queue = sorted(t.queue_s for t in turns)
    decoding = [t for t in turns if t.output_tokens > 1]
    start, end = run.window
    engines = len({t.engine for t in turns})
    inside = sum(min(t.finished_t, end) - max(t.started_t, start) for t in run.turns if t.finished_t > start)

    def q(name: str, label: str, unit: str, limit: float | None = None) -> Quantity:
        return Quantity(name, "turns", label, unit, limit)

    found = [
        (q("latency_mean", "turn latency, mean", "s"), fmean(latency)),
        (q("latency_p50", "turn latency, p50", "s", 0.05), quantile(latency, 0.5)),
        (q("latency_p95", "turn latency, p95", "s", 0.10), quantile(latency, 0.95)),
        (q("latency_p99", "turn latency, p99", "s"), quantile(latency, 0.99)),
        (q("queue_mean", "wait for the engine, mean", "s"), fmean(queue)),
        (q("queue_p95", "wait for the engine, p95", "s"), quantile(queue, 0.95)),
        (q("prefill_mean", "prefill, mean", "s"), fmean(t.prefill_s for t in turns)),
        (q("running_mean", "turns in one engine at a time, mean", ""), max(inside, 0.0) / (end - start) / engines),
        (q("prompt_tokens", "prompt tokens per turn", ""), fmean(t.prompt_tokens for t in turns)),
        (q("cached_tokens", "cached tokens per turn", ""), fmean(t.cached_tokens for t in turns)),
        (q("output_tokens", "output tokens per turn", ""), fmean(t.output_tokens for t in turns)),
        (q("retractions", "retractions per 1,000 turns", ""), 1000 * fmean(t.retractions for t in turns)),
    ]
    if decoding:
        per_token = fmean(t.decode_s / (t.output_tokens - 1) for t in decoding)
        found.insert(7, (q("decode_per_token", "decode, mean per token", "s"), per_token))
    return found


def _updates(run: Observed) -> Values:
    """Seconds per publication."""
    update = run.summary.weight_update
    if not update.count:
        return []
    return [
        (Quantity(f"update/{part}", "updates", f"weight update: {part}", "s"), getattr(update, f"{part}_s"))
        for part in UPDATE_PARTS
    ]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of rank floor(share (n - 1)), as the run's own figures have it."""
    return ordered[int(share * (len(ordered) - 1))]


def total_variation(a: dict[int, float], b: dict[int, float]) -> float:
    """Half the sum of differences of two histograms' shares, 0 (equal) to 1 (nothing in common)."""
    total_a, total_b = sum(a.values()) or 1.0, sum(b.values()) or 1.0
    return 0.5 * sum(abs(a.get(v, 0) / total_a - b.get(v, 0) / total_b) for v in {*a, *b})
