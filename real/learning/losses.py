"""Policy losses per token. A loss here is [K] values, one per token; what they sum to is `aggregate`'s business.

Advantages, denominators and weights are constants: no gradient flows through them.

Three log-probs of the same token in the same context are kept apart (design.md 3):
generation (engine, when sampled), old (trainer, before the update), current (trainer, now). `denominator` picks:

    generation   r = exp(current - generation)       one ratio for both differences, no extra forward pass
    recomputed   r = exp(current - old)              the update only; the engine difference is ignored
    decoupled    r = exp(current - old), the loss times exp(old - generation)       AReaL, arXiv 2505.24298

With p = 0.50 (engine), 0.52 (trainer, same weights), 0.60 (trainer, now): 1.2; 1.1538; 1.1538 and weight 1.04."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from real.learning.corrections import correction_weights
from real.learning.options import LossOptions
from real.learning.ratios import probability_ratio, sequence_ratio


class Clipped(NamedTuple):
    """[K] each."""

    loss: Tensor
    clipped: Tensor
    """Bool: the clip has changed this token's gradient."""


class TokenLoss(NamedTuple):
    """All [K]; `loss` carries the gradient, nothing else does."""

    loss: Tensor
    ratio: Tensor
    """Under the clip: current to `denominator`, before limits."""
    clipped: Tensor
    """Bool: its ratio has left the bound in the favourable direction, so it pushes no further (`cispo`: it pushes with
    the bound; dual clip: also far out in the other direction)."""
    weight: Tensor
    """What corrects the token, after limits: the decoupled weight, the limited ratio to generation, or 1; 0: masked."""
    truncated: Tensor
    masked: Tensor
    """Bool, of `corrections.Weights`."""


def policy_gradient(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p(chosen | context), [K]."""
    return -advantages.detach() * log_probs


def importance(ratio: Tensor, advantages: Tensor) -> Tensor:
    """-r A, [K]: off-policy data corrected and not limited."""
    return -ratio * advantages.detach()


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Clipped:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; low != high is DAPO's, arXiv 2503.14476).

    With `dual` > 1, at most -dual A where A < 0 (arXiv 1912.09729). On a `sequence_ratio` this is GSPO."""
    advantages = advantages.detach()
    free, held = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    loss, clipped = torch.maximum(free, held), held > free
    if dual is not None:
        most = -dual * advantages
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return Clipped(loss, clipped)


def cispo(log_probs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Clipped:
    """-clip(r, 1 - low, 1 + high) A log p with the clipped ratio as a constant (MiniMax-M1, arXiv 2506.13585): a token
    beyond a bound keeps its gradient, with the bound as its weight."""
    ratio = ratio.detach()
    held = ratio.clamp(1 - low, 1 + high)
    return Clipped(-held * advantages.detach() * log_probs, held != ratio)


def policy_loss(
    log_probs: Tensor,
    generation: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    options: LossOptions,
    sequences: Tensor | None = None,
    mean_weight: float | None = None,
) -> TokenLoss:
    """The loss that `options` name; log-probs and advantages [K], the trainer's current log-probs with gradient.

    `old` may be None only for `generation`. `sequences` [K] as in `ratios`; None: all tokens are one sequence's.
    `mean_weight` is that of the whole update's unmasked tokens, for `limits.normalise`; None: that of these tokens.
    Raises ValueError if `old` is missing."""
    if options.denominator == "generation":
        below, trainer = generation, log_probs
    elif old is None:
        raise ValueError(f"denominator {options.denominator} without old log-probs")
    else:
        below = trainer = old
    if sequences is None:
        sequences = torch.zeros_like(log_probs, dtype=torch.long)
    if options.loss_type == "gspo":
        ratio = sequence_ratio(log_probs, below, sequences)
    else:
        ratio = probability_ratio(log_probs, below)
    weights = correction_weights(trainer, generation, sequences, options.limits)

    kept = (~weights.masked).to(log_probs.dtype)
    limited, outer = ratio, kept
    if options.denominator == "generation":
        # The weight is inside the ratio: it is truncated there, before the clip reads it.
        limited = torch.where(weights.truncated, ratio * (weights.weight / weights.raw), ratio)
        weight = limited.detach() * kept if options.corrects else kept
    elif options.denominator == "decoupled":
        outer = weights.weight
        if options.limits.normalise:
            outer = outer / (weights.weight.sum() / kept.sum().clamp(min=1) if mean_weight is None else mean_weight)
        weight = outer
    else:
        weight = kept

    loss, clipped = _token_loss(log_probs, limited, advantages, options)
    clipped = clipped & ~weights.masked
    return TokenLoss(loss * outer, ratio.detach(), clipped, weight, weights.truncated, weights.masked)


def _token_loss(log_probs: Tensor, ratio: Tensor, advantages: Tensor, options: LossOptions) -> Clipped:
    nothing = torch.zeros_like(log_probs, dtype=torch.bool)
    if options.loss_type == "policy_gradient":
        return Clipped(policy_gradient(log_probs, advantages), nothing)
    if options.loss_type == "importance":
        return Clipped(importance(ratio, advantages), nothing)
    if options.loss_type == "cispo":
        return cispo(log_probs, ratio, advantages, options.eps_clip, options.high)
    return ppo_clip(ratio, advantages, options.eps_clip, options.high, options.eps_clip_c)
