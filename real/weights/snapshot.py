"""What the paths have in common: they begin with the trainer's snapshot and end by forgetting it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.weights.handle import EngineHandle, Prepared
from real.weights.steps import stage

if TYPE_CHECKING:
    from real.trainer.trainer import Trainer


class SnapshotPath:
    """`folder`: on storage that trainer and engines share. `timeout_s`: of each step."""

    releases_trainer_after_prepare = False
    everywhere = False
    """Whether every trainer rank keeps the snapshot, or rank 0 only."""

    def __init__(self, trainer: Trainer, folder: Path, timeout_s: float) -> None:
        self._trainer = trainer
        self._folder = Path(folder)
        self._timeout_s = timeout_s

    async def prepare(self, version: int, engines: Sequence[EngineHandle]) -> Prepared:
        """Take the snapshot (weights only, no optimizer state), convert it for the engines' layouts and checksum that,
        then whatever else the path prepares."""
        started = time.monotonic()
        async with stage("prepare", f"v{version}", self._timeout_s):
            taken = (await self._trainer.call_all("publish", "snapshot", version, self.everywhere))[0]
            expected = {tp: await self._ask("expected", version, tp) for tp in {e.tp_size for e in engines}}
            full = Prepared(taken.bytes, 0.0, taken.bytes, taken.words, taken.words, expected)
            prepared = await self._prepare(version, engines, full)
        return replace(prepared, seconds=time.monotonic() - started)

    async def _prepare(self, version: int, engines: Sequence[EngineHandle], full: Prepared) -> Prepared:
        """The rest of a path's preparation; `full` describes the snapshot."""
        return full

    async def _ask(self, method: str, *args: Any) -> Any:
        """Trainer rank 0's publisher."""
        return await self._trainer.call(0, "publish", method, *args)

    async def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """Every rank's publisher. Not a collective: ranks need not answer together."""
        ranks = range(self._trainer.world)
        return list(await asyncio.gather(*(self._trainer.call(r, "publish", method, *args) for r in ranks)))

    async def forget(self, version: int) -> None:
        """As `WeightPath.forget`; a rank that is training answers after its update."""
        await self._ask_all("forget", version, str(self._folder))

    async def close(self) -> None:
        """Nothing to give up."""
