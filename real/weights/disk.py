"""Through storage: whole checkpoints, and deltas that are put onto a copy on the engine's node.

Both leave the trainer free after preparation. A delta is built, fetched and put onto the node's copy while engines
still generate; only loading the result needs the pause. What the node's copy is good for decides what is sent: a delta
if it holds the version the delta starts from, else (new node, poisoned copy, forgotten base) a full checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.weights.agree import load_from_disk
from real.weights.checkpoint import check_whole
from real.weights.delta import Encoding
from real.weights.handle import EngineHandle, Host, Prepared
from real.weights.node_copy import NodeCopy, version_folder
from real.weights.paths import Copied
from real.weights.snapshot import SnapshotPath
from real.weights.steps import each

if TYPE_CHECKING:
    from real.trainer.trainer import Trainer


class Disk(SnapshotPath):
    releases_trainer_after_prepare = True

    async def _prepare(self, version: int, engines: Sequence[EngineHandle], full: Prepared) -> Prepared:
        await self._ask("write", version, str(self._folder))
        return full

    async def copy(self, version: int, engines: Sequence[EngineHandle], copied: Copied) -> None:
        folder = version_folder(self._folder, version)

        async def one(engine: EngineHandle) -> None:
            await asyncio.to_thread(check_whole, folder)
            await load_from_disk(engine, str(folder))

        await each(engines, one, copied, self._timeout_s)


class LocalHost:
    """A `NodeCopy` in the driver's process, for nodes that share its file system."""

    def __init__(self, folder: Path) -> None:
        self._copy = NodeCopy(folder)

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self._copy, method), *args)


class DiskDelta(SnapshotPath):
    releases_trainer_after_prepare = True

    def __init__(self, trainer: Trainer, folder: Path, timeout_s: float, encoding: Encoding) -> None:
        super().__init__(trainer, folder, timeout_s)
        self._encoding = encoding
        self._hosts: dict[int, Host] = {}

    async def _prepare(self, version: int, engines: Sequence[EngineHandle], full: Prepared) -> Prepared:
        hosts = {engine.node: self._host(engine) for engine in engines}
        bases = {v for v in await self._ask("held") if v < version} or {0}
        if bases == {0}:
            start = await self._ask("start_checkpoint")
            empty = [host for host in hosts.values() if await host.call("empty")]
            await asyncio.gather(*(host.call("seed", *start) for host in empty))
        have = {node: await host.call("current") for node, host in hosts.items()}
        sent, changed = 0, full.words
        base = max(bases & set(have.values()) - {version}, default=None)  # the newest that both sides hold
        current = {node for node, held in have.items() if base is not None and held == base}
        if current:
            delta, report = await self._ask("write_delta", version, base, str(self._folder), self._encoding)
            sent, changed = report.bytes, report.changed_words
        if len(current) < len(hosts):
            whole = await self._ask("write", version, str(self._folder))
            sent += full.full_bytes
        results = await asyncio.gather(
            *(
                host.call("apply", delta) if node in current else host.call("install", whole, version)
                for node, host in hosts.items()
            ),
            return_exceptions=True,
        )
        for failure in results:
            if isinstance(failure, BaseException):  # nobody moves on alone: all start from the same base next time
                await asyncio.gather(*(host.call("forget", version) for host in hosts.values()))
                raise failure
        return replace(full, bytes=sent, changed_words=changed)

    async def copy(self, version: int, engines: Sequence[EngineHandle], copied: Copied) -> None:
        async def one(engine: EngineHandle) -> None:
            path = await self._host(engine).call("path", version)
            if path is None:
                raise FileNotFoundError(f"node {engine.node} has no v{version}")
            await load_from_disk(engine, path)

        await each(engines, one, copied, self._timeout_s)

    async def forget(self, version: int) -> None:
        await super().forget(version)
        await asyncio.gather(*(host.call("forget", version) for host in self._hosts.values()))

    def _host(self, engine: EngineHandle) -> Host:
        """The first engine of a node says who keeps the node's copy."""
        if engine.node not in self._hosts:
            self._hosts[engine.node] = engine.host or LocalHost(self._folder / f"node-{engine.node}")
        return self._hosts[engine.node]
