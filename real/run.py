"""One real run and its folder: scenario, journal, metrics, what each update did. Readable afterwards, also when it was
interrupted.

It refuses to know the command line and reports."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from real.deployment import Deployment
from real.driver import Progress, RealBackend, StuckError, Trained
from real.held_out import score_start, score_trained
from real.learning.options import LossOptions
from real.trainer.stats import batch_figures, batch_ratios
from testbed.core import events as said
from testbed.metrics.scores import Score
from testbed.metrics.summary import RunSummary
from testbed.recording import BROKEN_OFF, Recording, versions_of
from testbed.run_files import SPEED
from testbed.scenario import Scenario

PACKAGES = ("rl-testbed", "sglang", "torch", "transformers", "ray", "msgspec", "numpy")
TRAINING = "training.jsonl"
"""One line per optimizer update: reward, seconds, and all that actor and critic report of it."""

WEIGHTS = "weights.jsonl"
"""One line per publication: path, bytes sent against all bytes, share of changed words (deltas)."""
CHECKPOINTS = "checkpoints"
"""`step-N` after batch N, every `real.save_interval` batches; `real.load` goes on from one."""
DRIVER = "driver.json"
"""The driver's own share of the run's time."""
SWITCHES = "switches.jsonl"
"""One line per change of phase of a shared pool: what moved, and how long it took."""


class Measured(Struct):
    """What a real run leaves behind."""

    summary: RunSummary
    folder: Path | None
    wall_s: float
    core_share: float
    """Share of wall time spent deciding (`core.handle`)."""
    observers_share: float
    """Share of wall time spent on journal and metrics."""
    finish_reason: str
    rewards: list[float]
    """Mean reward of each batch, in order; empty where the algorithm asks for none."""
    problem: str = ""
    """Why it did not come to its end (interrupted, stuck); empty otherwise."""


def versions() -> dict[str, str]:
    """What produced the figures."""
    return versions_of(PACKAGES)


def kinds_of(deployment: Deployment) -> dict[str, str]:
    """Family of numbers -> what it rests on."""
    measured = dict.fromkeys(("engine_step", "trainer", "links", "prompts", "reply_lengths", "tools", "rewards"))
    return {**dict.fromkeys(measured, "measured"), **deployment.environment.kinds, "price": "assumed"}


async def run_on(
    deployment: Deployment,
    scenario: Scenario,
    folder: Path | None = None,
    *,
    progress: Progress | None = None,
    name: str = "",
    faults: Iterable[said.Event] = (),
    observers: Iterable[Any] = (),
) -> Measured:
    """Run `scenario` on a deployment that is up; with `folder`, write `scenario.yaml`, `journal.jsonl.zst`,
    `metrics.parquet`, `summary.json` and `training.jsonl`.

    A run that gets stuck or is cancelled is written down as far as it came (`problem` says why).
    """
    checkpoints = folder.resolve() / CHECKPOINTS if folder is not None else None
    if folder is not None and checkpoints is not None:  # nothing of an earlier run in this folder outlives it
        shutil.rmtree(checkpoints, ignore_errors=True)
        for file in (TRAINING, SWITCHES, WEIGHTS, DRIVER, SPEED):
            (folder / file).unlink(missing_ok=True)
    backend = RealBackend(scenario, deployment, (), faults, checkpoints)
    recording = Recording(scenario, backend.core.layout, folder, "real", versions())
    backend.use([*recording.observers, *observers])
    problem = ""
    held_out: list[Score] = []
    try:
        held_out += await score_start(deployment, scenario)
        await backend.run(progress)
        held_out += await score_trained(deployment, scenario, [slot.lost for slot in backend.fleet.slots])
    except StuckError as error:
        problem = str(error)
    except asyncio.CancelledError:
        problem = "interrupted"
    finally:
        recording.close()
    reason = backend.finish_reason or ("interrupted" if problem == "interrupted" else "stuck")
    problem = problem or BROKEN_OFF.get(reason, "")
    summary = recording.finish(
        name=name,
        workload_hash=deployment.environment.fingerprint,
        backend_events=0,
        finish_reason=reason,
        kinds=kinds_of(deployment),
        marks={},
        learning=_learning(backend.trained, deployment.trainer.loss),
        ratios={batch: batch_ratios([u.stats for u in us]) for batch, us in _by_batch(backend.trained).items()},
        clip=deployment.trainer.loss.clip,
        held_out=held_out,
        engine_weight_bytes=max((p.engine_bytes for p in backend.weights.published), default=0),
    )
    if folder is not None:
        lines = b"".join(msgspec.json.encode(t) + b"\n" for t in backend.trained)
        (folder / TRAINING).write_bytes(lines)
        for file, rows in ((SWITCHES, backend.weights.switches), (WEIGHTS, backend.weights.published)):
            if rows:
                (folder / file).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    wall = max(backend.wall_s, 1e-9)
    core_share, observers_share = backend.core_s / wall, backend.observers_s / wall
    if folder is not None:
        shares = {"wall_s": backend.wall_s, "core_share": core_share, "observers_share": observers_share}
        (folder / DRIVER).write_bytes(msgspec.json.format(msgspec.json.encode(shares), indent=1))
    return Measured(
        summary=summary,
        folder=folder,
        wall_s=backend.wall_s,
        core_share=core_share,
        observers_share=observers_share,
        finish_reason=reason,
        rewards=_rewards(backend) if "reward" in scenario.algorithm.signals else [],
        problem=problem,
    )


def _learning(trained: Iterable[Trained], loss: LossOptions) -> dict[int, dict[str, float]]:
    """Batch -> what its updates did."""
    return {b: batch_figures([(u.stats, u.critic) for u in us], loss) for b, us in _by_batch(trained).items()}


def _by_batch(trained: Iterable[Trained]) -> dict[int, list[Trained]]:
    found: dict[int, list[Trained]] = {}
    for update in trained:
        found.setdefault(update.batch, []).append(update)
    return found


def _rewards(backend: RealBackend) -> list[float]:
    by_batch: dict[int, float] = {}
    for update in backend.trained:
        by_batch[update.batch] = update.reward_mean
    return [by_batch[b] for b in sorted(by_batch)]
