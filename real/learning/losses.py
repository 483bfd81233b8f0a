"""Policy losses per token. A loss here is [K] values, one per token; what they sum to is `aggregate`'s business.

Advantages and the denominator are constants: no gradient flows through them.

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

from real.learning.options import LossOptions

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: beyond it a ratio is a fault, and must not become inf (Miles' clamp)."""


class TokenLoss(NamedTuple):
    """All [K] float32; `loss` carries the gradient, `ratio` does not."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """Bool: the token pushes no further, its ratio has left the bound in the favourable direction."""


def policy_gradient(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p(chosen | context), [K]."""
    return -advantages.detach() * log_probs


def probability_ratio(log_probs: Tensor, denominator: Tensor) -> Tensor:
    """r = p_current / p_denominator of the same tokens, [K]."""
    return (log_probs - denominator.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip(log_probs: Tensor, denominator: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; low != high is DAPO's, arXiv 2503.14476)."""
    advantages = advantages.detach()
    ratio = probability_ratio(log_probs, denominator)
    free, held = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    return TokenLoss(torch.maximum(free, held), ratio.detach(), held > free)


def policy_loss(
    log_probs: Tensor, generation: Tensor, old: Tensor | None, advantages: Tensor, options: LossOptions
) -> TokenLoss:
    """The clipped loss with the denominator that `options` names; log-probs [K]. `old` may be None only for
    `generation`. Raises ValueError if it is missing."""
    if options.denominator == "generation":
        return ppo_clip(log_probs, generation, advantages, options.eps_clip, options.high)
    if old is None:
        raise ValueError(f"denominator {options.denominator} without old log-probs")
    clipped = ppo_clip(log_probs, old, advantages, options.eps_clip, options.high)
    if options.denominator == "recomputed":
        return clipped
    return clipped._replace(loss=clipped.loss * probability_ratio(old, generation).detach())
