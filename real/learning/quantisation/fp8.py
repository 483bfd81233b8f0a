"""FP8 by blocks (DeepSeek-V3, arXiv 2412.19437 section 3.3; Miles' FP8): 128 x 128 values share a float32 scale
amax / 448, values are E4M3."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from real.learning.quantisation.groups import E4M3_MAX, SMALLEST_AMAX, over, to_e4m3

BLOCK = 128


def fp8_blocks(weight: Tensor) -> Tensor:
    """[..., N, K], each 128 x 128 block of the last two dimensions by its own scale; same shape and dtype back."""
    rows, columns = weight.shape[-2:]
    up = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = up.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale = over(blocks.abs().amax((-3, -1), keepdim=True).clamp(min=SMALLEST_AMAX), E4M3_MAX)
    return (to_e4m3(blocks / scale) * scale).reshape(up.shape)[..., :rows, :columns].to(weight.dtype)


def fp8_bytes(rows: int, columns: int) -> int:
    """Of one matrix as stored: a byte a value, four a scale."""
    return rows * columns + 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
