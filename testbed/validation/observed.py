"""What is read of one run for a comparison: its figures, and every turn's timeline, in one pass over its journal.

It refuses to know which run is real and which is simulated.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from testbed.core.events import TaskArrived
from testbed.journal import JournalError, read_journal, require_complete
from testbed.metrics.run import RunMetrics
from testbed.metrics.summary import RunSummary
from testbed.metrics.turns import Turn, Turns
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of


class Observed(Struct):
    """One run."""

    summary: RunSummary
    turns: list[Turn]
    """All of the run, in the order of their ends."""
    tasks: list[int]
    """Ids of the tasks in the order in which they arrived."""
    truncated: str
    """Where its journal breaks off, and why; empty if it is whole."""

    @property
    def window(self) -> tuple[float, float]:
        """Start and end of the measured steps, seconds."""
        steps = self.summary.steps[self.summary.warmup_steps :]
        return steps[0].start_t, steps[-1].end_t

    @property
    def measured(self) -> list[Turn]:
        """Turns that ended in the measured steps."""
        start, end = self.window
        return [t for t in self.turns if start < t.finished_t <= end]


def observe(journal: Path, scenario: Scenario) -> Observed:
    """Fold a journal. Raises `JournalError` if it cannot be read, is sampled, or no step after the warm-up ended."""
    header, records = read_journal(journal)
    require_complete(journal, header, "compared turn by turn")
    metrics, turns, tasks = RunMetrics(scenario, layout_of(scenario)), Turns(), dict[int, None]()
    for record in records:
        metrics.observe(record.event, record.actions)
        turns.observe(record.event, record.actions)
        if isinstance(record.event, TaskArrived):
            tasks.setdefault(record.event.task)
    summary = metrics.summary(name=scenario.name, backend=header.backend, seed=header.seed)
    if not summary.measured_steps:
        steps, warmup = len(summary.steps), scenario.run.warmup_steps
        what = f"{steps} batches were trained and {warmup} are warm-up (run.warmup_steps): there is nothing to compare"
        raise JournalError(journal, 0, what)
    return Observed(summary, turns.turns, list(tasks), records.truncated or "")
