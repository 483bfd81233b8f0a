"""What trainer calls report. Plain numbers, no torch: they cross process borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from real.learning.options import LossOptions, WeightLimits
from testbed.metrics.ratios import added


@dataclass(frozen=True)
class StepStats:
    """One optimizer update, over all ranks; the same on every rank but for `seconds`. Means are over the `tokens`."""

    batch: int
    update: int
    loss: float
    grad_norm: float
    """Before clipping."""
    clip_share: float
    """Share of tokens whose ratio has left the bound in the favourable direction."""
    mean_ratio: float
    mismatch_kl: float
    """k3 estimate of KL(generation || trainer before the update). Where the trainer still has the weights that
    generated, this is the difference between the two engines alone; else the updates since then are in it."""
    reference_kl: float
    """Estimate of KL(current || reference), by `kl_type`; 0 without a reference."""
    sequences: int
    tokens: int
    """Actor tokens that carry loss."""
    input_tokens: int
    """Tokens in the forward pass: prompts, actor tokens, observations."""
    micro_batches: int
    """On the rank that had most."""
    seconds: float
    """On this rank (the facade reports rank 0's)."""
    truncated_share: float = 0.0
    """Share of tokens whose correction weight was brought to a bound."""
    masked_share: float = 0.0
    """Share of tokens that the limits took out; they stay in the denominators."""
    effective_sample_size: float = 1.0
    """(sum w)^2 / (tokens sum w^2) of the correction weights after limits; 1: all tokens count the same."""
    engine_log_ratio: float | None = None
    """log p(trainer before the update) - log p(engine when sampled). This and the next three only where old log-probs
    were recomputed. An update's correction does not change them."""
    engine_kl: float | None = None
    """k3 estimate of KL(generation || old)."""
    update_log_ratio: float | None = None
    """log p(trainer now) - log p(trainer before the batch's first update), where this update begins."""
    update_kl: float | None = None
    """k3 estimate of KL(old || current)."""
    teacher_kl: float | None = None
    """log p(student before the update) - log p(its teacher) of the student's own tokens: the k1 estimate of
    KL(student || teacher), which its noise may take below 0. The student's side is that of the distillation signal
    (old log-probs where they were recomputed, else generation's). This and the next only where records have teachers.
    """
    teacher_kl_k3: float | None = None
    """The same by k3, never negative."""
    replayed_positions: int = 0
    """Positions that ran the experts of their routing record (R3)."""
    fallback_positions: int = 0
    """Positions that should have, had no record and were routed by the trainer's own router."""
    ratio_counts: dict[int, int] = field(default_factory=dict)
    """Of the ratios that the loss reads, before any limit: current to `denominator`, of a token or (`gspo`) its
    sequence. Bin of `testbed.metrics.ratios` -> tokens; they sum to `tokens`."""
    engine_ratio_counts: dict[int, int] = field(default_factory=dict)
    """Of p(trainer before the update) / p(engine when sampled); only where old log-probs were recomputed."""


@dataclass(frozen=True)
class CriticStats:
    """One optimizer update of the critic, over all ranks; the same on every rank but for `seconds`."""

    batch: int
    update: int
    loss: float
    """Mean over the `tokens` of the (clipped) value loss."""
    grad_norm: float
    """Before clipping."""
    clip_share: float
    """Share of tokens whose value has moved out of the bound and pushes no further."""
    explained_variance: float
    """1 - Var(return - value) / Var(return) of the values before the update; 0 where all returns are equal."""
    tokens: int
    seconds: float


def batch_figures(updates: Sequence[tuple[StepStats, CriticStats | None]], loss: LossOptions) -> dict[str, float]:
    """What the updates of one batch did, each figure a mean over those of them that have it: the entries of
    `testbed.metrics.summary.StepRecord.learning`. Names are the fields' own, with `value_` in front of those of a
    critic that an actor has too.

    Only what has a meaning under this loss: no clipped share of a loss that does not clip, no truncated share without
    limits, no KL to a reference that there is not, no `mismatch_kl` where its two parts are known apart."""
    limited = loss.limits != WeightLimits()
    names = ["grad_norm", "teacher_kl", "teacher_kl_k3"]
    names += ["clip_share"] if loss.clip is not None else []
    names += ["truncated_share", "masked_share"] if limited else []
    names += ["effective_sample_size"] if limited or loss.corrects else []
    names += ["reference_kl"] if loss.kl_coef > 0 else []
    found: dict[str, list[float]] = {}
    for stats, critic in updates:
        apart = ("engine_kl", "update_kl") if stats.engine_kl is not None else ("mismatch_kl",)
        for name in (*apart, *names):
            value = getattr(stats, name)
            if value is not None:
                found.setdefault(name, []).append(value)
        replayed = stats.replayed_positions + stats.fallback_positions
        if replayed:
            found.setdefault("fallback_share", []).append(stats.fallback_positions / replayed)
        if critic is not None:
            for name, value in (
                ("value_loss", critic.loss),
                ("value_grad_norm", critic.grad_norm),
                ("explained_variance", critic.explained_variance),
            ):
                found.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def batch_ratios(updates: Sequence[StepStats]) -> dict[str, dict[int, int]]:
    """Histograms over the tokens of all updates of one batch: `testbed.metrics.summary.StepRecord.ratios`."""
    found = {
        "ratio": added(u.ratio_counts for u in updates),
        "engine_ratio": added(u.engine_ratio_counts for u in updates),
    }
    return {name: counts for name, counts in found.items() if counts}


@dataclass(frozen=True)
class Moved:
    """Offload or onload of one rank (the facade: bytes summed, seconds of the slowest)."""

    bytes: int
    seconds: float
