"""How much better than its group each response was (GRPO, arXiv 2402.03300), and what is added to that. Knows rewards
only; who belongs to a group is the caller's business, and so is spreading one value over a response's tokens. A critic
as the baseline is module `gae`."""

from __future__ import annotations

import torch
from torch import Tensor

from real.learning.options import AdvantageStd

EQUAL_REWARDS = 1e-9
"""Rewards closer than this are equal: rounding is no signal, and dividing it by itself would make it one."""


def group_advantages(rewards: Tensor, std: AdvantageStd = "population") -> Tensor:
    """A_i = (r_i - mean r) / std r over one group; rewards [n]. Returns [n] float64 without gradient.

    `population` divides by sqrt(sum (r - mean)^2 / n), so that 1,1,0,0 gives +1,+1,-1,-1; `sample` by the n - 1 form
    (+-0.866); `none` does not divide (+-0.5); `leave_one_out` takes mean and n - 1 deviation of the other members
    (+-1.155) and does not divide where those are equal or one (NeMo RL). No epsilon is added. Equal rewards, and a
    group of one, have no relative signal: all zeros, under every `std`."""
    r = rewards.detach().to(torch.float64)
    if len(r) < 2 or r.max() - r.min() <= EQUAL_REWARDS:
        return torch.zeros_like(r)
    if std == "leave_one_out":
        return _leave_one_out(r)
    centred = r - r.mean()
    return centred if std == "none" else centred / r.std(correction=0 if std == "population" else 1)


def _leave_one_out(r: Tensor) -> Tensor:
    n = len(r)
    others = r.expand(n, n)[~torch.eye(n, dtype=torch.bool, device=r.device)].view(n, n - 1)
    centred = r - others.mean(1)
    spread = others.amax(1) - others.amin(1) > EQUAL_REWARDS
    deviation = others.std(1, correction=1 if n > 2 else 0)
    return centred / torch.where(spread, deviation, 1.0)


def combine(task: Tensor | None, signal: Tensor, coef: float = 1.0) -> Tensor:
    """A = A_task + coef * signal per token, [K] without gradient; `task` None: the teacher's signal alone, for which no
    reward is needed. +1 with +0.693 is 1.693."""
    weighted = coef * signal.detach()
    return weighted if task is None else task.detach() + weighted
