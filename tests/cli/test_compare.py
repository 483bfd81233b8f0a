"""`testbed compare`: every variant with every seed, one report, one table, the same figures as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from tests.cli.conftest import Cli, read_json, tree_of

RUN = {"scenario.yaml", "journal.jsonl.zst", "metrics.parquet", "summary.json"}
REPORT = {"index.html", "report.md", "table.csv", "gpu_time.csv"}
FOLDERS = ("fast-5-ms", "slow-20-ms")


def expected(seeds: tuple[int, ...] = (1, 2), folders: tuple[str, ...] = FOLDERS) -> set[str]:
    runs = {f"{v}/seed-{s}" for v in folders for s in seeds}
    files = {f"{run}/{file}" for run in runs for file in RUN} | {f"report/{file}" for file in REPORT}
    return runs | files | set(folders) | {"report", "study.json"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_compare_writes_runs_and_report(cli: Cli, tmp_path: Path, jobs: int) -> None:
    said = cli("compare", "study.yaml", "--jobs", jobs)
    assert said.code == 0
    assert tree_of(tmp_path / "runs" / "speeds") == expected()
    assert "report   runs/speeds/report/index.html" in said.out.splitlines()
    progress = sorted(line.split("] ")[0] for line in said.err.splitlines())
    assert progress == ["[1/4", "[2/4", "[3/4", "[4/4"]
    about = read_json(tmp_path / "runs/speeds/study.json")
    assert (about["seeds"], about["baseline"]) == ([1, 2], "fast, 5 ms")
    assert about["variants"][1]["changes"] == {"simulation.engine_costs.base_s": 0.02}


def test_workers_give_what_one_process_gives(cli: Cli, tmp_path: Path) -> None:
    for jobs in (1, 2):
        cli("compare", "study.yaml", "--jobs", jobs, "--out", f"j{jobs}", "--json", f"j{jobs}.json")
    assert read_json(tmp_path / "j1.json") == read_json(tmp_path / "j2.json")
    for run in (f"{v}/seed-{s}/journal.jsonl.zst" for v in FOLDERS for s in (1, 2)):
        assert (tmp_path / "j1" / run).read_bytes() == (tmp_path / "j2" / run).read_bytes()


def test_json_holds_the_printed_table_and_the_summaries(cli: Cli, tmp_path: Path) -> None:
    said = cli("compare", "study.yaml", "--json", "f.json", "--seeds", "1..3")
    figures = read_json(tmp_path / "f.json")
    rows = [re.split(r"  +", line) for line in said.out.splitlines() if re.match(r"[AB]  ", line)]
    assert [row[:2] for row in rows] == [["A", "fast, 5 ms"], ["B", "slow, 20 ms"]]
    for row, variant, folder in zip(rows, figures["variants"], FOLDERS, strict=True):
        runs = [read_json(tmp_path / "runs/speeds" / folder / f"seed-{s}/summary.json") for s in (1, 2, 3)]
        steps = [run["step_time_mean_s"] for run in runs]
        assert variant["step_time_s"] == pytest.approx(mean(steps))
        assert variant["step_time_std_s"] == pytest.approx(stdev(steps))
        assert variant["cost_usd_per_1000_steps"] == pytest.approx(mean(r["cost_usd_per_1000_steps"] for r in runs))
        assert [run["seed"] for run in variant["runs"]] == [1, 2, 3]
        assert row[2:] == [
            f"{variant['step_time_s']:.1f} s",
            f"{variant['step_time_std_s']:.1f}",
            f"{variant['trained_tokens_per_s_per_gpu']:.0f}",
            f"{variant['cost_usd_per_1000_steps']:,.0f}",
            f"{variant['staleness_mean_at_dequeue']:.2f}/{variant['staleness_max_at_dequeue']:.0f}",
            f"{100 * variant['waste_share']:.1f} %",
            f"{100 * variant['idle_share']:.1f} %",
        ]


def test_slower_engines_take_longer(cli: Cli, tmp_path: Path) -> None:
    """A decode step costs 15 ms more; the longest reply of a batch has at most 80 tokens."""
    cli("compare", "study.yaml", "--json", "f.json")
    fast, slow = (v["step_time_s"] for v in read_json(tmp_path / "f.json")["variants"])
    assert 20 * 0.015 < slow - fast <= 80 * 0.015 + 0.1


def test_only_and_seeds(cli: Cli, tmp_path: Path) -> None:
    said = cli("compare", "study.yaml", "--only", "slow, 20 ms", "--seeds", "4")
    assert said.code == 0
    assert "the baseline 'fast, 5 ms' is left out" in said.err
    assert tree_of(tmp_path / "runs" / "speeds") == expected((4,), ("slow-20-ms",))


def test_the_same_folder_again_holds_the_new_comparison_alone(cli: Cli, tmp_path: Path) -> None:
    cli("compare", "study.yaml", "--out", "c", "--seeds", "1..3")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    assert cli("compare", "study.yaml", "--out", "c", "--seeds", "2", "--only", "fast, 5 ms").code == 0
    assert tree_of(tmp_path / "c") == expected((2,), ("fast-5-ms",)) | {"notes.txt"}


def test_scenario_files_are_variants(cli: Cli, tmp_path: Path) -> None:
    said = cli("compare", "small.yaml", "other.yaml")
    assert said.code == 0
    assert tree_of(tmp_path / "runs" / "small-against-other") == expected((0,), ("small", "other"))


def test_one_scenario_with_several_seeds_shows_its_spread(cli: Cli, tmp_path: Path) -> None:
    said = cli("compare", "small.yaml", "--seeds", "1,2")
    assert said.code == 0
    assert tree_of(tmp_path / "runs" / "small") == expected((1, 2), ("small",))


def test_overrides_hold_for_every_variant(cli: Cli, tmp_path: Path) -> None:
    cli("compare", "study.yaml", "--set", "run.num_rollout=2", "--json", "f.json")
    for variant in read_json(tmp_path / "f.json")["variants"]:
        assert [run["measured_steps"] for run in variant["runs"]] == [1, 1]


def test_names_that_make_the_same_folder_name_do_not_share_a_folder(cli: Cli, tmp_path: Path) -> None:
    """`report` is where the report goes, and on some disks `Report` is the same."""
    text = (tmp_path / "study.yaml").read_text()
    (tmp_path / "study.yaml").write_text(text.replace("slow, 20 ms", "Report").replace("fast, 5 ms", "report"))
    assert cli("compare", "study.yaml", "--seeds", "1").code == 0
    assert tree_of(tmp_path / "runs" / "speeds") == expected((1,), ("report-2", "Report-3"))


def test_a_run_that_gets_stuck_is_named_and_there_is_no_report(cli: Cli, tmp_path: Path) -> None:
    said = cli("compare", "study.yaml", "--set", "simulation.watchdog_s=0.5", "--seeds", "1")
    assert said.code == 1
    assert "fast, 5 ms, runs/speeds/fast-5-ms/seed-1: nothing finished between" in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "runs/speeds/report").exists()
