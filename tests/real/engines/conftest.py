"""The engine of these tests serves a mixture-of-experts model: all that a dense one does, and routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXPERTS_PER_TOKEN = 2


@pytest.fixture(scope="package")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of two layers, 8 experts, top 2, 128 tokens; random weights (std 0.2), fp32."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("moe_model")
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def engine(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from real.engines.options import ServerOptions
    from real.engines.server import EngineServer

    options = ServerOptions(
        str(moe_model),
        max_total_tokens=8192,
        max_running_requests=16,
        context_length=2048,
        chunked_prefill_size=2048,
        max_prefill_tokens=4096,
        page_size=1,
        schedule_policy="lpm",
        schedule_conservativeness=0.9,
        mem_fraction_static=0.5,
        disable_overlap_schedule=True,
        enable_return_routed_experts=True,
    )
    server = EngineServer.start(options, tmp_path_factory.mktemp("engine") / "engine.log")
    server.wait_ready(300)
    yield server
    server.stop()


@pytest.fixture(scope="package")
def forward(moe_model: Path) -> Any:
    """Independent reference: transformers' eager forward. `forward(ids, temperature)` gives log p of the next token
    [T, vocabulary] and the set of experts of each position and layer [T, layers, top_k] (sorted)."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(moe_model, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def run(ids: list[int], temperature: float = 1.0) -> tuple[Any, Any]:
        out = model(torch.tensor([ids]), output_router_logits=True)
        log_probs = torch.log_softmax(out.logits[0] / temperature, dim=-1).numpy()
        experts = torch.stack([layer.topk(EXPERTS_PER_TOKEN, dim=-1).indices for layer in out.router_logits], dim=1)
        return log_probs, experts.sort(dim=-1).values.numpy()

    return run
