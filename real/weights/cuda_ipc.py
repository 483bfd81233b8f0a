"""Same host: the trainer hands its tensors to the engine.

Buckets of tensors, flattened (SGLang's `flattened_bucket`), through `update_weights_from_tensor`. On GPUs a bucket is a
CUDA IPC handle, read in place, which must come from a trainer rank on the engine rank's own GPU: engine rank i (over
all engines, in order of their index) takes it from trainer rank i mod world. On a CPU its bytes are in the message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from real.weights.handle import EngineHandle
from real.weights.paths import Copied
from real.weights.snapshot import SnapshotPath
from real.weights.steps import each, session

if TYPE_CHECKING:
    from real.trainer.trainer import Trainer


class CudaIpc(SnapshotPath):
    everywhere = True

    def __init__(self, trainer: Trainer, folder: Path, timeout_s: float, bucket_bytes: int) -> None:
        super().__init__(trainer, folder, timeout_s)
        self._bucket_bytes = bucket_bytes

    async def copy(self, version: int, engines: Sequence[EngineHandle], copied: Copied) -> None:
        async def one(engine: EngineHandle) -> None:
            first = engine.index * engine.tp_size
            sources = [(first + rank) % self._trainer.world for rank in range(engine.tp_size)]
            async with session(engine):
                for bucket in await self._ask("buckets", version, self._bucket_bytes):
                    await self._hand_over(engine, version, bucket.names, sources)

        await each(engines, one, copied, self._timeout_s)

    async def _hand_over(self, engine: EngineHandle, version: int, names: list[str], sources: list[int]) -> None:
        """One bucket; its buffers are kept until the engine has answered."""
        tickets: dict[int, int] = {}
        handles: dict[int, list[str]] = {}
        try:
            for source in sorted(set(sources)):
                copies = sources.count(source)
                shared = await self._trainer.call(source, "publish", "share", version, names, copies)
                tickets[source], handles[source] = shared
            serialized = [handles[source].pop(0) for source in sources]
            await engine.client.update_from_tensor(
                serialized, load_format="flattened_bucket", weight_version=None, flush_cache=False
            )
        finally:
            release = [self._trainer.call(source, "publish", "unshare", t) for source, t in tickets.items()]
            await asyncio.gather(*release, return_exceptions=True)
