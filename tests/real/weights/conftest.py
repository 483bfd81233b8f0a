"""Two running engines for weight updates: the session's one and one of two tensor-parallel ranks. Each test starts
with both on version 0."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="package")
def wide_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running `EngineServer` of two ranks on `tiny_model`."""
    from real.engines.options import ServerOptions
    from real.engines.server import EngineServer

    options = ServerOptions(str(tiny_model), tp_size=2, max_total_tokens=2048, max_running_requests=4)
    server = EngineServer.start(options, tmp_path_factory.mktemp("wide_engine") / "engine.log")
    server.wait_ready(300)
    yield server
    server.stop()


async def _back_to_start(handle: Any, tiny_model: Path) -> None:
    await handle.client.resume()
    await handle.client.update_from_disk(tiny_model, weight_version="0", flush_cache=True)


@pytest.fixture
def handle(engine: Any, tiny_model: Path, run: Run) -> Iterator[Any]:
    """The engine of one rank."""
    from real.engines.client import EngineClient
    from real.weights.handle import EngineHandle

    handle = EngineHandle(0, EngineClient(engine.url, timeout_s=60))
    yield handle
    run(_back_to_start(handle, tiny_model))
    run(handle.client.close())


@pytest.fixture
def wide(wide_engine: Any, tiny_model: Path, run: Run) -> Iterator[Any]:
    """The engine of two ranks."""
    from real.engines.client import EngineClient
    from real.weights.handle import EngineHandle

    handle = EngineHandle(1, EngineClient(wide_engine.url, timeout_s=60), tp_size=2, node=1)
    yield handle
    run(_back_to_start(handle, tiny_model))
    run(handle.client.close())


@pytest.fixture
def trainer(tiny_model: Path) -> Iterator[Any]:
    from tests.real.weights.fakes import FakeTrainer

    trainer = FakeTrainer(tiny_model)
    yield trainer
    trainer.close()


@pytest.fixture
def rid() -> Callable[[], str]:
    return lambda: uuid.uuid4().hex
