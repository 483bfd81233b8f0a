"""One simulated run and its folder: scenario, journal, metrics. Readable afterwards, also when it was interrupted.

It refuses to know the command line and reports.
"""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from msgspec import Struct

from sim.driver import Progress, SimulatedBackend, StuckError
from testbed.journal import JournalHeader, JournalWriter
from testbed.metrics import RunMetrics, write_metrics
from testbed.metrics.summary import RunSummary
from testbed.scenario import Scenario
from testbed.scenario.load import dump_scenario, scenario_hash

BROKEN_OFF = {
    "too_many_dropped": "more than `experience.staleness.max_dropped_share` of what was generated is too old",
    "no_engine_left": "no engine is left",
}
"""Reasons of the core to end a run before its last batch, in words."""


class Simulated(Struct):
    """What a run leaves behind."""

    summary: RunSummary
    folder: Path | None
    cpu_s: float
    """CPU seconds of this process for the run, set-up included."""
    finish_reason: str
    problem: str = ""
    """Why it did not come to its end (interrupted, stuck); empty otherwise."""


def versions() -> dict[str, str]:
    """What produced the figures."""
    found = {"python": platform.python_version()}
    for package in ("rl-testbed", "simpy", "msgspec", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def kinds_of(backend: SimulatedBackend) -> dict[str, str]:
    """Family of numbers -> what it rests on."""
    cost = backend.costs.kind
    kinds = {
        "engine_step": "assumed" if cost == "linear" else cost,
        "trainer": "analytic" if backend.scenario.training.cost.type == "analytic" else "assumed",
        "links": "analytic",
        "price": "assumed",
    }
    return {**backend.workload.kinds, **kinds}


def simulate(
    scenario: Scenario,
    base_dir: Path,
    folder: Path | None = None,
    *,
    progress: Progress | None = None,
    name: str = "",
    faults: Any = (),
) -> Simulated:
    """Run `scenario` in virtual time; with `folder`, write `scenario.yaml`, `journal.jsonl.zst`, `metrics.parquet`,
    `summary.json`.

    A run that gets stuck or is interrupted is written down as far as it came (`problem` says why). Errors of the
    scenario and its files are raised before anything is written.
    """
    started = time.process_time()
    digest = scenario_hash(scenario)
    observers: list[Any] = []
    backend = SimulatedBackend(scenario, base_dir, observers, faults)
    metrics = RunMetrics(scenario, backend.core.layout)
    observers.append(metrics.observe)
    writer: JournalWriter | None = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "scenario.yaml").write_text(dump_scenario(scenario), encoding="utf-8")
        header = JournalHeader(
            scenario_hash=digest,
            seed=scenario.run.seed,
            backend="simulated",
            versions=versions(),
            scenario=scenario.model_dump(mode="json"),
        )
        path = folder / "journal.jsonl.zst"
        writer = JournalWriter(path, scenario.run.journal, scenario.run.journal_sample, header)
        if scenario.run.journal != "off":
            observers.append(writer.write)
    backend.use(observers)
    problem = ""
    try:
        backend.run(progress)
    except StuckError as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    finally:
        if writer is not None:
            writer.close()
    reason = backend.finish_reason or ("interrupted" if problem == "interrupted" else "stuck")
    problem = problem or BROKEN_OFF.get(reason, "")
    summary = metrics.summary(
        name=name or scenario.name,
        backend="simulated",
        seed=scenario.run.seed,
        scenario_hash=digest,
        workload_hash=backend.workload.fingerprint,
        backend_events=backend.clock.events,
        finish_reason=reason,
        kinds=kinds_of(backend),
        marks=dict(backend.costs.outside_share),
    )
    if folder is not None:
        write_metrics(folder / "metrics.parquet", summary)
    return Simulated(summary, folder, time.process_time() - started, reason, problem)
