"""The catalogue against published parameter counts, checkpoints' tensor counts and memory arithmetic done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.scenario.catalogue import (
    CatalogueError,
    ModelSpec,
    engine_memory,
    gpu_names,
    gpu_spec,
    kv_pool_tokens,
    model_names,
    model_preset,
    model_spec,
    trainer_state_bytes_per_gpu,
)
from testbed.scenario.model import ConfigJsonModel, InlineModel, PresetModel
from testbed.scenario.training import Training
from tests.support.scenarios import scenario


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.1-70B", 70_553_706_496),
    ],
)
def test_parameter_counts_equal_those_of_the_published_checkpoints(name: str, params: int) -> None:
    assert model_preset(name).params == params


@pytest.mark.parametrize(
    ("name", "total_b", "active_b"),
    [
        ("Qwen3-0.6B", 0.6, 0.6),
        ("Qwen3-32B", 32.8, 32.8),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen3-235B-A22B", 235, 22),
        ("Llama-3.1-405B", 405, 405),
        ("DeepSeek-V3", 671, 37),
        ("Kimi-K2", 1000, 32),
        ("GLM-4.5-Air", 106, 12),
        ("GLM-4.5", 355, 32),
    ],
)
def test_parameter_counts_agree_with_model_cards(name: str, total_b: float, active_b: float) -> None:
    m = model_preset(name)
    assert m.params / 1e9 == pytest.approx(total_b, rel=0.03)
    # Cards count active parameters with or without embedding and LM head: the card's number lies between, to 3 %.
    without = m.matmul_params - m.lm_head_params
    assert without / 1e9 * 0.97 <= active_b <= m.active_params / 1e9 * 1.03


@pytest.mark.parametrize(("name", "tensors"), [("Llama-3.1-8B", 291), ("Qwen3-8B", 399), ("Qwen3-30B-A3B", 18_867)])
def test_number_of_tensors_of_a_checkpoint(name: str, tensors: int) -> None:
    assert model_preset(name).num_tensors == tensors


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("Llama-3.1-8B", 131_072), ("Qwen3-30B-A3B", 2 * 48 * 4 * 128 * 2), ("DeepSeek-V3", 61 * (512 + 64) * 2)],
)
def test_kv_bytes_per_token(name: str, bytes_per_token: int) -> None:
    m = model_preset(name)
    assert m.kv_bytes_per_token() == bytes_per_token
    assert m.kv_bytes_per_token("fp8") == bytes_per_token / 2


def test_kv_heads_are_copied_when_there_are_more_ranks_than_heads() -> None:
    m = model_preset("Qwen3-30B-A3B")  # 4 KV heads
    assert m.kv_bytes_per_token("bf16", 4) == m.kv_bytes_per_token("bf16", 1)
    assert m.kv_bytes_per_token("bf16", 8) == 2 * m.kv_bytes_per_token("bf16", 4)


def test_mla_keeps_its_cache_on_every_rank() -> None:
    m = model_preset("DeepSeek-V3")
    assert m.kv_bytes_per_token("bf16", 8) == 8 * m.kv_bytes_per_token("bf16", 1)


def test_narrow_weights_keep_embedding_and_head_in_two_bytes() -> None:
    m = model_preset("Qwen3-8B")
    wide = 2 * 151_936 * 4096
    assert m.weight_bytes("bf16") == 2 * m.params
    assert m.weight_bytes("fp8") == (m.params - wide) + 2 * wide


def test_engine_memory_by_hand() -> None:
    memory = engine_memory(model_preset("Llama-3.1-8B"), gpu_spec("H100"), 1, 0.85)
    free = 0.85 * 80e9 - 2 * 8_030_261_248
    assert memory.kv_tokens == int(free // 131_072)


def test_kv_pool_has_whole_pages_and_an_upper_limit() -> None:
    m, gpu = model_preset("Qwen3-8B"), gpu_spec("H100")
    limited = scenario(rollout__engine={"max_total_num_tokens": 1000, "page_size": 64})
    assert kv_pool_tokens(limited, m, gpu) == 960
    free = scenario(rollout__engine={"page_size": 64})
    assert kv_pool_tokens(free, m, gpu) % 64 == 0
    above = scenario(rollout__engine={"max_total_num_tokens": 10**9})
    assert kv_pool_tokens(above, m, gpu) == engine_memory(m, gpu, 1, 0.85).kv_tokens


def test_weights_that_do_not_fit_are_refused_with_a_size_that_does() -> None:
    s = scenario(model={"type": "preset", "name": "Llama-3.1-70B"})
    with pytest.raises(CatalogueError, match="rollout_num_gpus_per_engine: 4"):
        kv_pool_tokens(s, model_preset("Llama-3.1-70B"), gpu_spec("H100"))


def test_trainer_state_of_8b_on_8_gpus_is_16_gb() -> None:
    """The worked example of the offload formula: 16 B x 8e9 / 8 GPUs = 16 GB."""
    m = ModelSpec("8e9", 1, 1, 1, 1, 1, (8_000_000_000 - 8) // 3, 1, True)
    assert trainer_state_bytes_per_gpu(m, Training(), 8) == pytest.approx(16e9, rel=1e-6)


def test_trainer_state_by_sharding() -> None:
    m = model_preset("Llama-3.1-8B")
    n = m.params

    def state(sharding: str) -> float:
        training = Training.model_validate({"sharding": sharding, "tensor_parallel": 2})
        return trainer_state_bytes_per_gpu(m, training, 8)

    assert state("zero1") == pytest.approx((2 + 4) * n / 2 + 12 * n / 8)
    assert state("zero2") == pytest.approx(2 * n / 2 + (4 + 12) * n / 8)
    assert state("zero3") == pytest.approx((2 + 2 + 12) * n / 8)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3-8b", "Qwen3-8B"])
def test_presets_are_found_with_prefix_and_in_any_case(name: str) -> None:
    assert model_spec(PresetModel(name=name)).name == "Qwen3-8B"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(CatalogueError) as e:
        model_spec(PresetModel(name="Qwen3-9B"))
    assert e.value.nearest in model_names()
    with pytest.raises(CatalogueError) as g:
        gpu_spec("H800")
    assert g.value.nearest in gpu_names()


def test_inline_and_config_json_give_the_same_model_as_the_preset(tmp_path: Path) -> None:
    numbers = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps({**numbers, "model_type": "llama", "tie_word_embeddings": False}))
    inline = model_spec(InlineModel.model_validate({**numbers, "name": "Llama-3.1-8B"}))
    from_file = model_spec(ConfigJsonModel(path="config.json", name="Llama-3.1-8B"), tmp_path)
    assert inline == from_file == model_preset("Llama-3.1-8B")


def test_config_json_implies_what_a_model_type_implies(tmp_path: Path) -> None:
    """Qwen2's files do not say that queries, keys and values have a bias."""
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_spec(ConfigJsonModel(path="config.json"), tmp_path).params == 7_615_616_512


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_configs_that_cannot_be_read_are_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CatalogueError):
        model_spec(ConfigJsonModel(path="config.json"), tmp_path)


def test_inline_experts_need_all_their_numbers() -> None:
    numbers = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 256,
        "num_experts": 4,
    }
    with pytest.raises(CatalogueError, match="num_experts_per_tok"):
        model_spec(InlineModel.model_validate(numbers))
