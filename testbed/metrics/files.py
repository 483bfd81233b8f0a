"""Figures from and to files: fold a journal, write and read a summary. It refuses to know how a figure comes about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from testbed.journal import JournalError, read_journal, require_complete
from testbed.metrics.ratios import FARTHEST, Counts
from testbed.metrics.run import RunMetrics
from testbed.metrics.summary import CAUSES, RunSummary, StepRecord
from testbed.run_files import SUMMARY
from testbed.scenario.layout import layout_of
from testbed.scenario.scenario import Scenario


def summary_from_journal(path: Path | str, scenario: Scenario | None = None, **meta: Any) -> RunSummary:
    """Fold a journal file. Without `scenario` the one in the journal's header is taken; `meta`: fields of `RunMeta`.

    Raises `JournalError` if the journal is sampled, broken, or has no scenario. A journal that breaks off is folded up
    to there, and `finish_reason` says so.
    """
    header, records = read_journal(path)
    require_complete(path, header, "folded into figures")
    if scenario is None:
        if header.scenario is None:
            raise JournalError(path, 1, "the header holds no scenario: hand one in")
        scenario = Scenario.model_validate(header.scenario)
    metrics = RunMetrics(scenario, layout_of(scenario))
    for record in records:
        metrics.observe(record.event, record.actions)
    known: dict[str, Any] = {"backend": header.backend, "seed": header.seed, "scenario_hash": header.scenario_hash}
    if records.truncated:
        known["finish_reason"] = records.truncated
    return metrics.summary(**{**known, **meta})


def write_metrics(path: Path | str, summary: RunSummary) -> Path:
    """Write one row per step to `path` (Parquet), and all figures beside it to `summary.json`, whose path is returned.

    Columns: the fields of `StepRecord`, GPU time as `gpu_seconds.<cause>`, what updates did as `learning.<name>` and
    `ratios.<name>` (tokens in each bin of `testbed.metrics.ratios`, from the lowest), empty where a batch has no such
    figure, and `measured` (false: warm-up).
    """
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    path = Path(path)
    steps = summary.steps
    plain = [f for f in StepRecord.__struct_fields__ if f not in ("gpu_seconds", "learning", "ratios")]
    columns: dict[str, list[Any]] = {name: [getattr(s, name) for s in steps] for name in plain}
    columns["measured"] = [i >= summary.warmup_steps for i in range(len(steps))]
    for cause in CAUSES:
        columns[f"gpu_seconds.{cause}"] = [s.gpu_seconds[cause] for s in steps]
    for name in dict.fromkeys(name for s in steps for name in s.learning):
        columns[f"learning.{name}"] = [s.learning.get(name) for s in steps]
    for name in dict.fromkeys(name for s in steps for name in s.ratios):
        columns[f"ratios.{name}"] = [_dense(s.ratios.get(name)) for s in steps]
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    beside = path.with_name(SUMMARY)
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
    return beside


def _dense(counts: Counts | None) -> list[int] | None:
    return None if counts is None else [counts.get(k, 0) for k in range(-FARTHEST, FARTHEST + 1)]


def read_summary(path: Path | str) -> RunSummary:
    """A summary that `write_metrics` wrote. Raises `JournalError` if it is not one."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=RunSummary)
    except (OSError, msgspec.MsgspecError) as e:
        raise JournalError(path, 0, f"not a run summary ({e})") from None
