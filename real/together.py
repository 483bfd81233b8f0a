"""Questions that are asked one at a time and answered together: those that come while earlier ones are being answered
wait, and are the next batch.

It refuses to know who answers and what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[Q, A]):
    """`answer` takes questions in the order in which they came and gives as many answers."""

    def __init__(self, answer: Callable[[list[Q]], Awaitable[Sequence[A]]]) -> None:
        self._answer = answer
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._one = asyncio.Lock()

    async def ask(self, question: Q) -> A:
        """Raises what `answer` raises, to the one whose turn it was; the others' questions are put again."""
        mine: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, mine))
        async with self._one:  # whoever is here first asks for all that have come by then
            if not mine.done():
                asked, self._waiting = self._waiting, []
                try:
                    answers = await self._answer([q for q, _ in asked])
                except BaseException:  # or its task was cancelled: the others ask again
                    self._waiting[:0] = [one for one in asked if one[1] is not mine]
                    raise
                for (_, waiting), a in zip(asked, answers, strict=True):
                    if not waiting.done():  # its run may have given it up
                        waiting.set_result(a)
        return await mine
