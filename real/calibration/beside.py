"""Measures how much engines and trainer, and engines among themselves, slow each other down: the same work alone, then
while the others work.

Alone and beside are measured in turn, so that a drift of the machine is in both. It refuses to know what is made of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from real.calibration.engine import GENERATING_S, generate, measured, prompts_of
from real.calibration.updates import PROBE, Updates
from real.engines.client import EngineClient
from real.trainer.trainer import Trainer
from testbed.calibration.design import (
    CONTROL_PROMPT,
    Beside,
    BesidePoint,
    Control,
    CrowdPoint,
    EnginePoint,
    Experiment,
)

IN_A_ROW = 4
"""Whose seconds are compared."""


async def measure_beside(
    clients: Sequence[EngineClient],
    trainer: Trainer,
    plan: Sequence[Beside],
    vocab_size: int,
    done: Callable[[str], None],
) -> list[BesidePoint]:
    """`done` after each part of the plan. Raises `real.errors.RealError`. The trainer's weights are others
    afterwards."""
    draw, points = random.Random(2), []
    work = Updates(trainer, PROBE, vocab_size)
    await work.make()  # what happens at the first update only
    for repeat, part in enumerate(plan):
        for number, e in enumerate(part.experiments):
            prompts = prompts_of(draw, e, vocab_size)
            name = f"beside-{repeat}-{number}"
            alone = await asyncio.gather(*(measured(c, e, prompts, f"{name}-alone") for c in clients))
            async with _kept_up(work):
                beside = await asyncio.gather(*(measured(c, e, prompts, f"{name}-trained") for c in clients))
            for a, b in zip(alone, beside, strict=True):
                points += _engine_points(a, b)
        alone_s = await work.make(IN_A_ROW)
        async with _generating(clients, part.generating, draw, vocab_size, f"beside-{repeat}"):
            await asyncio.sleep(GENERATING_S)
            points.append(BesidePoint("train", alone_s, await work.make(IN_A_ROW)))
        done(f"side by side {repeat + 1}")
    await asyncio.gather(*(c.flush() for c in clients))
    return points


async def measure_crowd(
    clients: Sequence[EngineClient], experiments: Sequence[Experiment], vocab_size: int, done: Callable[[str], None]
) -> list[CrowdPoint]:
    """Every experiment on all engines at once, then on one after another; one point for each engine, in order. Raises
    `EngineGone` and `EngineRefused`."""
    draw, points = random.Random(5), []
    for number, e in enumerate(experiments):
        prompts = prompts_of(draw, e, vocab_size)
        together = await asyncio.gather(*(measured(c, e, prompts, f"crowd-{number}-all") for c in clients))
        for c, of_all in zip(clients, together, strict=True):
            alone = await measured(c, e, prompts, f"crowd-{number}-alone")
            if alone.decode_steps and of_all.decode_steps:
                steps = alone.decode_s / alone.decode_steps, of_all.decode_s / of_all.decode_steps
                points.append(CrowdPoint(e.requests, *steps, alone.prefill_s, of_all.prefill_s))
        done(f"{e.requests} x {e.prompt} tokens, all and alone")
    await asyncio.gather(*(c.flush() for c in clients))
    return points


def _engine_points(alone: EnginePoint, beside: EnginePoint) -> list[BesidePoint]:
    """Decode steps, and the prefill batches if both times the same requests were computed together."""
    points = []
    if alone.decode_steps and beside.decode_steps:
        points.append(BesidePoint("decode", alone.decode_s / alone.decode_steps, beside.decode_s / beside.decode_steps))
    if [b.requests for b in alone.batches] == [b.requests for b in beside.batches]:
        points.append(BesidePoint("prefill", alone.prefill_s, beside.prefill_s))
    return points


@asynccontextmanager
async def _kept_up(work: Updates) -> AsyncIterator[None]:
    """One update after another until the end of the block; the last one is waited for."""
    going = True

    async def on() -> None:
        while going:
            await work.make()

    task = asyncio.create_task(on())
    try:
        yield
    finally:
        going = False
        await task


@asynccontextmanager
async def _generating(
    clients: Sequence[EngineClient], what: Control, draw: random.Random, vocab_size: int, name: str
) -> AsyncIterator[None]:
    """Every engine generates for so many requests, again and again, until the end of the block."""
    going = True
    e = Experiment(what.running, CONTROL_PROMPT)

    async def on(client: EngineClient) -> None:
        turn = 0
        while going:
            prompts = prompts_of(draw, e, vocab_size)
            await asyncio.gather(
                *(generate(client, f"{name}-{turn}-{i}", p, what.outputs) for i, p in enumerate(prompts))
            )
            turn += 1

    tasks = [asyncio.create_task(on(c)) for c in clients]
    try:
        yield
    finally:
        going = False
        await asyncio.gather(*(c.abort_all() for c in clients))
        await asyncio.gather(*tasks)
