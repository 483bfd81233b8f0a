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


@dataclass(frozen=True)
class Moved:
    """Offload or onload of one rank (the facade: bytes summed, seconds of the slowest)."""

    bytes: int
    seconds: float
