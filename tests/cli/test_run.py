"""`testbed run`: the run folder it writes, the figures it prints, and what it does in a folder that was used before."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet
import pytest

from testbed.journal import read_journal
from testbed.scenario.load import load_scenario
from tests.cli.conftest import Cli, dump, read_json, tree_of
from tests.support.scenarios import tree

RUN_FOLDER = {"scenario.yaml", "journal.jsonl.zst", "metrics.parquet", "summary.json", "report"}
REPORT = {"report/index.html", "report/report.md", "report/table.csv", "report/gpu_time.csv"}


def test_run_writes_the_run_folder(cli: Cli, tmp_path: Path) -> None:
    said = cli("run", "small.yaml")
    assert (said.code, said.err) == (0, "")
    assert tree_of(tmp_path / "runs" / "small") == RUN_FOLDER | REPORT
    assert said.out.splitlines()[-2:] == ["report   runs/small/report/index.html", "run      runs/small"]


def test_the_scenario_in_the_folder_is_the_resolved_one(cli: Cli, tmp_path: Path) -> None:
    cli("run", "small.yaml", "--set", "run.num_rollout=4", "--seed", "7", "--no-report", "--out", "r")
    written = load_scenario(tmp_path / "r" / "scenario.yaml").scenario
    asked = load_scenario(tmp_path / "small.yaml", ["run.num_rollout=4", "run.seed=7"]).scenario
    assert written == asked
    header, records = read_journal(tmp_path / "r" / "journal.jsonl.zst")
    assert (header.seed, header.level) == (7, "full")
    trained = {a.batch for r in records for a in r.actions if type(a).__name__ == "Train"}
    assert len(trained) == 4


def test_json_holds_what_was_printed_and_what_the_folder_says(cli: Cli, tmp_path: Path) -> None:
    said = cli("run", "small.yaml", "--json", "deep/er/figures.json", "--out", "r")
    figures, summary = read_json(tmp_path / "deep/er/figures.json"), read_json(tmp_path / "r/summary.json")
    printed = dict(re.split(r"  +", line, maxsplit=1) for line in said.out.splitlines() if "  " in line[1:])
    assert printed["step time"] == f"{figures['step_time_s']:.1f} s (mean of 2 steps after 1 of warm-up)"
    assert printed["trained tokens"].startswith(f"{figures['trained_tokens_per_s_per_gpu']:.0f} per s and GPU")
    assert printed["cost"] == f"${figures['cost_usd_per_1000_steps']:,.0f} per 1,000 steps on 4 GPUs"
    assert f"{figures['core_events']:,} core events" in printed["ended"]
    assert printed["waste"] == f"{100 * figures['waste_share']:.1f} % of generated tokens"
    for ours, theirs in (
        ("step_time_s", "step_time_mean_s"),
        ("trained_tokens_per_s_per_gpu",) * 2,
        ("cost_usd_per_1000_steps",) * 2,
        ("wall_s", "wall_s"),
        ("core_events", "events"),
        ("seed",) * 2,
        ("scenario_hash",) * 2,
    ):
        assert figures[ours] == summary[theirs], ours
    assert (figures["folder"], figures["problem"], figures["finish_reason"]) == ("r", "", "completed")


def test_the_printed_step_time_is_the_mean_of_the_measured_rows(cli: Cli, tmp_path: Path) -> None:
    """One row per step in metrics.parquet; warm-up is left out of the mean."""
    cli("run", "small.yaml", "--json", "f.json", "--out", "r", "--set", "run.num_rollout=5")
    rows = pyarrow.parquet.read_table(tmp_path / "r/metrics.parquet").to_pylist()
    assert [row["measured"] for row in rows] == [False, True, True, True, True]
    mean = sum(row["end_t"] - row["start_t"] for row in rows[1:]) / 4
    assert read_json(tmp_path / "f.json")["step_time_s"] == pytest.approx(mean, rel=1e-9)


def test_closed_form_of_the_cost(cli: Cli, tmp_path: Path) -> None:
    """USD per 1,000 steps = step time in hours x 1,000 x GPUs x USD per GPU-hour."""
    price = "cluster.price_usd_per_gpu_hour=3.6"
    cli("run", "small.yaml", "--json", "f.json", "--set", price, "--no-report")
    figures = read_json(tmp_path / "f.json")
    assert figures["cost_usd_per_1000_steps"] == pytest.approx(figures["step_time_s"] / 3600 * 1000 * 4 * 3.6)


def test_equal_runs_have_equal_journals(cli: Cli, tmp_path: Path) -> None:
    cli("run", "small.yaml", "--out", "a")
    cli("run", "small.yaml", "--out", "b")
    cli("run", "small.yaml", "--out", "c", "--seed", "1")
    a, b, c = ((tmp_path / x / "journal.jsonl.zst").read_bytes() for x in "abc")
    assert a == b != c


def test_a_variant_of_a_study(cli: Cli, tmp_path: Path) -> None:
    said = cli("run", "study.yaml", "--variant", "slow, 20 ms")
    assert (said.code, said.err) == (0, "")
    written = load_scenario(tmp_path / "runs" / "speeds-slow-20-ms" / "scenario.yaml").scenario
    assert written.simulation.engine_costs.base_s == 0.02  # type: ignore[union-attr]


def test_a_study_without_variant_runs_its_baseline_and_says_so(cli: Cli, tmp_path: Path) -> None:
    said = cli("run", "study.yaml")
    assert said.code == 0
    assert said.err.startswith("note: study.yaml is a study: this runs its baseline, 'fast, 5 ms'")
    assert (tmp_path / "runs" / "speeds-fast-5-ms" / "summary.json").is_file()


def test_remarks_go_to_stderr(cli: Cli, tmp_path: Path) -> None:
    """A study may use fewer GPUs than it has: worth a word, no error."""
    said = cli("run", "small.yaml", "--set", "cluster.gpus_per_node=8")
    assert said.code == 0
    assert said.err.startswith("note: ") and "note" not in said.out


def test_journal_levels(cli: Cli, tmp_path: Path) -> None:
    cli("run", "small.yaml", "--out", "full")
    cli("run", "small.yaml", "--out", "sampled", "--set", "run.journal=sampled", "--set", "run.journal_sample=0.5")
    cli("run", "small.yaml", "--out", "off", "--set", "run.journal=off")
    full, sampled = (len(list(read_journal(tmp_path / x / "journal.jsonl.zst")[1])) for x in ("full", "sampled"))
    assert 0 < sampled < full
    assert tree_of(tmp_path / "off") == (RUN_FOLDER - {"journal.jsonl.zst"}) | REPORT


def test_trace(cli: Cli, tmp_path: Path) -> None:
    said = cli("run", "small.yaml", "--trace", "deep/trace.json")
    assert (said.code, said.err) == (0, "")
    assert "trace    deep/trace.json" in said.out.splitlines()
    assert read_json(tmp_path / "deep/trace.json")["traceEvents"]


def test_a_folder_of_an_earlier_run_keeps_nothing_of_it(cli: Cli, tmp_path: Path) -> None:
    cli("run", "small.yaml", "--out", "r")
    (tmp_path / "r" / "notes.txt").write_text("mine")
    said = cli("run", "small.yaml", "--out", "r", "--no-report", "--set", "run.journal=off")
    assert said.code == 0
    assert tree_of(tmp_path / "r") == {"scenario.yaml", "metrics.parquet", "summary.json", "notes.txt"}


def test_a_stuck_run_is_exit_code_1_with_its_folder(cli: Cli, tmp_path: Path) -> None:
    """Rewards take 1 s; a watchdog of half a second sees nothing finish. What was not measured is said, and is null."""
    said = cli("run", "small.yaml", "--set", "simulation.watchdog_s=0.5", "--out", "r", "--json", "f.json")
    assert said.code == 1
    assert said.err.startswith("testbed: small: nothing finished between 0 s and ")
    assert "Traceback" not in said.err
    assert "step time  not measured: no step after the warm-up" in said.out
    assert tree_of(tmp_path / "r") == RUN_FOLDER - {"report"}
    figures = read_json(tmp_path / "f.json")
    assert figures["problem"] in said.err and figures["step_time_s"] is None


def test_unnamed_scenarios_are_called_by_their_file(cli: Cli, tmp_path: Path) -> None:
    unnamed = tree(run__num_rollout=1)
    del unnamed["name"]
    dump(tmp_path / "my case.yaml", unnamed)
    assert cli("run", "my case.yaml", "--no-report").code == 0
    assert (tmp_path / "runs" / "my-case" / "summary.json").is_file()
