"""Advantages against a critic: the return minus what the critic expected, at once or as a sum of TD errors (GAE, arXiv
1506.02438). Knows values and rewards as numbers, not what predicted or gave them; results are constants."""

from __future__ import annotations

import torch
from torch import Tensor


def value_baseline(returns: Tensor, values: Tensor) -> Tensor:
    """A_t = R - V_t: `returns` [...] or [..., T] of what was earned after each choice, `values` [..., T] the critic's
    expectation before it. A fully observed return of 1 with V = 0.2, 0.6, 0.4 gives 0.8, 0.4, 0.6. [..., T]."""
    if returns.ndim < values.ndim:
        returns = returns.unsqueeze(-1)
    return (returns - values).detach()


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor | None = None, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_t+1 - V_t and A_t = delta_t + gamma lam A_t+1; [..., T] each. Returns (advantages,
    returns = A + V, which the critic is trained on), without gradient, 0 where masked.

    `mask` [..., T] is True where the actor chose; None: everywhere. Time passes with choices only: t + 1 is the next
    unmasked position, so observations neither discount nor decay. A reward at a masked position is credited to the last
    choice before it. After the last choice nothing is expected, in a truncated response too (Miles); padding at the end
    is masked positions. Raises ValueError for a reward that no choice precedes."""
    rewards, values = rewards.detach(), values.detach()
    chosen = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    advantages = torch.zeros_like(values)
    next_advantage = next_value = late = torch.zeros_like(values[..., 0])
    for t in reversed(range(values.shape[-1])):
        here, reward = chosen[..., t], rewards[..., t] + late
        delta = reward + gamma * next_value - values[..., t]
        advantage = delta + gamma * lam * next_advantage
        advantages[..., t] = torch.where(here, advantage, 0)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[..., t], next_value)
        late = torch.where(here, 0, reward)
    if bool((late != 0).any()):
        raise ValueError("gae: a reward stands before the first choice")
    return advantages, torch.where(chosen, advantages + values, 0)
