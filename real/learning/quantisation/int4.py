"""INT4 by groups (Miles' INT4 QAT): 32 or 128 values of a row share a float32 scale amax / 7, values are -7 .. 7."""

from __future__ import annotations

from torch import Tensor

from real.learning.quantisation.groups import from_groups, in_groups, integers

INT4_MAX = 7.0


def int4_groups(weight: Tensor, group: int) -> Tensor:
    """[..., N, K], each 1 x `group` block by its own scale; same shape and dtype back."""
    return from_groups(integers(in_groups(weight, group), INT4_MAX), weight)


def int4_bytes(rows: int, columns: int, group: int) -> int:
    """Of one matrix as stored: half a byte a value, four a scale."""
    return rows * (-(-columns // 2) + 4 * -(-columns // group))
