"""Tiny models and records for trainer tests. Nothing here needs an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from real.records import Record

pytest.importorskip("torch", reason="the extra `real` is not installed")
pytest.importorskip("transformers", reason="the extra `real` is not installed")

VOCABULARY = 128

MakeRecord = Callable[..., Record]


def make_record(trajectory: int, ids: Sequence[int], prompt: int, mask: Sequence[bool], **fields: object) -> Record:
    """One record; spans follow from the mask, generation log-probs default to those of a uniform policy."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, dtype=np.int8), [0]])))
    uniform = np.where(mask, -np.log(VOCABULARY), 0.0).astype(np.float32)
    values: dict[str, object] = {
        "group": trajectory // 2,
        "task": 0,
        "generation_log_probs": uniform,
        "reward": float(trajectory % 2),
        "finish_reason": "stop",
        "spans": tuple((0, int(a), int(b)) for a, b in edges.reshape(-1, 2)),
    }
    return Record(
        trajectory=trajectory,
        prompt_tokens=prompt,
        token_ids=np.asarray(ids, dtype=np.int32),
        loss_mask=np.asarray(mask, dtype=np.bool_),
        **(values | fields),  # type: ignore[arg-type]
    ).check()


def random_records(n: int, seed: int = 0, longest: int = 24) -> list[Record]:
    """n records in groups of two, of uneven lengths, some with an observation in the middle."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(n):
        prompt, response = int(rng.integers(1, 8)), int(rng.integers(4, longest))
        mask = np.ones(response, dtype=bool)
        if i % 3 == 0:
            mask[1:3] = False
        records.append(make_record(i, rng.integers(0, VOCABULARY, prompt + response).tolist(), prompt, mask.tolist()))
    return records


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3, two layers, tied embeddings."""
    from transformers import Qwen3Config

    return _written(
        tmp_path_factory.mktemp("dense"),
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.2,
        ),
    )


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, two layers of four experts, two of them active."""
    from transformers import Qwen3MoeConfig

    return _written(
        tmp_path_factory.mktemp("moe"),
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            max_position_embeddings=256,
            initializer_range=0.2,
        ),
    )


def _written(folder: Path, config: object) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
