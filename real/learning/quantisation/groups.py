"""What the formats have in common: groups of values along a row that share a scale, and arithmetic that gives the same
bits on every device. Knows no format."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-12
"""Of a group with a floating-point scale: one of zeros gets a scale that is no zero."""


def over(values: Tensor, divisor: float) -> Tensor:
    """values / divisor, correctly rounded: for a Python number CUDA would multiply by its rounded reciprocal."""
    return values / values.new_full((), divisor)


def in_groups(weight: Tensor, size: int) -> Tensor:
    """[..., N, K] -> [..., N, ceil(K / size), size] float32, filled up with zeros, which raise no maximum."""
    up = torch.nn.functional.pad(weight.float(), (0, -weight.shape[-1] % size))
    return up.unflatten(-1, (-1, size))


def from_groups(groups: Tensor, weight: Tensor) -> Tensor:
    """The inverse of `in_groups`, in the shape and type of `weight`."""
    return groups.flatten(-2)[..., : weight.shape[-1]].to(weight.dtype)


def amax(groups: Tensor) -> Tensor:
    """[..., 1]: the largest magnitude of each group."""
    return groups.abs().amax(-1, keepdim=True)


def to_e4m3(values: Tensor) -> Tensor:
    """The nearest float8 E4M3 value, ties to even, saturating at +-448; float32 back."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def integers(groups: Tensor, largest: float) -> Tensor:
    """Each group rounded to integers of magnitude at most `largest` times amax / largest, ties to even."""
    scale = over(amax(groups).clamp(min=SMALLEST_AMAX), largest)
    return torch.round(groups / scale).clamp(-largest, largest) * scale
