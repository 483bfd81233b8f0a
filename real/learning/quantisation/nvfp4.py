"""NVFP4 ("Pretraining Large Language Models with NVFP4", arXiv 2509.25149): 16 values of a row share an E4M3 scale, the
tensor has one float32 scale over those, values are E2M1.

    outer = amax(tensor) / (448 x 6)    scale = E4M3((amax(block) / 6) / outer)    value = E2M1(w / (scale x outer))

Kernels multiply by reciprocals; here every division is one rounding. The tensor is the engine's: q, k and v share an
outer scale, so do gate and up, and each expert has its own. A block whose scale rounds to zero is zeros. Of Miles'
NVFP4 recipe this is the weights' part; it also scales activations per token and keeps the last 15 % of layers in BF16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from real.learning.quantisation.groups import E4M3_MAX, SMALLEST_AMAX, amax, from_groups, in_groups, over, to_e4m3

GROUP = 16
E2M1_MAX = 6.0


def nvfp4(weight: Tensor) -> Tensor:
    """[..., N, K], leading dimensions are tensors of their own; same shape and dtype back."""
    groups = in_groups(weight, GROUP)
    largest = amax(groups)
    outer = over(largest.amax((-3, -2), keepdim=True).clamp(min=SMALLEST_AMAX), E4M3_MAX * E2M1_MAX)
    scale = to_e4m3(over(largest, E2M1_MAX) / outer) * outer
    values = torch.where(scale == 0, 0.0, groups / scale)
    return from_groups(to_e2m1(values) * scale, weight)


def to_e2m1(values: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of the value, ties to the even code, saturating at 6."""
    size = values.abs().clamp(max=E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # all powers of two: dividing is exact
    return torch.round(size / step) * step * values.sign()


def nvfp4_bytes(rows: int, columns: int) -> int:
    """Of one matrix as stored: half a byte a value, one a block's scale, four for the tensor."""
    return rows * (-(-columns // 2) + -(-columns // GROUP)) + 4
