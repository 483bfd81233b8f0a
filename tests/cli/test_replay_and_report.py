"""`testbed replay` and `testbed report` on run folders: whole, cut, tampered with, incomplete."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, Lines, lines_of, read_json, rewrite


@pytest.fixture
def done(cli: Cli, tmp_path: Path) -> Path:
    """A finished run."""
    assert cli("run", "small.yaml", "--out", "r", "--no-report").code == 0
    return tmp_path / "r"


def first(lines: Lines, kind: str, after: int = 1) -> tuple[int, dict[str, Any]]:
    """(index of the line, action) of the first action of this kind."""
    return next(
        (i, a) for i, line in enumerate(lines) if i >= after for a in line.get("actions", ()) if a["type"] == kind
    )


# --- replay -----------------------------------------------------------------------------------------------------------


def test_replay_repeats_every_action(cli: Cli, done: Path, tmp_path: Path) -> None:
    said = cli("replay", "r", "--json", "f.json")
    records = lines_of(done / "journal.jsonl.zst")[1:]
    actions = sum(len(r["actions"]) for r in records)
    assert (said.code, said.err) == (0, "")
    assert said.out == f"r: {len(records):,} events, {actions:,} actions, all equal\n"
    assert read_json(tmp_path / "f.json") == [
        {
            "run": "r",
            "events": len(records),
            "actions": actions,
            "equal": True,
            "truncated": "",
            "difference": None,
        }
    ]


def test_replay_of_a_folder_of_runs_and_of_a_journal(cli: Cli, tmp_path: Path) -> None:
    cli("compare", "study.yaml", "--out", "c")
    said = cli("replay", "c")
    assert said.code == 0
    assert [line.split(":")[0] for line in said.out.splitlines()] == [
        f"c/{v}/seed-{s}" for v in ("fast-5-ms", "slow-20-ms") for s in (1, 2)
    ]
    shutil.copy(tmp_path / "c/fast-5-ms/seed-1/journal.jsonl.zst", tmp_path / "elsewhere.zst")
    assert cli("replay", "elsewhere.zst").out.startswith("elsewhere.zst: ")


def test_replay_shows_a_changed_action(cli: Cli, done: Path, tmp_path: Path) -> None:
    """Another engine is written into the journal than the core chose: exit code 1, line, recorded and replayed."""
    where: list[int] = []

    def change(lines: Lines) -> None:
        index, action = first(lines, "StartTurn", after=5)
        action["engine"] = 1 - action["engine"]
        where.append(index + 1)

    rewrite(done / "journal.jsonl.zst", change)
    said = cli("replay", "r", "--json", "f.json")
    assert said.code == 1
    assert said.err.startswith(f"r: the core answers differently\nline {where[0]}: event ")
    recorded, replayed = (re.search(rf'{word}: .*"engine":(\d)', said.err) for word in ("recorded", "replayed"))
    assert recorded is not None and replayed is not None and {recorded[1], replayed[1]} == {"0", "1"}
    figures = read_json(tmp_path / "f.json")
    assert [f["equal"] for f in figures] == [False] and figures[0]["difference"] in said.err


def test_replay_shows_a_missing_event(cli: Cli, done: Path) -> None:
    rewrite(done / "journal.jsonl.zst", lambda lines: lines.pop(len(lines) // 2))
    said = cli("replay", "r")
    assert said.code == 1 and "the core answers differently" in said.err


def test_replay_under_another_scenario_differs(cli: Cli, done: Path) -> None:
    """One policy is changed in the header: the first decision of that policy differs in its reason."""
    rewrite(
        done / "journal.jsonl.zst",
        lambda lines: lines[0]["scenario"]["rollout"].update(routing={"type": "round_robin"}),
    )
    said = cli("replay", "r")
    assert said.code == 1 and '"why":"round_robin"' in said.err


def test_replay_of_an_event_that_names_nothing(cli: Cli, done: Path) -> None:
    def change(lines: Lines) -> None:
        next(x for x in lines[1:] if x["event"]["type"] == "TurnFinished")["event"]["engine"] = 99

    rewrite(done / "journal.jsonl.zst", change)
    said = cli("replay", "r")
    assert said.code == 1 and "Traceback" not in said.err and said.out == ""


def test_a_cut_journal_is_replayed_up_to_the_cut(cli: Cli, tmp_path: Path) -> None:
    cli("run", "small.yaml", "--out", "long", "--no-report", "--set", "run.num_rollout=80")
    journal = tmp_path / "long" / "journal.jsonl.zst"
    whole = len(lines_of(journal))
    journal.write_bytes(journal.read_bytes()[: 2 * journal.stat().st_size // 3])
    said = cli("replay", "long")
    assert said.code == 0 and "all equal (long/journal.jsonl.zst: breaks off after line" in said.out
    assert 0 < int(said.out.split()[1].replace(",", "")) < whole


@pytest.mark.parametrize(
    ("level", "what"),
    [("sampled", "r/journal.jsonl.zst:1: a sampled journal"), ("off", "r: holds no journal.jsonl.zst")],
)
def test_what_is_not_in_the_journal_cannot_be_replayed(cli: Cli, level: str, what: str) -> None:
    cli("run", "small.yaml", "--out", "r", "--no-report", "--set", f"run.journal={level}")
    said = cli("replay", "r")
    assert said.code == 2 and what in said.err and "run.journal" in said.err


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda lines: lines[5].update(event={"type": "Nothing"}), ":6: not a record of a journal"),
        (lambda lines: lines[0].update(format="x/1"), ":1: format 'x/1'"),
        (lambda lines: lines[0]["scenario"]["cluster"].update(gpu="Q9"), ":1: the header's scenario cannot be used"),
        (lambda lines: lines[0].update(scenario=None), ":1: the header holds no scenario"),
    ],
)
def test_what_is_no_journal_is_said_with_its_line(
    cli: Cli, done: Path, change: Callable[[Lines], object], what: str
) -> None:
    rewrite(done / "journal.jsonl.zst", change)
    said = cli("replay", "r")
    assert said.code == 2 and f"r/journal.jsonl.zst{what}" in said.err and "Traceback" not in said.err


# --- report -----------------------------------------------------------------------------------------------------------


def test_report_of_one_run_is_the_report_that_run_wrote(cli: Cli, tmp_path: Path) -> None:
    ran = cli("run", "small.yaml", "--out", "r", "--json", "ran.json")
    tables = {p.name: p.read_bytes() for p in (tmp_path / "r/report").glob("*.csv")}
    shutil.rmtree(tmp_path / "r/report")
    said = cli("report", "r", "--json", "reported.json")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [line for line in ran.out.splitlines() if not line.startswith("run ")]
    assert {p.name: p.read_bytes() for p in (tmp_path / "r/report").glob("*.csv")} == tables
    ran_figures, figures = read_json(tmp_path / "ran.json"), read_json(tmp_path / "reported.json")
    assert figures == {k: v for k, v in ran_figures.items() if k not in ("cpu_s", "problem")}


def test_report_of_a_comparison_is_the_report_that_compare_wrote(cli: Cli, tmp_path: Path) -> None:
    compared = cli("compare", "study.yaml", "--out", "c", "--json", "compared.json")
    tables = {p.name: p.read_bytes() for p in (tmp_path / "c/report").glob("*.csv")}
    shutil.rmtree(tmp_path / "c/report")
    said = cli("report", "c", "--json", "reported.json")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [line for line in compared.out.splitlines() if not line.startswith("runs ")]
    assert {p.name: p.read_bytes() for p in (tmp_path / "c/report").glob("*.csv")} == tables
    assert read_json(tmp_path / "reported.json") == read_json(tmp_path / "compared.json")


def test_report_of_several_runs_compares_them(cli: Cli, tmp_path: Path) -> None:
    for name in ("small", "other"):
        cli("run", f"{name}.yaml", "--no-report")
    said = cli("report", "runs/small", "runs/other")
    assert said.code == 0 and "report   runs/report/index.html" in said.out
    assert [line.split()[:2] for line in said.out.splitlines()[2:4]] == [["A", "small"], ["B", "other"]]


def test_runs_of_one_name_and_seed_are_told_apart_by_their_folders(cli: Cli, tmp_path: Path) -> None:
    """The everyday what-if: the same scenario twice, with and without `--set`."""
    cli("run", "small.yaml", "--out", "before", "--no-report")
    cli("run", "small.yaml", "--out", "after", "--no-report", "--set", "simulation.engine_costs.base_s=0.02")
    said = cli("report", "before", "after")
    assert said.code == 0
    assert [line.split()[:2] for line in said.out.splitlines()[2:4]] == [["A", "before"], ["B", "after"]]


def test_runs_that_differ_in_their_seed_alone_are_one_variant(cli: Cli, tmp_path: Path) -> None:
    for seed in (1, 2):
        cli("run", "small.yaml", "--seed", seed, "--out", f"s{seed}", "--no-report")
    assert cli("report", "s1", "s2", "--json", "f.json").code == 0
    (variant,) = read_json(tmp_path / "f.json")["variants"]
    assert [run["seed"] for run in variant["runs"]] == [1, 2]


def test_runs_of_one_name_with_other_settings_are_not_taken_for_seeds_of_one_variant(cli: Cli, tmp_path: Path) -> None:
    cli("run", "small.yaml", "--seed", 1, "--out", "s1", "--no-report")
    cli("run", "small.yaml", "--seed", 2, "--out", "s2", "--no-report", "--set", "simulation.engine_costs.base_s=0.02")
    said = cli("report", "s1", "s2")
    assert said.code == 2 and "no seed is common to these variants (s1: 1; s2: 2)" in said.err


def test_a_comparison_with_runs_missing_reports_the_seeds_that_all_have(cli: Cli, tmp_path: Path) -> None:
    cli("compare", "study.yaml", "--out", "c")
    shutil.rmtree(tmp_path / "c/slow-20-ms/seed-2")
    said = cli("report", "c", "--json", "f.json")
    assert said.code == 0 and said.err == "note: seeds 2 are left out: not every variant has them\n"
    assert [[run["seed"] for run in v["runs"]] for v in read_json(tmp_path / "f.json")["variants"]] == [[1], [1]]


def test_without_summary_the_figures_are_made_from_the_journal(cli: Cli, done: Path, tmp_path: Path) -> None:
    cli("report", "r", "--json", "with.json")
    (done / "summary.json").unlink()
    (done / "metrics.parquet").unlink()
    said = cli("report", "r", "--json", "without.json")
    assert said.code == 0 and "r/summary.json is missing: the figures are made from the journal" in said.err
    with_, without = read_json(tmp_path / "with.json"), read_json(tmp_path / "without.json")
    unknown = {"backend_events", "workload_hash", "kinds", "outside_table_share"}  # no event says them
    assert {k: v for k, v in with_.items() if k not in unknown} == {
        k: v for k, v in without.items() if k not in unknown
    }


def test_without_scenario_the_report_is_made_all_the_same(cli: Cli, done: Path) -> None:
    (done / "scenario.yaml").unlink()
    said = cli("report", "r")
    assert said.code == 0 and "r/scenario.yaml is missing or cannot be read" in said.err


@pytest.mark.parametrize(
    ("text", "what"),
    [("{}", "not a run summary"), ("", "not a run summary"), ("\x00", "not a run summary")],
)
def test_a_broken_summary(cli: Cli, done: Path, text: str, what: str) -> None:
    (done / "summary.json").write_text(text)
    said = cli("report", "r")
    assert said.code == 2 and f"r/summary.json: {what}" in said.err


def test_a_broken_study_file(cli: Cli, tmp_path: Path) -> None:
    cli("compare", "study.yaml", "--out", "c", "--seeds", "1")
    (tmp_path / "c/study.json").write_text('{"study": "x"}')
    said = cli("report", "c")
    assert said.code == 2 and "c/study.json: not what `testbed compare` writes" in said.err


def test_report_draws_a_trace(cli: Cli, done: Path, tmp_path: Path) -> None:
    assert cli("report", "r", "--trace", "t.json").code == 0
    assert read_json(tmp_path / "t.json")["traceEvents"]


def test_report_does_not_write_into_a_foreign_folder(cli: Cli, done: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("mine")
    said = cli("report", "r", "--out", "mine")
    assert said.code == 2 and "holds something else" in said.err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["precious.txt"]
