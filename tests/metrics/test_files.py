"""Figures from a journal are those of the run; figures written are those read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow.parquet
import pytest

from testbed.journal import JournalError, JournalHeader, JournalWriter
from testbed.metrics.files import read_summary, summary_from_journal, write_metrics
from testbed.metrics.summary import CAUSES
from testbed.scenario import Scenario
from tests.metrics.builders import fold, sync_step
from tests.support.scenarios import scenario

RECORDS = [r for i in range(4) for r in sync_step(71.0 * i, i)]
HASHES = {"scenario_hash": "abc", "seed": 3, "backend": "simulated"}


@pytest.fixture
def small() -> Scenario:
    return scenario(run__warmup_steps=1, run__num_rollout=10)


def journal(path: Path, level: str, header: JournalHeader) -> Path:
    with JournalWriter(path, level, 0.5, header) as writer:  # type: ignore[arg-type]
        for event, actions in RECORDS:
            writer.write(event, actions)
    return path


def test_a_journal_folds_into_the_figures_of_its_run(tmp_path: Path, small: Scenario) -> None:
    path = journal(tmp_path / "journal.jsonl.zst", "full", JournalHeader(**HASHES))
    assert summary_from_journal(path, small) == fold(small, RECORDS).summary(**HASHES)


def test_a_journal_may_bring_its_scenario(tmp_path: Path, small: Scenario) -> None:
    header = JournalHeader(**HASHES, scenario=small.model_dump(mode="json"))
    path = journal(tmp_path / "journal.jsonl.zst", "full", header)
    assert summary_from_journal(path, name="x") == fold(small, RECORDS).summary(**HASHES, name="x")
    with pytest.raises(JournalError, match="hand one in"):
        summary_from_journal(journal(path, "full", JournalHeader(**HASHES)))


def test_a_journal_that_breaks_off_is_folded_up_to_there_and_says_so(tmp_path: Path, small: Scenario) -> None:
    path = journal(tmp_path / "journal.jsonl.zst", "full", JournalHeader(**HASHES))
    path.write_bytes(path.read_bytes()[:-3])
    assert "breaks off" in summary_from_journal(path, small).finish_reason


def test_a_sampled_journal_is_refused(tmp_path: Path, small: Scenario) -> None:
    path = journal(tmp_path / "journal.jsonl.zst", "sampled", JournalHeader(**HASHES))
    with pytest.raises(JournalError, match="cannot be folded into figures"):
        summary_from_journal(path, small)


def test_metrics_are_written_as_a_table_of_steps_and_a_summary(tmp_path: Path, small: Scenario) -> None:
    summary = fold(small, RECORDS).summary()
    beside = write_metrics(tmp_path / "metrics.parquet", summary)
    assert beside == tmp_path / "summary.json"
    assert read_summary(beside) == summary
    assert msgspec.json.decode(beside.read_bytes())["measured_steps"] == 3
    table = pyarrow.parquet.read_table(tmp_path / "metrics.parquet").to_pylist()
    assert [row["measured"] for row in table] == [False, True, True, True]
    assert [row["end_t"] for row in table] == [60, 131, 202, 273]
    for row in table:
        causes = sum(row[f"gpu_seconds.{c}"] for c in CAUSES)
        assert causes == pytest.approx(4 * (row["end_t"] - row["start_t"]))


def test_a_file_that_is_no_summary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="not a run summary"):
        read_summary(tmp_path / "nothing.json")
