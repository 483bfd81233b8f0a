"""What there is a limited number of in a real run: verifiers, tool processes, environments.

Responsible for who waits, who holds a place and when it is free again. It refuses to know events and trajectories'
states."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from real.environments.base import Environment, RealTask, Who


class Slots:
    """At most `n` at once; 0 means as many as come. `most_waiting`: so many may wait for one."""

    def __init__(self, n: int, most_waiting: int | None = None) -> None:
        self._semaphore = asyncio.Semaphore(n) if n else None
        self._free_or_waiting = None if most_waiting is None or not n else n + most_waiting
        self._asked = 0

    def one(self) -> AbstractAsyncContextManager[Any]:
        return self._semaphore if self._semaphore is not None else nullcontext()

    @asynccontextmanager
    async def one_of_few(self) -> AsyncIterator[bool]:
        """As `one`, and whether it was got: False, at once, if too many wait already."""
        if self._asked == self._free_or_waiting:
            yield False
            return
        self._asked += 1
        try:
            async with self.one():
                yield True
        finally:
            self._asked -= 1


class Places:
    """Environments, at most `n` of them from the start of preparation to the end of reclamation (0: as many as come).

    As in the simulator (`sim/tools.py`): one that is released while it waits is never prepared, one that is released
    while it is prepared is reclaimed when that is done; neither becomes ready."""

    def __init__(self, environment: Environment, n: int = 0) -> None:
        self._environment = environment
        self._slots = Slots(n)
        self._released: dict[Who, asyncio.Event] = {}
        """What is set when it is released, of each that was asked for and is not reclaimed."""

    def prepare(self, task: RealTask, who: Who, ready: Callable[[], None]) -> Coroutine[Any, Any, None]:
        """Asked for from this call on; what is returned lasts until it is reclaimed, and calls `ready` when it is
        there."""
        released = self._released[who] = asyncio.Event()
        return self._held(task, who, ready, released)

    async def _held(self, task: RealTask, who: Who, ready: Callable[[], None], released: asyncio.Event) -> None:
        async with self._slots.one():
            if not released.is_set():
                await self._environment.prepare(task, who)
                if not released.is_set():
                    ready()
                await released.wait()
                await self._environment.release_member(task, who)
        del self._released[who]

    def release(self, who: Who) -> None:
        """Raises KeyError if nothing was asked for."""
        self._released[who].set()
