"""Carries out a calibration: brings up the deployment, makes the experiments on its engines and its trainer, and
between and after them a short run whose journals say the rest.

It refuses to know what is fitted to the measurements.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from real.calibration.beside import measure_beside, measure_crowd
from real.calibration.engine import measure, measure_controls, measure_traffic, server_facts, warm_up
from real.calibration.updates import measure_updates, probed
from real.deployment import Deployment, deployed
from real.engines.client import EngineClient
from real.errors import RealError
from real.run import run_on
from testbed.calibration.design import (
    LOOKS,
    LOOKS_AT_UPDATES,
    SHORT_RUNS,
    BesidePoint,
    ControlPoint,
    CrowdPoint,
    EnginePoint,
    Plan,
    TrafficPoint,
    in_parts,
)
from testbed.calibration.phases import TrainPoint
from testbed.calibration.speed import Loops
from testbed.run_files import JOURNAL
from testbed.scenario import Scenario

PADDED = ("torch_native",)
"""Attention backends of SGLang that pad queries to the length of the keys."""


class Calibrated(Struct):
    """What was measured on one deployment."""

    engine: list[EnginePoint]
    crowd: list[CrowdPoint]
    controls: list[ControlPoint]
    loops: Loops
    updates: list[TrainPoint]
    beside: list[BesidePoint]
    server: dict[str, Any]
    max_total_num_tokens: int
    start_s: float
    """From nothing to a deployment that is ready."""
    runs: list[Path]
    """Journals of the short run, each time it was made."""
    engines: int
    """That worked side by side."""

    @property
    def padded(self) -> bool:
        return self.server.get("attention_backend") in PADDED

    @property
    def seen_late(self) -> bool:
        """Whether a prefill's end is counted after the decode step that follows."""
        return self.server.get("device") == "cpu" and not self.server.get("disable_overlap_schedule")


async def calibrate(
    scenario: Scenario,
    base_dir: Path,
    folder: Path,
    plan: Plan,
    stage: Callable[[str], None],
    done: Callable[[str], None],
) -> Calibrated:
    """Bring up the scenario's deployment and calibrate on it (`calibrate_on`)."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".deployment-", dir=folder) as shared:
        async with deployed(scenario, base_dir, Path(shared).resolve(), stage) as deployment:
            return await calibrate_on(deployment, scenario, folder, plan, time.monotonic() - started, stage, done)


async def calibrate_on(
    deployment: Deployment,
    scenario: Scenario,
    folder: Path,
    plan: Plan,
    start_s: float,
    stage: Callable[[str], None],
    done: Callable[[str], None],
) -> Calibrated:
    """Carry out the plan's experiments on the scenario's engines and its trainer, and its short run between and after
    them, into folders below `folder`; `done` after each. `start_s`: what it took to bring the deployment up. The
    trainer's weights are others afterwards. Raises `real.errors.RealError`."""
    clients = [engine.client for engine in deployment.engines]
    server, slots = await server_facts(clients[0])
    vocab_size = deployment.model.tokenizer.vocab_size

    async def loop() -> list[TrafficPoint]:
        return await measure_traffic(clients, plan.traffic, vocab_size)

    short_runs, run_loops = list[Path](), list[TrafficPoint]()

    async def short_run() -> None:
        name, config = plan.short_run
        stage("measuring weight updates")
        run_loops.extend(await loop())
        await deployment.reset(config)
        place = folder / f"{name}-{len(short_runs) + 1}"
        measured = await run_on(deployment, config, place, name=place.name)
        if measured.problem:
            raise RealError(f"short run {place.name}: {measured.problem}")
        short_runs.append(place / JOURNAL)
        run_loops.extend(await loop())
        done(place.name)

    stage("measuring the engine")
    await warm_up(clients)
    engine_loops, points = await loop(), list[EnginePoint]()
    for part in in_parts(plan.experiments, LOOKS, lambda e: not e.cached):  # what is cached is so from the one before
        points += await measure(clients, part, vocab_size, lambda e: done(f"{e.requests} x {e.prompt} tokens"))
        engine_loops += await loop()
    paused = await measure_controls(clients[0], plan.controls, vocab_size, lambda c: done(f"pause {c.mode}"))
    crowd = await measure_crowd(clients, plan.crowd, vocab_size, done)
    await short_run()
    trainer, training = deployment.trainer, scenario.training
    if plan.updates:
        stage("measuring the trainer")
    apart, updates_s, updates = scenario.placement.mode == "disaggregated", list[float](), list[TrainPoint]()
    async with _memory_lent(clients, bool(plan.updates) and not apart):
        capacity = training.max_tokens_per_gpu * training.context_parallel
        for sizes in in_parts(plan.updates, LOOKS_AT_UPDATES):
            if apart:
                updates_s.append(await probed(trainer, vocab_size))
            updates += await measure_updates(trainer, sizes, capacity, vocab_size, done)
    if updates_s:
        updates_s.append(await probed(trainer, vocab_size))
    beside: list[BesidePoint] = []
    if plan.beside:
        stage("measuring engine and trainer side by side")
        beside = await measure_beside(clients, trainer, plan.beside, vocab_size, done)
    while len(short_runs) < SHORT_RUNS:
        await short_run()
    return Calibrated(
        points,
        crowd,
        paused,
        Loops(engine_loops, run_loops, updates_s),
        updates,
        beside,
        server,
        slots,
        start_s,
        short_runs,
        len(clients),
    )


@asynccontextmanager
async def _memory_lent(clients: Sequence[EngineClient], lent: bool) -> AsyncIterator[None]:
    """Engines that share the trainer's GPUs have given up their memory, as while it trains in a run."""
    if lent:
        await asyncio.gather(*(c.release_memory() for c in clients))
    yield
    if lent:
        await asyncio.gather(*(c.resume_memory() for c in clients))
