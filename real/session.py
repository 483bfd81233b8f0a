"""Several real runs one after another, on as few deployments as they need; ended early by Ctrl-C without losing what a
run did until then.

It refuses to know the command line's words and reports."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from real.calibration.carry_out import Calibrated, calibrate_on
from real.calibration.engine import measure_traffic, warm_up
from real.calibration.updates import probed
from real.deployment import Deployment, Stage, deployed, deployment_key
from real.driver import Status
from real.errors import EngineGone, EngineRefused
from real.run import Measured, run_on
from testbed.calibration.design import Plan, Traffic
from testbed.calibration.speed import NEAREST, MachineSpeed, Probe, around, write_speed
from testbed.run_files import CALIBRATION
from testbed.scenario import Scenario

LOGS = "logs"
"""Of the servers, in the folder of the first run that they served."""


class Job(Struct, frozen=True):
    """One run to make."""

    scenario: Scenario
    base_dir: Path
    """What file names in the scenario are relative to."""
    folder: Path
    name: str
    loop: Traffic | None = None
    """Driven on the engines right before and after the run: `machine_speed.json`."""
    plan: Plan | None = None
    """Of a calibration, made before it if it is the first run of its deployment."""


Progress = Callable[[int, Status], None]
"""Hears where the run of this index stands."""
Done = Callable[[int, Measured], None]


def run_jobs(
    jobs: Sequence[Job],
    *,
    stage: Stage,
    progress: Progress,
    done: Done,
    measured: Callable[[str], None] = lambda part: None,
    calibrated: Callable[[int, Calibrated], None] = lambda index, found: None,
) -> list[Measured]:
    """Run all jobs in order; those that follow each other with equal deployments share one. `measured` hears of each
    part of a calibration, `calibrated` of each that was made, with the index of the job that asked for it.

    Ctrl-C ends the run at hand (`problem` is `interrupted`) and starts no other. Raises `real.errors.RealError` if
    something cannot be brought up, and whatever a run raises.
    """
    return asyncio.run(_run_jobs(jobs, Heard(stage, progress, done, measured, calibrated)))


class Heard(Struct, frozen=True):
    """Who hears of what."""

    stage: Stage
    progress: Progress
    done: Done
    measured: Callable[[str], None]
    calibrated: Callable[[int, Calibrated], None]


async def _run_jobs(jobs: Sequence[Job], heard: Heard) -> list[Measured]:
    loop, stop, results = asyncio.get_running_loop(), asyncio.Event(), list[Measured]()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        for group in _groups(jobs):
            if not stop.is_set():
                whole = asyncio.create_task(_run_group(group, results, heard, stop))
                await _until(whole, stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return results


async def _until(work: asyncio.Task[Any], stop: asyncio.Event) -> None:
    """Wait for `work`; when asked to stop while something is brought up, give that up."""
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not work.done():
        work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


async def _run_group(
    group: list[tuple[int, Job]],
    results: list[Measured],
    heard: Heard,
    stop: asyncio.Event,
) -> None:
    number, first = group[0]
    started = time.monotonic()
    with _scratch(first.folder) as folder:
        async with deployed(first.scenario, first.base_dir, folder, heard.stage) as deployment:
            if first.plan is not None:
                start_s, place = time.monotonic() - started, first.folder.parent / CALIBRATION
                found = await calibrate_on(
                    deployment, first.scenario, place, first.plan, start_s, heard.stage, heard.measured
                )
                heard.calibrated(number, found)
            probes = [await _probe(deployment, first, True)]
            for k, (index, job) in enumerate(group):
                if k or first.plan is not None or first.loop is not None:
                    heard.stage("back to version 0")
                    await deployment.reset(job.scenario)
                measured = await run_on(
                    deployment,
                    job.scenario,
                    job.folder,
                    name=job.name,
                    progress=lambda status, index=index: heard.progress(index, status),
                )
                results.append(measured)
                heard.done(index, measured)
                if stop.is_set():
                    return
                probes.append(await _probe(deployment, job))
                _write_speeds(group[: k + 1], probes)


def _write_speeds(made: list[tuple[int, Job]], probes: list[Probe]) -> None:
    """Of the latest runs, whose nearest probes may be there now. One that could not be made is left out."""
    for run in range(max(len(made) - NEAREST, 0), len(made)):
        speed = around(probes, run)
        speed = MachineSpeed([one for one in speed.before if one.loop], [one for one in speed.after if one.loop])
        if speed.before and speed.after:
            write_speed(made[run][1].folder, speed)


async def _probe(deployment: Deployment, job: Job, first: bool = False) -> Probe:
    """Before the deployment goes back to version 0, since the trainer's weights are others afterwards. Nothing if an
    engine is gone. `first`: engines have not been asked anything before."""
    if job.loop is None:
        return Probe([])
    clients, vocab_size = [engine.client for engine in deployment.engines], deployment.model.tokenizer.vocab_size
    try:
        if first:
            await warm_up(clients)
        loop = await measure_traffic(clients, job.loop, vocab_size)
    except (EngineGone, EngineRefused):
        return Probe([])
    apart = job.scenario.placement.mode == "disaggregated"
    return Probe(loop, await probed(deployment.trainer, vocab_size) if apart else None)


@contextmanager
def _scratch(run: Path) -> Iterator[Path]:
    """A folder beside the run's for what engines and trainer share; the servers' logs go into the run's in the end, if
    there is one."""
    parent = run.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".deployment-", dir=parent))
    try:
        yield folder
    finally:
        if run.is_dir() and (folder / "logs").is_dir():
            shutil.rmtree(run / LOGS, ignore_errors=True)
            shutil.move(folder / "logs", run / LOGS)
        shutil.rmtree(folder, ignore_errors=True)


def _groups(jobs: Sequence[Job]) -> list[list[tuple[int, Job]]]:
    """Neighbours with equal deployments."""
    groups: list[list[tuple[int, Job]]] = []
    for index, job in enumerate(jobs):
        key = (deployment_key(job.scenario), job.base_dir)
        if groups and key == (deployment_key(groups[-1][0][1].scenario), groups[-1][0][1].base_dir):
            groups[-1].append((index, job))
        else:
            groups.append([(index, job)])
    return groups
