"""Carries out a calibration: brings up the deployment, makes the experiments on its engines and its trainer, then short
runs whose journals say the rest.

It refuses to know what is fitted to the measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from real.calibration.beside import measure_beside
from real.calibration.engine import measure, measure_controls, server_facts
from real.deployment import deployed
from real.errors import RealError
from real.run import run_on
from testbed.calibration.design import BesidePoint, ControlPoint, EnginePoint, Plan
from testbed.run_files import JOURNAL
from testbed.scenario import Scenario

PADDED = ("torch_native",)
"""Attention backends of SGLang that pad queries to the length of the keys."""


class Calibrated(Struct):
    """What was measured on one deployment."""

    engine: list[EnginePoint]
    controls: list[ControlPoint]
    beside: list[BesidePoint]
    server: dict[str, Any]
    max_total_num_tokens: int
    start_s: float
    """From nothing to a deployment that is ready."""
    runs: list[Path]
    """Journals of the short runs."""
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
    """Bring up the scenario's deployment, carry out the plan's experiments on its engines and its trainer, then its
    short runs, each into a folder below `folder`. `done` after each. Raises `real.errors.RealError`."""
    journals, started = [], time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".deployment-", dir=folder) as shared:
        async with deployed(scenario, base_dir, Path(shared).resolve(), stage) as deployment:
            start_s = time.monotonic() - started
            clients = [engine.client for engine in deployment.engines]
            server, slots = await server_facts(clients[0])
            vocab_size = deployment.model.tokenizer.vocab_size
            stage("measuring the engine")
            points = await measure(
                clients, plan.experiments, vocab_size, lambda e: done(f"{e.requests} x {e.prompt} tokens")
            )
            paused = await measure_controls(clients[0], plan.controls, vocab_size, lambda c: done(f"pause {c.mode}"))
            beside: list[BesidePoint] = []
            if plan.beside:
                stage("measuring engine and trainer side by side")
                beside = await measure_beside(clients, deployment.trainer, plan.beside, vocab_size, done)
            stage("measuring trainer and weight updates")
            for name, config in plan.short_runs:
                await deployment.reset(config)
                measured = await run_on(deployment, config, folder / name, name=name)
                if measured.problem:
                    raise RealError(f"short run {name}: {measured.problem}")
                journals.append(folder / name / JOURNAL)
                done(name)
    return Calibrated(points, paused, beside, server, slots, start_s, journals, len(clients))
