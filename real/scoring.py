"""Rewards from a model. Responses that end while the trainer's ranks are busy are scored together when they are free.

It refuses to know what a reward is for, and where the model lives: the trainer does."""

from __future__ import annotations

import asyncio

from real.records import Record
from real.trainer.trainer import Trainer


class ScoringModel:
    """The trainer's reward model, asked for one response at a time."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._waiting: list[tuple[Record, asyncio.Future[float]]] = []
        self._one = asyncio.Lock()

    async def score(self, record: Record) -> float:
        """Of the whole response. Raises what the trainer raises."""
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, answer))
        async with self._one:  # whoever is here first asks for all that have come by then
            if not answer.done():
                asked, self._waiting = self._waiting, []
                rewards = await self._trainer.rewards([r for r, _ in asked])
                for (_, waiting), reward in zip(asked, rewards, strict=True):
                    if not waiting.done():  # its run may have given it up
                        waiting.set_result(reward)
        return await answer
