"""INT8 by rows: each output row has a float32 scale amax / 127, values are integers -127 .. 127."""

from __future__ import annotations

from torch import Tensor

from real.learning.quantisation.groups import integers

INT8_MAX = 127.0


def int8_rows(weight: Tensor) -> Tensor:
    """[..., N, K], each row by its own scale; same shape and dtype back."""
    return integers(weight.float(), INT8_MAX).to(weight.dtype)


def int8_bytes(rows: int, columns: int) -> int:
    """Of one matrix as stored: a byte a value, four a scale."""
    return rows * (columns + 4)
