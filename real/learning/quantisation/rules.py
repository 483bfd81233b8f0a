"""The list of rules, by the names of scenario files, and which of an engine's parameters they touch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from real.errors import RealError
from real.learning.quantisation.fp8 import fp8_blocks, fp8_bytes
from real.learning.quantisation.int4 import int4_bytes, int4_groups
from real.learning.quantisation.int8 import int8_bytes, int8_rows
from real.learning.quantisation.mxfp8 import mxfp8, mxfp8_bytes
from real.learning.quantisation.nvfp4 import nvfp4, nvfp4_bytes

QUANTIZED = (
    ".qkv_proj.weight",
    ".o_proj.weight",
    ".gate_up_proj.weight",
    ".down_proj.weight",
    ".w13_weight",
    ".w2_weight",
)
"""How the names of an engine's projection weights end; embeddings, head, norms, biases and router gates stay."""


@dataclass(frozen=True)
class Rule:
    apply: Callable[[Tensor], Tensor]
    """[..., N, K] to the values that the format holds, same shape and dtype."""
    stored_bytes: Callable[[int, int], int]
    """Of one N x K matrix in the format, scales included."""
    by_row: bool
    """A row's values depend on that row alone, so stacking matrices changes nothing."""

    def bytes_of(self, name: str, weight: Tensor) -> int:
        """Of an engine's parameter as it would be stored: in the format, or as it is if the rule leaves it alone."""
        if not name.endswith(QUANTIZED):
            return weight.numel() * weight.element_size()
        rows, columns = weight.shape[-2:]
        return math.prod(weight.shape[:-2]) * self.stored_bytes(rows, columns)


RULES: dict[str, Rule] = {
    "fp8": Rule(fp8_blocks, fp8_bytes, by_row=False),
    "mxfp8": Rule(mxfp8, mxfp8_bytes, by_row=True),
    "nvfp4": Rule(nvfp4, nvfp4_bytes, by_row=False),
    "int8": Rule(int8_rows, int8_bytes, by_row=True),
    "int4": Rule(partial(int4_groups, group=128), partial(int4_bytes, group=128), by_row=True),
    "int4_g32": Rule(partial(int4_groups, group=32), partial(int4_bytes, group=32), by_row=True),
}


def rule_named(name: str) -> Rule:
    """Raises `RealError` for a name that is not in `RULES`."""
    if name not in RULES:
        raise RealError(f"quantisation: there is no rule {name!r}; there are {', '.join(RULES)}")
    return RULES[name]
