"""Tasks of other environments under one sequence of indices: a mixture of parts, each drawn by its share.

Everything that follows a draw (limits, tools, rewards, prepare and release) is the part's own business, with the part's
own task; nothing of one part reaches another. Refuses to know what the tasks are."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from real.environments.base import Demonstration, Environment, LiveTasks, RealTask, ToolCall, TurnLimits, Who


@dataclass(frozen=True)
class Inner:
    """Payload of a task that is another environment's."""

    environment: Environment
    task: RealTask


def seed_of(seed: int, name: str) -> int:
    """A seed of its own for each name: equal parts pose different tasks, and what one poses does not depend on which
    others there are."""
    return int.from_bytes(hashlib.blake2b(f"{name}/{seed}".encode(), digest_size=4).digest(), "little")


class Composed(LiveTasks):
    """An `Environment` whose tasks have `Inner` payloads; a subclass says which by `make`."""

    kinds: dict[str, str]

    def adopt(self, index: int, environment: Environment, kind: str | None = None) -> RealTask | None:
        """The environment's next task as number `index` of this one; None if it has no more."""
        task = environment.draw()
        if task is None:
            return None
        return replace(task, index=index, kind=kind or task.kind, payload=Inner(environment, task))

    def environments(self) -> Sequence[Environment]:
        """All that tasks are drawn from."""
        raise NotImplementedError

    def release(self, index: int) -> None:
        task = self._live.get(index)
        if task is not None and isinstance(task.payload, Inner):
            task.payload.environment.release(task.payload.task.index)
        super().release(index)

    def arrivals(self) -> Iterator[tuple[float, RealTask]] | None:
        return None

    def limits(self, task: RealTask, member: int, turn: int, context_tokens: int) -> TurnLimits:
        inner: Inner = task.payload
        return inner.environment.limits(inner.task, member, turn, context_tokens)

    def after_turn(self, task: RealTask, member: int, turn: int, output_ids: list[int]) -> ToolCall | None:
        inner: Inner = task.payload
        return inner.environment.after_turn(inner.task, member, turn, output_ids)

    async def run_tool(self, task: RealTask, who: Who, call: ToolCall) -> list[int]:
        inner: Inner = task.payload
        return await inner.environment.run_tool(inner.task, who, call)

    def tool_fault(self, task: RealTask, who: Who) -> str:
        inner: Inner = task.payload
        return inner.environment.tool_fault(inner.task, who)

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        inner: Inner = task.payload
        return await inner.environment.reward(inner.task, member, prompt_ids, response_ids, outputs)

    async def prepare(self, task: RealTask, who: Who) -> None:
        inner: Inner = task.payload
        await inner.environment.prepare(inner.task, who)

    async def release_member(self, task: RealTask, who: Who) -> None:
        inner: Inner = task.payload
        await inner.environment.release_member(inner.task, who)

    async def open(self) -> None:
        await asyncio.gather(*(e.open() for e in self.environments()))

    async def close(self) -> None:
        await asyncio.gather(*(e.close() for e in self.environments()))


class Mixture(Composed):
    """Task i is the next one of a part that (seed, i) chooses, with probabilities in proportion to `shares`; its kind
    is the part's name. It ends with the first part that ends.

    Demonstrations with a run's seed are of that run's tasks, in their order."""

    def __init__(
        self, parts: Mapping[str, Environment], shares: Sequence[float], *, seed: int, num_tasks: int | None
    ) -> None:
        super().__init__(num_tasks)
        self.parts = dict(parts)
        self._names = tuple(parts)
        self._edges = np.cumsum(shares) / sum(shares)
        self._seed = seed
        facts: list[Any] = [seed, num_tasks, list(shares), [(n, e.fingerprint) for n, e in parts.items()]]
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        self.kinds = dict(next(iter(parts.values())).kinds)

    def environments(self) -> Sequence[Environment]:
        return tuple(self.parts.values())

    def _chosen(self, seed: int, index: int) -> str:
        at = int(np.searchsorted(self._edges, np.random.default_rng((seed, index)).random(), side="right"))
        return self._names[at]

    def make(self, index: int) -> RealTask | None:
        name = self._chosen(self._seed, index)
        return self.adopt(index, self.parts[name], name)

    def demonstrations(self, seed: int) -> Iterator[Demonstration] | None:
        streams = {name: part.demonstrations(seed_of(seed, name)) for name, part in self.parts.items()}
        found = {name: stream for name, stream in streams.items() if stream is not None}
        return self._mixed(seed, found) if len(found) == len(streams) else None

    def _mixed(self, seed: int, streams: dict[str, Iterator[Demonstration]]) -> Iterator[Demonstration]:
        index = 0
        while True:
            yield next(streams[self._chosen(seed, index)])
            index += 1
