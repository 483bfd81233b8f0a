"""The engine's layout against what a real engine loads by itself, and on tensors small enough to write down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from real.errors import RealError
from real.weights.checkpoint import load_checkpoint
from real.weights.partition import checkpoint_tensors, engine_tensors, layout, read_config
from real.weights.raw import checksum
from tests.real.weights.conftest import Run

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1, "hidden_size": 2, "num_experts": 2}


def built(config: dict[str, Any], tensors: dict[str, torch.Tensor], tp_size: int, rank: int) -> dict[str, torch.Tensor]:
    shapes = {name: list(t.shape) for name, t in tensors.items()}
    return engine_tensors(layout(config, shapes, tp_size, rank), tensors)


@pytest.mark.parametrize("which", ("handle", "wide"))
def test_ws_02_an_engine_that_loaded_the_checkpoint_itself_has_these_tensors(
    which: str, tiny_model: Path, request: pytest.FixtureRequest, run: Run
) -> None:
    from real.weights.commands import command

    handle = request.getfixturevalue(which)
    tensors = load_checkpoint(tiny_model, torch.float32)
    answers = run(command(handle, "checksum", 60))
    assert len(answers) == handle.tp_size
    for rank, answer in enumerate(answers):
        mine = built(read_config(tiny_model), tensors, handle.tp_size, rank)
        assert {name: checksum(t) for name, t in mine.items()} == answer["checksums"]


@pytest.mark.backend("CORE")
def test_ws_02_heads_are_fused_and_split() -> None:
    stem = "model.layers.0.self_attn"
    tensors = {
        f"{stem}.{k}_proj.weight": torch.full((n, 2), v) for k, n, v in (("q", 4, 1.0), ("k", 2, 5.0), ("v", 2, 7.0))
    }
    for name, tensor in tensors.items():
        tensor += torch.arange(len(tensor))[:, None] / 10
        assert name.endswith("weight")
    [fused] = built(CONFIG, tensors, 2, 1).values()
    assert torch.allclose(fused[:, 0], torch.tensor([1.2, 1.3, 5.1, 7.1]))


@pytest.mark.backend("CORE")
def test_ws_02_fewer_kv_heads_than_ranks_are_held_by_several() -> None:
    name = "model.layers.0.self_attn.{}_proj.bias"
    tensors = {name.format("q"): torch.arange(4.0), name.format("k"): torch.arange(2.0) + 10}
    tensors[name.format("v")] = torch.arange(2.0) + 20
    held = [built(CONFIG, tensors, 4, rank)["model.layers.0.self_attn.qkv_proj.bias"].tolist() for rank in range(4)]
    assert held == [[0, 10, 20], [1, 10, 20], [2, 11, 21], [3, 11, 21]]


@pytest.mark.backend("CORE")
def test_ws_02_columns_rows_and_vocabulary() -> None:
    tensors = {
        "model.layers.0.mlp.gate_proj.weight": torch.arange(4.0)[:, None].repeat(1, 2),
        "model.layers.0.mlp.up_proj.weight": torch.arange(4.0)[:, None].repeat(1, 2) + 10,
        "model.layers.0.mlp.down_proj.weight": torch.arange(4.0).repeat(2, 1),
        "model.embed_tokens.weight": torch.arange(1.0, 101.0)[:, None],
        "model.norm.weight": torch.ones(2),
    }
    second = built(CONFIG, tensors, 2, 1)
    assert second["model.layers.0.mlp.gate_up_proj.weight"][:, 0].tolist() == [2, 3, 12, 13]
    assert second["model.layers.0.mlp.down_proj.weight"].tolist() == [[2, 3], [2, 3]]
    # 100 tokens are padded to 128, 64 to a rank: the last 28 rows of the second rank are zero
    assert second["model.embed_tokens.weight"][:, 0].tolist() == [*range(65, 101), *[0] * 28]
    assert second["model.norm.weight"].tolist() == [1, 1]
    third = built({**CONFIG, "num_attention_heads": 3, "num_key_value_heads": 3}, tensors | {}, 1, 0)
    assert third["model.embed_tokens.weight"].shape == (128, 1)


@pytest.mark.backend("CORE")
def test_ws_02_experts_are_stacked_from_either_form() -> None:
    stacked = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.arange(16.0).reshape(2, 4, 2),  # [E, 2I, H]
        "model.layers.0.mlp.experts.down_proj": torch.arange(8.0).reshape(2, 2, 2),  # [E, H, I]
        "model.layers.0.mlp.gate.weight": torch.eye(2),
    }
    tensors = checkpoint_tensors(stacked, CONFIG)
    assert tensors["model.layers.0.mlp.experts.1.up_proj.weight"].tolist() == [[12, 13], [14, 15]]
    whole = built(CONFIG, tensors, 1, 0)
    assert torch.equal(
        whole["model.layers.0.mlp.experts.w13_weight"], stacked["model.layers.0.mlp.experts.gate_up_proj"]
    )
    assert torch.equal(whole["model.layers.0.mlp.experts.w2_weight"], stacked["model.layers.0.mlp.experts.down_proj"])
    second = built(CONFIG, tensors, 2, 1)
    assert second["model.layers.0.mlp.experts.w13_weight"].tolist() == [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]
    assert second["model.layers.0.mlp.experts.w2_weight"].tolist() == [[[1], [3]], [[5], [7]]]
    assert torch.equal(second["model.layers.0.mlp.gate.weight"], torch.eye(2))


@pytest.mark.backend("CORE")
def test_ws_02_a_tied_head_is_sent_once() -> None:
    state = {"model.embed_tokens.weight": torch.ones(2, 1), "lm_head.weight": torch.ones(2, 1)}
    assert list(checkpoint_tensors(state, {"tie_word_embeddings": True})) == ["model.embed_tokens.weight"]
    assert len(checkpoint_tensors(state, {"tie_word_embeddings": False})) == 2


def test_what_has_no_rule_or_does_not_divide_is_named(tmp_path: Path) -> None:
    with pytest.raises(RealError, match=r"no rule lays out checkpoint tensor model.layers.0.conv.weight \[2\]"):
        layout(CONFIG, {"model.layers.0.conv.weight": [2]}, 1, 0)
    with pytest.raises(RealError, match="4 attention heads cannot be split over tp_size 3"):
        layout(CONFIG, {}, 3, 0)
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(RealError, match=r"MambaForCausalLM .* known: LlamaForCausalLM"):
        read_config(tmp_path)
    with pytest.raises(RealError, match="is no model folder"):
        read_config(tmp_path / "nowhere")
