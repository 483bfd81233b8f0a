"""Requantisation of an engine's own copy of its weights: quantised and dequantised in place, by a rule that the
training forward shares (`real.learning.quantisation`). Refuses to know formats, versions and transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from real.learning.quantisation.fp8 import fp8_blocks
from real.learning.quantisation.int8 import int8_rows
from real.learning.quantisation.rules import QUANTIZED
from real.learning.quantisation.rules import RULES as SHARED

__all__ = ["QUANTIZED", "RULES", "fp8_blocks", "int8_rows", "requantize", "stored_bytes"]

RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {name: rule.apply for name, rule in SHARED.items()}


def requantize(parameters: Iterable[tuple[str, torch.Tensor]], rule: str) -> int:
    """Apply `rule` in place to the projection weights; returns how many parameters that were. Raises KeyError
    for a rule that is not in `RULES`."""
    apply, count = RULES[rule], 0
    for name, weight in parameters:
        if name.endswith(QUANTIZED):
            weight.data.copy_(apply(weight.data))
            count += 1
    return count


def stored_bytes(parameters: Iterable[tuple[str, torch.Tensor]], rule: str) -> int:
    """Of the parameters as `rule`'s format would store them. What is in memory here is larger: plain values that have
    been rounded to it."""
    return sum(SHARED[rule].bytes_of(name, weight) for name, weight in parameters)
