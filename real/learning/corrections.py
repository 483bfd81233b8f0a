"""Weights that correct for data of another policy, what limits them, and what the differences are.

The chain of one token's probabilities: 0.50 when generated, 0.52 in the trainer with the same weights (old), 0.60 in
the trainer now. ln 1.2 = 0.182 is an engine difference of ln 1.04 = 0.039 and an update difference of 0.143. A weight
changes how much a token counts; it does not make the engines agree, so differences are measured apart from it.

Formulas: systems.md 3.6; truncation, masking and sequence level as in TIS and MIS (Yao et al. 2025; Liu et al. 2025),
two-sided token mask IcePop's. Knows no loss. Layout as in `ratios`: [K] tokens that carry loss, and their `sequences`.
A masked token keeps its place in the denominators of `aggregate`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from real.learning.options import WeightLevel, WeightLimits
from real.learning.ratios import exp_clamped, sequence_mean, sequence_min, sequence_sum


class Weights(NamedTuple):
    """[K] each, no gradient."""

    raw: Tensor
    """At the level of the limits, before them."""
    weight: Tensor
    """After them; 0 where masked."""
    truncated: Tensor
    """Bool: brought to a bound."""
    masked: Tensor
    """Bool: its own weight, its sequence's mean or a veto took it out."""


def correction_weights(log_probs: Tensor, generation: Tensor, sequences: Tensor, limits: WeightLimits) -> Weights:
    """p(trainer) / p(generation) of each token, at the limits' level and within them; `normalise` is the caller's,
    who alone sees the whole update.

    `log_probs` are the trainer's: old ones for the engine difference alone (the numerator of TIS: not the current
    ones), current ones where one ratio is to hold both differences."""
    log_ratio = (log_probs - generation).detach()
    raw = exp_clamped(at_level(log_ratio, sequences, limits.level))
    weight, truncated, masked = raw, torch.zeros_like(raw, dtype=torch.bool), torch.zeros_like(raw, dtype=torch.bool)
    if limits.bounds is not None:
        low, high = limits.bounds
        outside = (raw < low) | (raw > high)
        if limits.action == "truncate":
            weight, truncated = raw.clamp(low, high), outside
        else:
            masked = outside
    if limits.geometric_band is not None:
        low, high = limits.geometric_band
        mean = at_level(log_ratio, sequences, "geometric").exp()
        masked = masked | (mean < low) | (mean > high)
    if limits.veto is not None:
        masked = masked | (sequence_min(log_ratio, sequences) < math.log(limits.veto))
    return Weights(raw, weight.masked_fill(masked, 0.0), truncated & ~masked, masked)


def at_level(log_ratio: Tensor, sequences: Tensor, level: WeightLevel) -> Tensor:
    """Log of the token's own ratio, of the product over its sequence, or of the geometric mean over it. The product
    vanishes or explodes with length; the mean does not."""
    if level == "token":
        return log_ratio
    return (sequence_sum if level == "sequence" else sequence_mean)(log_ratio, sequences)


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / (N sum w^2): the share of the N tokens whose equally weighted sample would be as good; 1 for equal
    weights, 1/N if one carries all, 0 if none does."""
    squares = (weights * weights).sum()
    return weights.sum() ** 2 / (len(weights) * squares) if squares > 0 else squares


class Differences(NamedTuple):
    """Log-ratios of the same tokens, [K] each; `engine` + `update` = `total`."""

    engine: Tensor
    """old - generation: another engine, the same weights, if `old` was computed with those that generated."""
    update: Tensor
    """current - old: the same engine, other weights."""
    total: Tensor
    """current - generation."""


def differences(generation: Tensor, old: Tensor, current: Tensor) -> Differences:
    """Measures and corrects nothing. The first is not 0 at staleness 0; the second is, before the first update."""
    generation, old, current = generation.detach(), old.detach(), current.detach()
    return Differences(old - generation, current - old, current - generation)
