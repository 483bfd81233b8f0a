"""One simulated run and its folder: scenario, journal, metrics. Readable afterwards, also when it was interrupted.

It refuses to know the command line and reports.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from sim.driver import Progress, SimulatedBackend
from sim.errors import StuckError
from testbed.metrics.summary import RunSummary
from testbed.recording import BROKEN_OFF, Recording, versions_of
from testbed.scenario import Scenario

OF_TRAINER = {"analytic": "analytic", "fitted": "calibrated", "calibrated": "calibrated", "rate": "assumed"}
"""Type of `training.cost` -> what its times rest on."""


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
    return versions_of(("rl-testbed", "simpy", "msgspec", "numpy"))


def kinds_of(backend: SimulatedBackend) -> dict[str, str]:
    """Family of numbers -> what it rests on."""
    cost = backend.costs.kind
    kinds = {
        "engine_step": "assumed" if cost == "linear" else cost,
        "trainer": OF_TRAINER[backend.scenario.training.cost.type],
        "links": backend.paths.kind,
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
    backend = SimulatedBackend(scenario, base_dir, (), faults)
    recording = Recording(scenario, backend.core.layout, folder, "simulated", versions(), backend.store.planned)
    backend.use(recording.observers)
    problem = ""
    try:
        backend.run(progress)
    except StuckError as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    finally:
        recording.close()
    reason = backend.finish_reason or ("interrupted" if problem == "interrupted" else "stuck")
    problem = problem or BROKEN_OFF.get(reason, "")
    summary = recording.finish(
        name=name,
        workload_hash=backend.workload.fingerprint,
        backend_events=backend.clock.events,
        finish_reason=reason,
        kinds=kinds_of(backend),
        marks=dict(backend.costs.outside_share),
    )
    return Simulated(summary, folder, time.process_time() - started, reason, problem)
