"""How much better than its group each response was (GRPO, arXiv 2402.03300). Knows rewards only; who belongs to a
group is the caller's business, and so is spreading one value over a response's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from real.learning.options import AdvantageStd

EQUAL_REWARDS = 1e-9
"""Rewards closer than this are equal: rounding is no signal, and dividing it by itself would make it one."""


def group_advantages(rewards: Tensor, std: AdvantageStd = "population") -> Tensor:
    """A_i = (r_i - mean r) / std r over one group; rewards [n]. Returns [n] float64 without gradient.

    `population` divides by sqrt(sum (r - mean)^2 / n), so that 1,1,0,0 gives +1,+1,-1,-1; `sample` by the n - 1 form
    (+-0.866); `none` does not divide (+-0.5). No epsilon is added. Equal rewards, and a group of one, have no relative
    signal: all zeros, under every `std`."""
    r = rewards.detach().to(torch.float64)
    if len(r) < 2 or r.max() - r.min() <= EQUAL_REWARDS:
        return torch.zeros_like(r)
    centred = r - r.mean()
    return centred if std == "none" else centred / r.std(correction=0 if std == "population" else 1)
