"""MXFP8 (OCP Microscaling Formats 1.0): 32 values of a row share a power of two (E8M0), values are E4M3.

The scale is the smallest power of two that keeps the largest value at or below 448, as DeepGEMM chooses it;
OCP's conversion, 2^(floor(log2 amax) - 8), saturates values between 448 and 512 times the scale."""

from __future__ import annotations

import torch
from torch import Tensor

from real.learning.quantisation.groups import amax, from_groups, in_groups, to_e4m3

GROUP = 32
BIAS = 127
"""Of E8M0: code c is 2^(c - 127), c = 0 .. 254."""


def mxfp8(weight: Tensor) -> Tensor:
    """[..., N, K], each 1 x 32 block by its own scale; same shape and dtype back."""
    groups = in_groups(weight, GROUP)
    scale = _power_of_two(amax(groups))
    return from_groups(to_e4m3(groups / scale) * scale, weight)


def _power_of_two(largest: Tensor) -> Tensor:
    """2^ceil(log2(largest / 448)) without a logarithm, which devices round differently: 448 is 0.875 x 2^9."""
    mantissa, exponent = torch.frexp(largest)
    code = (exponent - 9 + (mantissa > 0.875).int() + BIAS).clamp(0, 254)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu).float()


def mxfp8_bytes(rows: int, columns: int) -> int:
    """Of one matrix as stored: a byte a value, one a scale."""
    return rows * (columns + -(-columns // GROUP))
