"""Trainer ranks on this machine without Ray: one in this process, or each in a process of its own. Implements
`RankHandle`; knows nothing of what a rank does."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

Factory = Callable[[int], Any]
"""Builds the rank with this number; picklable where ranks are processes."""


class RankLost(Exception):
    """The process of a rank is gone."""


class LocalRank:
    """The rank in this process, off the event loop, in one thread. Only a world of one can live like this."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer-rank")

    async def call(self, method: str, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: getattr(self.target, method)(*args))

    def close(self) -> None:
        self._thread.shutdown()


class ProcessRank:
    """The rank in a fresh process, which ends with this one (its pipe breaks)."""

    def __init__(self, factory: Factory, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, factory, rank), daemon=True)
        self.process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"trainer-rank-{rank}")

    async def call(self, method: str, *args: Any) -> Any:
        """Raises what the rank raised, or `RankLost` if its process ended."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._round_trip, method, args)

    def _round_trip(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            self._pipe.send((method, args))
            answer, failure = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise RankLost(f"its process ended (exit code {self.process.exitcode})") from None
        if failure is not None:
            raise failure
        return answer

    def close(self) -> None:
        """End the process; what it was doing is lost."""
        self.process.terminate()
        self.process.join()
        self._thread.shutdown()
        self._pipe.close()


def local_ranks(factory: Factory, world: int) -> list[LocalRank] | list[ProcessRank]:
    """`world` ranks: the only one in this process, several as processes. Close each after use."""
    return [LocalRank(factory(0))] if world == 1 else [ProcessRank(factory, rank) for rank in range(world)]


def _serve(pipe: Connection, factory: Factory, rank: int) -> None:
    target = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            target = factory(rank) if target is None else target
            pipe.send((getattr(target, method)(*args), None))
        except Exception as error:
            pipe.send((None, _portable(error)))


def _portable(error: Exception) -> Exception:
    """The error itself if it survives pickling (not every class does); else its text."""
    try:
        same: Exception = pickle.loads(pickle.dumps(error))
        return same
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
