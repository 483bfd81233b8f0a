from __future__ import annotations

import pytest
import torch

from real.weights.quantize import fp8_blocks, int8_rows, requantize

pytestmark = pytest.mark.backend("CORE")


def test_fp8_scales_by_block() -> None:
    """Each 128 x 128 block against quantising it alone: scale amax / 448, values on the e4m3 grid."""
    weight = torch.randn(2, 200, 130, generator=torch.Generator().manual_seed(0))
    weight[0, 150, 129] = 1000.0  # an outlier: only its own block gets coarser
    got = fp8_blocks(weight)
    for e in range(2):
        for rows in (slice(0, 128), slice(128, 200)):
            for columns in (slice(0, 128), slice(128, 130)):
                block = weight[e, rows, columns]
                scale = block.abs().max() / 448
                want = (block / scale).to(torch.float8_e4m3fn).float() * scale
                assert torch.equal(got[e, rows, columns], want)
    assert (got - weight).abs()[0, :128, :128].max() <= weight[0, :128, :128].abs().max() / 448 * 16


def test_int8_scales_by_row() -> None:
    weight = torch.tensor([[1.27, -0.634, 0.0], [127.0, 1.4, -1.6]])
    assert torch.allclose(int8_rows(weight), torch.tensor([[1.27, -0.63, 0.0], [127.0, 1.0, -2.0]]))
    assert int8_rows(torch.zeros(2, 2)).tolist() == [[0, 0], [0, 0]]


def test_only_projections_are_touched_and_dtypes_stay() -> None:
    names = ("embed_tokens.weight", "l.qkv_proj.weight", "l.q_norm.weight", "l.mlp.gate.weight", "l.experts.w2_weight")
    parameters = {n: torch.nn.Parameter(torch.randn(3, 4, 5).bfloat16()) for n in names}
    before = {n: p.detach().clone() for n, p in parameters.items()}
    assert requantize(parameters.items(), "int8") == 2
    changed = [n for n in names if not torch.equal(parameters[n], before[n])]
    assert changed == ["l.qkv_proj.weight", "l.experts.w2_weight"]
    assert all(p.dtype == torch.bfloat16 for p in parameters.values())
    with pytest.raises(KeyError):
        requantize(parameters.items(), "fp4")
