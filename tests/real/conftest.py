"""Fixtures of the tests of the real backend: a tiny model, one running engine, a client. The folder is skipped where
the packages of the `real` extra are missing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

MISSING = [name for name in ("torch", "transformers", "sglang", "ray", "aiohttp") if not importlib.util.find_spec(name)]
collect_ignore_glob = ["*"] if MISSING else []

# Two cores shared by engines, trainers and tests: more threads only wait for one another.
for _name, _value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}.items():
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers and 128 tokens with random weights (std 0.2), fp32; the end-of-text token is 1."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("tiny_model")
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running `EngineServer` on `tiny_model`, fp32, shared by the session: leave weights and version as they were."""
    from real.engines.options import ServerOptions
    from real.engines.server import EngineServer

    options = ServerOptions(str(tiny_model), max_total_tokens=8192, max_running_requests=16, context_length=2048)
    server = EngineServer.start(options, tmp_path_factory.mktemp("engine") / "engine.log")
    server.wait_ready(300)
    yield server
    server.stop()


@pytest.fixture
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one event loop a test."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def client(engine: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Iterator[Any]:
    """An `EngineClient` of `engine`, on the loop of `run`."""
    from real.engines.client import EngineClient

    client = EngineClient(engine.url, timeout_s=120)
    yield client
    run(client.close())
