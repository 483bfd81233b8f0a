"""How a run is written down, whichever backend makes it: scenario, journal, metrics, and what produced the figures.

It refuses to know backends; they hand it their events as observers do."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from testbed.journal import JournalHeader, JournalWriter
from testbed.metrics import RunMetrics, write_metrics
from testbed.metrics.bias import PlanOf
from testbed.metrics.summary import RunSummary
from testbed.run_files import JOURNAL, METRICS, SCENARIO
from testbed.scenario import Scenario
from testbed.scenario.layout import Layout
from testbed.scenario.load import dump_scenario, scenario_hash

BROKEN_OFF = {
    "too_many_dropped": "more than `experience.staleness.max_dropped_share` of what was generated is too old",
    "no_engine_left": "no engine is left",
}
"""Reasons of the core to end a run before its last batch, in words."""


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Python and these packages; `not installed` where one is not."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class Recording:
    """One run's metrics and, with a `folder`, its `scenario.yaml` and `journal.jsonl.zst` (none with `journal: off`).

    Hand `observers` to the backend, then `close`, then `finish`. `plan_of`: what trajectories would do, where that is
    known.
    """

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        folder: Path | None,
        backend: str,
        versions: dict[str, str],
        plan_of: PlanOf | None = None,
    ) -> None:
        self._scenario = scenario
        self._folder = folder
        self._backend = backend
        self._digest = scenario_hash(scenario)
        self._metrics = RunMetrics(scenario, layout, plan_of)
        self.observers: list[Callable[..., None]] = [self._metrics.observe]
        self._writer: JournalWriter | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCENARIO).write_text(dump_scenario(scenario), encoding="utf-8")
        journal = folder / JOURNAL
        if scenario.run.journal == "off":
            journal.unlink(missing_ok=True)  # of an earlier run
            return
        header = JournalHeader(
            scenario_hash=self._digest,
            seed=scenario.run.seed,
            backend=backend,
            versions=versions,
            scenario=scenario.model_dump(mode="json"),
        )
        self._writer = JournalWriter(journal, scenario.run.journal, scenario.run.journal_sample, header)
        self.observers.append(self._writer.write)

    def close(self) -> None:
        """No event comes any more, whatever ended the run."""
        if self._writer is not None:
            self._writer.close()

    def finish(self, *, name: str, **facts: Any) -> RunSummary:
        """The figures; `facts` as `RunMetrics.summary` takes them. Written to `metrics.parquet` and `summary.json`."""
        summary = self._metrics.summary(
            name=name or self._scenario.name,
            backend=self._backend,
            seed=self._scenario.run.seed,
            scenario_hash=self._digest,
            **facts,
        )
        if self._folder is not None:
            write_metrics(self._folder / METRICS, summary)
        return summary
