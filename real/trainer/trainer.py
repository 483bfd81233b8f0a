"""The trainer as its driver sees it: one asynchronous object over ranks that live elsewhere.

Responsible for which records go into which update and to which rank, for attaching what the losses read (module
`signals`: a group is whole only here), and for saying plainly that a rank failed. It refuses to know where ranks live
(Ray actors, processes, this one) and it decides nothing about batches: the core does."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from real.errors import RealError, UpdateFailed
from real.learning.options import LossOptions
from real.records import Record, RecordError
from real.trainer.assignment import updates_of
from real.trainer.options import SignalOptions
from real.trainer.signals import TeacherValues, teacher_values, with_advantages, with_returns
from real.trainer.stats import CriticStats, Moved, StepStats
from testbed.packing import ranks_of

__all__ = ["CriticStats", "RankHandle", "StepStats", "TeacherValues", "Trainer", "TrainerError"]


class TrainerError(RealError):
    """A trainer rank failed. Its peers may wait for it inside a collective: the trainer is of no further use."""


class RankHandle(Protocol):
    """A `real.trainer.rank.TrainerRank` somewhere; runs its calls one at a time, in the order they were made."""

    async def call(self, method: str, *args: Any) -> Any: ...


class Trainer:
    """`ranks` in order of rank; `loss` as the ranks have it. One collective call runs at a time, others wait."""

    def __init__(self, ranks: Sequence[RankHandle], loss: LossOptions, signals: SignalOptions | None = None) -> None:
        self._ranks = tuple(ranks)
        self._loss = loss
        self._signals = signals or SignalOptions()
        self._one = asyncio.Lock()

    def with_signals(self, signals: SignalOptions) -> Trainer:
        """The same ranks, one call at a time over both, for a run whose advantages are made of other signals."""
        other = copy.copy(self)
        other._signals = signals
        return other

    @property
    def loss(self) -> LossOptions:
        return self._loss

    @property
    def world(self) -> int:
        return len(self._ranks)

    async def connect(self) -> None:
        """The ranks meet and load the model."""
        host, port = await self.call(0, "address")
        await self.call_all("connect", host, port)

    async def settle(self) -> None:
        """Before runs: no rank stops for a full collection of its garbage (`real/garbage.py`)."""
        await self.call_all("settle")

    async def log_probs(self, records: Sequence[Record], model: str = "actor") -> list[NDArray[np.float32]]:
        """[R] for each record, in their order, by `actor`, `reference` or `teacher:NAME`. The records stay as they are:
        generation log-probs are another field."""
        found: list[NDArray[np.float32]] = await self._per_record("log_probs", records, model)
        return found

    async def values(self, records: Sequence[Record]) -> list[NDArray[np.float32]]:
        """[R] for each record, by the critic: what it expects before each response token."""
        found: list[NDArray[np.float32]] = await self._per_record("values", records)
        return found

    async def rewards(self, records: Sequence[Record]) -> list[float]:
        """For each record, in their order, what the reward model says of its response."""
        found: list[float] = await self._per_record("rewards", records)
        return found

    async def teacher_log_probs(self, records: Sequence[Record], teachers: Sequence[str]) -> list[TeacherValues]:
        """For each record, in their order, what the teacher named for it says, and the contexts in which it read: to go
        into `Record.extra` as they are. Records of one teacher are scored together."""
        found: dict[int, TeacherValues] = {}
        for name in sorted(set(teachers)):
            of = [i for i, t in enumerate(teachers) if t == name]
            scores = await self.log_probs([records[i] for i in of], f"teacher:{name}")
            found |= {i: teacher_values(records[i], v) for i, v in zip(of, scores, strict=True)}
        return [found[i] for i, _ in enumerate(zip(records, teachers, strict=True))]

    async def _per_record(self, method: str, records: Sequence[Record], *args: Any) -> list[Any]:
        shares = ranks_of([len(r.token_ids) for r in records], self.world)
        answers = await self._each(method, [([records[i] for i in share], *args) for share in shares])
        found: list[Any] = [None] * len(records)
        for share, values in zip(shares, answers, strict=True):
            for i, value in zip(share, values, strict=True):
                found[i] = value
        return found

    async def train_update(self, records: Sequence[Record], batch: int, update: int, updates: int) -> StepStats:
        """Optimizer update number `update` (from 0) of the `updates` that this whole batch makes. The records bring the
        values or teacher log-probs that the advantage needs; those of before the batch's first update."""
        chosen = [records[i] for i in updates_of(records, updates)[update]]
        ready = with_advantages(chosen, self._loss.advantage_std, self._signals)
        stats: StepStats = await self._update("train_update", ready, batch, update)
        return stats

    async def train_critic(self, records: Sequence[Record], batch: int, update: int, updates: int) -> CriticStats:
        """The critic's update number `update` of the `updates` that it makes of this batch, on `extra["values"]`."""
        chosen = [records[i] for i in updates_of(records, updates)[update]]
        stats: CriticStats = await self._update("train_critic", with_returns(chosen, self._signals), batch, update)
        return stats

    async def _update(self, method: str, ready: Sequence[Record], batch: int, update: int) -> Any:
        shares = ranks_of([len(r.token_ids) for r in ready], self.world)
        return (await self._each(method, [([ready[i] for i in s], batch, update) for s in shares]))[0]

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
