"""Quantise and dequantise in place: what requantisation does to the engine's own copy of its weights.

Two rules. `fp8`: blocks of 128 x 128 share a scale amax / 448, values are rounded to float8 e4m3. `int8`: each output
row has a scale amax / 127, values are rounded to integers. Only projection weights are touched (not embeddings, head,
norms and router gates). Refuses to know versions and transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

BLOCK = 128
FP8_MAX = 448.0
INT8_MAX = 127.0
QUANTIZED = ("qkv_proj.weight", "o_proj.weight", "gate_up_proj.weight", "down_proj.weight", "w13_weight", "w2_weight")


def fp8_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[..., N, K], each 128 x 128 block of the last two dimensions by its own scale; same shape and dtype back."""
    rows, columns = weight.shape[-2:]
    up = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = (up.shape[-2] // BLOCK, BLOCK, up.shape[-1] // BLOCK, BLOCK)
    blocks = up.reshape(*weight.shape[:-2], *tiles)
    scale = blocks.abs().amax((-3, -1), keepdim=True).clamp(min=1e-12) / FP8_MAX
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.reshape(up.shape)[..., :rows, :columns].to(weight.dtype)


def int8_rows(weight: torch.Tensor) -> torch.Tensor:
    """[..., N, K], each row by its own scale; same shape and dtype back."""
    scale = weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / INT8_MAX
    return (torch.round(weight.float() / scale).clamp(-INT8_MAX, INT8_MAX) * scale).to(weight.dtype)


RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"fp8": fp8_blocks, "int8": int8_rows}


def requantize(parameters: Iterable[tuple[str, torch.Tensor]], rule: str) -> int:
    """Apply `rule` in place to the projection weights; returns how many parameters that were. Raises KeyError
    for a rule that is not in `RULES`."""
    apply, count = RULES[rule], 0
    for name, weight in parameters:
        if name.endswith(QUANTIZED):
            weight.data.copy_(apply(weight.data))
            count += 1
    return count
