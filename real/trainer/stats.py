"""What trainer calls report. Plain numbers, no torch: they cross process borders."""

from __future__ import annotations

from dataclasses import dataclass


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
    replayed_positions: int = 0
    """Positions that ran the experts of their routing record (R3)."""
    fallback_positions: int = 0
    """Positions that should have, had no record and were routed by the trainer's own router."""


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


@dataclass(frozen=True)
class Moved:
    """Offload or onload of one rank (the facade: bytes summed, seconds of the slowest)."""

    bytes: int
    seconds: float
