"""Optimizer updates on made-up trajectories: what a trainer takes for so many of so many tokens.

They are the updates of a run, through the same calls, without one: nothing has to be generated for them. It refuses to
know what is fitted to their times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from real.calibration.engine import FIRST_TOKEN
from real.records import Record
from real.trainer.options import SignalOptions
from real.trainer.trainer import Trainer
from testbed.calibration.design import UpdateSize
from testbed.calibration.phases import TrainPoint
from testbed.packing import rows_of

PROMPT = 8
WAIT_S = 0.5
"""Before each update that is measured: in a run the trainer waits for its batch, and what it works on has left the
caches meanwhile."""


class Updates:
    """Updates of one size. Trajectories come in groups of two with different rewards, and with all that a loss may
    read of other policies."""

    def __init__(self, trainer: Trainer, size: UpdateSize, vocab_size: int) -> None:
        self._trainer = trainer.with_signals(SignalOptions())
        draw = np.random.default_rng(2)
        prompt = min(PROMPT, size.tokens - 1)
        response = size.tokens - prompt
        tokens = draw.integers(FIRST_TOKEN, vocab_size, (size.trajectories, size.tokens), dtype=np.int32)
        log_probs = np.full(response, -np.log(vocab_size), np.float32)
        self.records = [
            Record(
                trajectory=i,
                group=i // 2,
                task=i // 2,
                prompt_tokens=prompt,
                token_ids=tokens[i],
                loss_mask=np.ones(response, np.bool_),
                generation_log_probs=log_probs,
                spans=((0, 0, response),),
                reward=float(i % 2),
                finish_reason="length",
                old_log_probs=log_probs,
                reference_log_probs=log_probs,
            ).check()
            for i in range(size.trajectories)
        ]

    async def make(self, times: int = 1) -> float:
        """Seconds of so many in a row."""
        started = time.monotonic()
        for _ in range(times):
            await self._trainer.train_update(self.records, 0, 0, 1)
        return time.monotonic() - started


PROBE = UpdateSize(16, 32)
"""Of the update that is always the same."""


async def probed(trainer: Trainer, vocab_size: int) -> float:
    """Seconds of a probe's update. The trainer's weights are others afterwards. Raises `real.errors.RealError`."""
    work = Updates(trainer, PROBE, vocab_size)
    await work.make()  # what happens after a pause only
    return await work.make()


async def measure_updates(
    trainer: Trainer,
    sizes: Sequence[UpdateSize],
    max_tokens_per_gpu: int,
    vocab_size: int,
    done: Callable[[str], None],
) -> list[TrainPoint]:
    """One update of each size, in order; `done` after each. `max_tokens_per_gpu`: of a packed row. Raises
    `real.errors.RealError`. The trainer's weights are others afterwards."""
    works = {size: Updates(trainer, size, vocab_size) for size in sizes}
    points = []
    if sizes:
        await works[sizes[0]].make()  # what happens at the first update only
    for size in sizes:
        await asyncio.sleep(WAIT_S)
        rows = max(rows_of([size.tokens] * size.trajectories, max_tokens_per_gpu, trainer.world), key=sum)
        points.append(TrainPoint(tuple(rows), await works[size].make()))
        done(f"update of {size.trajectories} x {size.tokens} tokens")
    return points
