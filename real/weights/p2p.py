"""Point to point: every engine rank pulls the parts it needs from several trainer ranks at once.

Each trainer rank holds all weights in host memory and serves them over TCP; engine ranks run `engine_side`'s `pull`,
which writes parts straight into their parameters. Which source serves which rank is `testbed.policies.sources`'."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from real.errors import UpdateFailed
from real.weights.commands import command
from real.weights.handle import EngineHandle, Prepared
from real.weights.partition import Config, layout
from real.weights.paths import Copied
from real.weights.snapshot import SnapshotPath
from real.weights.steps import each, host_and_port
from real.weights.wire import Address
from testbed.policies.sources import plan_sources

if TYPE_CHECKING:
    from real.trainer.trainer import Trainer


class PointToPoint(SnapshotPath):
    everywhere = True

    def __init__(self, trainer: Trainer, folder: Path, timeout_s: float) -> None:
        super().__init__(trainer, folder, timeout_s)
        self._sources: list[Address] = []
        self._config: Config = {}
        self._shapes: dict[str, list[int]] = {}
        self._planned: dict[tuple[int, int], list[int]] = {}
        """(version, engine) -> the source planned for each of its ranks."""

    async def _prepare(self, version: int, engines: Sequence[EngineHandle], full: Prepared) -> Prepared:
        self._sources = await self._ask_all("serve", *host_and_port(engines))
        self._config, self._shapes = await self._ask("config"), await self._ask("shapes", version)
        targets = [(e, rank) for e in engines for rank in range(e.tp_size)]
        needs = {
            (tp, rank): sum(prod(p.shape) for p in layout(self._config, self._shapes, tp, rank).pieces)
            for tp, rank in {(e.tp_size, rank) for e, rank in targets}
        }
        plan = plan_sources(len(self._sources), [needs[e.tp_size, rank] for e, rank in targets])
        for engine in engines:
            self._planned[version, engine.index] = [s for (e, _), s in zip(targets, plan, strict=True) if e is engine]
        return full

    async def copy(self, version: int, engines: Sequence[EngineHandle], copied: Copied) -> None:
        async def one(engine: EngineHandle) -> None:
            planned = self._planned.get((version, engine.index))
            if planned is None:
                raise UpdateFailed("copy", f"engine {engine.index} was no participant when v{version} was prepared")
            await command(
                engine,
                "pull",
                self._timeout_s,
                version=version,
                sources=self._sources,
                planned=planned,
                config=self._config,
                shapes=self._shapes,
            )

        await each(engines, one, copied, self._timeout_s)

    async def forget(self, version: int) -> None:
        self._planned = {k: v for k, v in self._planned.items() if k[0] != version}
        await super().forget(version)
