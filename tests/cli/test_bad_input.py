"""Bad input: one message that says what, where and the nearest valid thing; exit code 2; nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli, tree_of

SEED_TWICE = "--seeds 1,2,1: a seed is given twice, the repeats would be equal (nearest: --seeds 1,2)"
BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # a wrong command line
    "command": (("runn", "small.yaml"), ("No such command 'runn'", "'run'", "testbed --help")),
    "option": (("run", "--sede", "3", "small.yaml"), ("No such option: --sede", "--seed", "testbed run --help")),
    "no file": (("run",), ("Missing argument", "testbed run --help")),
    "too many": (("run", "small.yaml", "other.yaml"), ("unexpected extra argument", "other.yaml")),
    "seed": (("run", "small.yaml", "--seed", "x"), ("'--seed'", "integer")),
    "seed < 0": (("run", "small.yaml", "--seed", "-1"), ("'--seed'", "greater than or equal to 0")),
    "jobs": (("compare", "study.yaml", "--jobs", "0"), ("'--jobs'", "greater than or equal to 1")),
    # files
    "missing": (("run", "smal.yaml"), ("smal.yaml: no such file (nearest: small.yaml)",)),
    "folder": (("run", "folder"), ("folder: this is a folder, not a file",)),
    "empty": (("run", "empty.yaml"), ("empty.yaml:1: the file is empty",)),
    "binary": (("run", "binary.yaml"), ("binary.yaml:1: not UTF-8 text",)),
    "broken": (("run", "broken.yaml"), ("broken.yaml:2: broken YAML",)),
    "compare missing": (("compare", "stdy.yaml"), ("stdy.yaml: no such file (nearest: study.yaml)",)),
    "compare folder": (("compare", "folder"), ("folder: this is a folder, not a file",)),
    # --set
    "set": (("run", "small.yaml", "--set", "seed"), ("--set seed: expected KEY=VALUE", "nearest: run.seed=1")),
    "set key": (("run", "small.yaml", "--set", "run.sed=1"), ("run.sed: unknown key (nearest: run.seed)",)),
    "set value": (("run", "small.yaml", "--set", "run.seed=x"), ("run.seed: expected a whole number", "`x`")),
    # scenario or study
    "variant of none": (("run", "small.yaml", "--variant", "a"), ("--variant a: small.yaml is a scenario",)),
    "variant": (
        ("run", "study.yaml", "--variant", "slow"),
        ("--variant slow: no such variant (nearest: 'slow, 20 ms')", "'fast, 5 ms'"),
    ),
    "only": (("compare", "study.yaml", "--only", "fsat, 5 ms"), ("--only fsat, 5 ms: no such variant", "'fast, 5 ms'")),
    "one scenario": (("compare", "small.yaml"), ("small.yaml: one scenario", "nearest: testbed run small.yaml")),
    "twice": (("compare", "small.yaml", "small.yaml"), ("the same name: small, small (nearest: give each",)),
    "study as scenario": (("compare", "small.yaml", "study.yaml"), ("study.yaml:1: study: this is a study",)),
    # seeds
    "seeds": (("compare", "study.yaml", "--seeds", "a..b"), ("--seeds a..b: not seeds (nearest: --seeds 1..5",)),
    "seeds none": (("compare", "study.yaml", "--seeds", "5..1"), ("--seeds 5..1", "at least one")),
    "seeds < 0": (("compare", "study.yaml", "--seeds=-2..1"), ("--seeds -2..1", ">= 0")),
    "seeds twice": (("compare", "study.yaml", "--seeds", "1,2,1"), (SEED_TWICE,)),
    "seeds many": (("compare", "study.yaml", "--seeds", "0..1000000000000"), ("more than 1000", "--seeds 0..999")),
    # where to write
    "out file": (("run", "small.yaml", "--out", "note.txt"), ("--out note.txt: this is a file", "--out note.txt-2")),
    "out below": (("run", "small.yaml", "--out", "note.txt/x"), ("--out note.txt/x", "note.txt is a file")),
    "out other": (("run", "small.yaml", "--out", "folder"), ("holds something else (nearest: --out folder-2)",)),
    "compare out": (("compare", "study.yaml", "--out", "folder"), ("holds something else (nearest: --out folder-2)",)),
    "json folder": (("run", "small.yaml", "--json", "folder"), ("--json folder: this is a folder",)),
    "json below": (("run", "small.yaml", "--json", "note.txt/f"), ("--json note.txt/f", "note.txt is a file")),
    "json compare": (("compare", "study.yaml", "--json", "folder"), ("--json folder: this is a folder",)),
    "json doctor": (("doctor", "--json", "folder"), ("--json folder: this is a folder",)),
    "trace folder": (("run", "small.yaml", "--trace", "folder"), ("--trace folder: this is a folder",)),
    "trace sampled": (
        ("run", "small.yaml", "--trace", "t", "--set", "run.journal=sampled"),
        ("--trace t: needs the whole journal (nearest: --set run.journal=full)",),
    ),
    # runs
    "replay missing": (("replay", "foldr"), ("foldr: no such run folder (nearest: folder)",)),
    "replay none": (("replay", "folder"), ("folder: holds no journal.jsonl.zst", "run.journal: off")),
    "replay file": (("replay", "note.txt"), ("note.txt:1: not readable as zstd",)),
    "replay empty": (("replay", "empty.yaml"), ("empty.yaml:1: not a journal",)),
    "report missing": (("report", "foldr"), ("foldr: no such run folder (nearest: folder)",)),
    "report none": (("report", "folder"), ("folder: holds no summary.json", "testbed run")),
    "report file": (("report", "note.txt"), ("note.txt: this is a file, not a run folder",)),
    "schema": (("schema", "scenarios"), ("schema scenarios: no such schema (nearest: scenario, study, stages)",)),
}


@pytest.fixture
def around(tmp_path: Path, cli: Cli) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious.txt").write_text("mine")
    (tmp_path / "note.txt").write_text("a note that is no journal")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"\x00\xff\xfe")
    (tmp_path / "broken.yaml").write_text("name: x\ncluster: {gpu: H100\n")
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_one_message_exit_code_2_and_nothing_written(case: str, cli: Cli, around: Path) -> None:
    args, pieces = BAD[case]
    before = tree_of(around)
    said = cli(*args)
    assert said.code == 2
    assert said.err.startswith("testbed: ") and said.out == ""
    assert "Traceback" not in said.err
    for piece in pieces:
        assert piece in said.err
    assert tree_of(around) == before


def test_what_only_the_backend_can_refuse_leaves_nothing_either(cli: Cli, tmp_path: Path) -> None:
    """No table has this model on this GPU: the simulator says so before the first run of the comparison."""
    before = tree_of(tmp_path)
    for command in ("run", "compare"):
        said = cli(
            command, "study.yaml", "--set", "cluster.gpu=A100", "--set", "simulation.engine_costs={type: measured}"
        )
        assert said.code == 2 and "A100" in said.err and "nearest" in said.err
        assert "Traceback" not in said.err
    assert tree_of(tmp_path) == before


def test_scenarios_that_are_no_fair_comparison_are_refused_before_they_run(cli: Cli, tmp_path: Path) -> None:
    text = (tmp_path / "other.yaml").read_text()
    (tmp_path / "fewer.yaml").write_text(text.replace("rollout_num_gpus: 2", "rollout_num_gpus: 1"))
    (tmp_path / "longer.yaml").write_text(text.replace("high: 80", "high: 90"))
    before = tree_of(tmp_path)
    for file, what in (("fewer", "GPUs: 'small' has 4, 'other' has 3"), ("longer", "different workloads: 'small' has")):
        said = cli("compare", "small.yaml", f"{file}.yaml")
        assert said.code == 2 and what in said.err and "allow_unequal" in said.err
    assert tree_of(tmp_path) == before


def test_more_variants_than_a_report_shows_are_refused_before_they_run(cli: Cli, tmp_path: Path) -> None:
    values = ", ".join(f"{0.001 * n:.3f}" for n in range(1, 14))
    (tmp_path / "grid.yaml").write_text(
        f"study: grid\nbase: small.yaml\ngrid: {{simulation.engine_costs.base_s: [{values}]}}\n"
    )
    said = cli("compare", "grid.yaml")
    assert said.code == 2 and "13 variants are more than a report shows, 12 (nearest: --only " in said.err
    assert not (tmp_path / "runs").exists()
