"""The trainer as its driver sees it: one asynchronous object over ranks that live elsewhere.

Responsible for which records go into which update and to which rank, for advantages (a group is whole only here), and
for saying plainly that a rank failed. It refuses to know where ranks live (Ray actors, processes, this one) and it
decides nothing about batches: the core does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from real.errors import RealError, UpdateFailed
from real.learning.advantages import group_advantages
from real.learning.options import AdvantageStd, LossOptions
from real.records import Record, RecordError
from real.trainer.assignment import ranks_of, updates_of
from real.trainer.stats import Moved, StepStats

__all__ = ["RankHandle", "StepStats", "Trainer", "TrainerError", "with_advantages"]


class TrainerError(RealError):
    """A trainer rank failed. Its peers may wait for it inside a collective: the trainer is of no further use."""


class RankHandle(Protocol):
    """A `real.trainer.rank.TrainerRank` somewhere; runs its calls one at a time, in the order they were made."""

    async def call(self, method: str, *args: Any) -> Any: ...


class Trainer:
    """`ranks` in order of rank; `loss` as the ranks have it. One collective call runs at a time, others wait."""

    def __init__(self, ranks: Sequence[RankHandle], loss: LossOptions) -> None:
        self._ranks = tuple(ranks)
        self._loss = loss
        self._one = asyncio.Lock()

    @property
    def world(self) -> int:
        return len(self._ranks)

    async def connect(self) -> None:
        """The ranks meet and load the model."""
        host, port = await self.call(0, "address")
        await self.call_all("connect", host, port)

    async def log_probs(self, records: Sequence[Record], model: str = "actor") -> list[NDArray[np.float32]]:
        """[R] for each record, in their order, by `actor` or `reference`. The records stay as they are: generation
        log-probs are another field."""
        shares = ranks_of([len(r.token_ids) for r in records], self.world)
        answers = await self._each("log_probs", [([records[i] for i in share], model) for share in shares])
        found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(records)
        for share, values in zip(shares, answers, strict=True):
            for i, value in zip(share, values, strict=True):
                found[i] = value
        return found

    async def train_update(self, records: Sequence[Record], batch: int, update: int, updates: int) -> StepStats:
        """Optimizer update number `update` (from 0) of the `updates` that this whole batch makes."""
        chosen = updates_of(records, updates)[update]
        ready = with_advantages([records[i] for i in chosen], self._loss.advantage_std)
        shares = ranks_of([len(r.token_ids) for r in ready], self.world)
        answers = await self._each("train_update", [([ready[i] for i in s], batch, update) for s in shares])
        stats: StepStats = answers[0]
        return stats

    async def offload(self) -> Moved:
        return _together(await self.call_all("offload"))

    async def onload(self) -> Moved:
        return _together(await self.call_all("onload"))

    async def save(self, folder: str | Path, position: dict[str, Any] | None = None) -> None:
        """A checkpoint; `position` (JSON) says where in its data the driver stands. Refuses an existing folder."""
        await self.call_all("save", str(folder), position)

    async def restore(self, folder: str | Path) -> dict[str, Any]:
        """Returns the position that was saved."""
        position: dict[str, Any] = (await self.call_all("restore", str(folder)))[0]
        return position

    async def shutdown(self) -> None:
        await self.call_all("shutdown")

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """The same collective call on every rank; answers in order of rank."""
        return await self._each(method, [args] * self.world)

    async def call(self, rank: int, method: str, *args: Any) -> Any:
        """A call on one rank: what is not collective, or one part of what the caller starts on several.

        Raises the rank's own `RealError`, `RecordError` or `UpdateFailed`, and `TrainerError` for anything else."""
        try:
            return await self._ranks[rank].call(method, *args)
        except (RealError, RecordError, UpdateFailed):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise TrainerError(f"trainer rank {rank} of {self.world} failed in {method}: {text}") from error

    async def _each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self._one:
            return await _all([self.call(rank, method, *a) for rank, a in enumerate(args)])


async def _all(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All answers, or the first failure at once: the other ranks may never answer."""
    tasks = [asyncio.ensure_future(c) for c in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _together(moved: Sequence[Moved]) -> Moved:
    return Moved(sum(m.bytes for m in moved), max(m.seconds for m in moved))


def with_advantages(records: Sequence[Record], std: AdvantageStd) -> list[Record]:
    """Copies of `records` with `extra["advantages"]` [R]: the value of the response relative to its group (not its
    task: two groups of one task are two comparisons) on each loss-carrying token, 0 elsewhere. Token arrays are shared.

    Raises `RecordError` for an aborted or failed response: it has no reward, and must not enter a group's mean."""
    groups: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        if record.finish_reason in ("aborted", "failed"):
            raise RecordError(
                f"trajectory {record.trajectory} {record.finish_reason}: it cannot be compared or trained"
            )
        groups.setdefault(record.group, []).append(i)
    ready = list(records)
    for members in groups.values():
        rewards = torch.tensor([records[i].reward for i in members], dtype=torch.float64)
        for i, value in zip(members, group_advantages(rewards, std).tolist(), strict=True):
            advantages = records[i].loss_mask.astype(np.float32) * np.float32(value)
            ready[i] = replace(records[i], extra={**records[i].extra, "advantages": advantages})
    return ready
