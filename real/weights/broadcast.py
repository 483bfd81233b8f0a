"""One group over trainer rank 0 and all participants: each tensor is broadcast once to all.

SGLang's distributed update (gloo on a CPU, NCCL on GPUs). The group is made for a set of participants, used again for
the same set, ended when the set changes or a broadcast fails. A broadcast that nobody receives would hang the trainer
and one that is not sent would hang the engines: sending and receiving start together, the first error ends the group,
and with it whatever still waits. The store where the members meet is the driver's: closing it frees those who wait
there for one that has died."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from real.weights.handle import EngineHandle
from real.weights.paths import Copied
from real.weights.snapshot import SnapshotPath
from real.weights.steps import CLOSE_S, host_and_port, session, stage
from real.weights.wire import address_towards

if TYPE_CHECKING:
    from real.trainer.trainer import Trainer


class Broadcast(SnapshotPath):
    def __init__(self, trainer: Trainer, folder: Path, timeout_s: float, bucket_bytes: int, backend: str) -> None:
        super().__init__(trainer, folder, timeout_s)
        self._bucket_bytes = bucket_bytes
        self._backend = backend
        self._members: list[EngineHandle] = []
        self._name = ""
        self._meeting: _Meeting | None = None

    async def copy(self, version: int, engines: Sequence[EngineHandle], copied: Copied) -> None:
        who = "engines " + ", ".join(str(e.index) for e in engines)
        async with stage("copy", who, self._timeout_s), contextlib.AsyncExitStack() as sessions:
            for engine in engines:
                await sessions.enter_async_context(session(engine))
            try:
                if [e.client for e in engines] != [e.client for e in self._members]:
                    await self._regroup(list(engines))
                for bucket in await self._ask("buckets", version, self._bucket_bytes):
                    await _together(
                        self._send(version, bucket.names),
                        *(
                            engine.client.update_from_distributed(
                                names=bucket.names,
                                dtypes=bucket.dtypes,
                                shapes=bucket.shapes,
                                group_name=self._name,
                                weight_version=None,
                                flush_cache=False,
                            )
                            for engine in engines
                        ),
                    )
                    await self._ask("finish_broadcast", self._timeout_s)
            except BaseException:
                await self._end_group(broken=True)
                raise
        for engine in engines:
            copied(engine)

    async def close(self) -> None:
        await self._end_group(broken=False)

    async def _send(self, version: int, names: list[str]) -> None:
        await self._ask("start_broadcast", version, names)

    async def _regroup(self, engines: list[EngineHandle]) -> None:
        await self._end_group(broken=False)
        self._name = f"weights-{uuid.uuid4().hex}"  # torch refuses a name that it has seen before
        self._members = engines
        meeting = self._meeting = _Meeting(address_towards(*host_and_port(engines)), self._timeout_s)
        host, port = meeting.address
        offsets = [1 + sum(e.tp_size for e in engines[:i]) for i in range(len(engines))]
        world = 1 + sum(e.tp_size for e in engines)
        await _together(
            self._ask("join", self._name, (host, port), world, self._timeout_s),
            *(
                engine.client.init_weights_group(
                    master_address=host,
                    master_port=port,
                    rank_offset=offset,
                    world_size=world,
                    group_name=self._name,
                    backend=self._backend,
                )
                for engine, offset in zip(engines, offsets, strict=True)
            ),
        )

    async def _end_group(self, broken: bool) -> None:
        """On all sides at once: each that leaves closes connections, and that frees those who wait for it. gloo knows
        no other way to give up a broadcast before the group's timeout."""
        members, self._members = self._members, []
        self._meeting = None  # closes it
        if not members:
            return
        leaving = (self._ask("leave", broken), *(e.client.destroy_weights_group(self._name) for e in members))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*leaving, return_exceptions=True)


class _Meeting:
    """A key-value store in this process; open as long as this object lives."""

    def __init__(self, host: str, timeout_s: float) -> None:
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.address = (host, self._store.port)


async def _together(*steps: object) -> None:
    """Run all at once; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(step) for step in steps]  # type: ignore[call-overload]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
