"""`testbed presets`: a list, one preset with its sources, and what is said to a name that is none."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Cli, read_json

PRESETS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "scenarios" / "presets").glob("*.yaml"))


def test_rp_03_the_list_is_a_map_in_the_order_of_the_alphabet(cli: Cli, tmp_path: Path) -> None:
    said = cli("presets", "--json", "f.json")
    assert said.code == 0 and said.err == ""
    heads = [line.split(":")[0] for line in said.out.splitlines() if not line.startswith(" ")]
    assert heads == PRESETS
    for part in ("generation", "training", "data", "weight sync"):
        assert said.out.count(f"\n  {part}: ") == len(PRESETS)
    assert [one["name"] for one in read_json(tmp_path / "f.json")] == PRESETS


def test_rp_04_one_preset_is_shown_with_the_source_of_each_key(cli: Cli) -> None:
    said = cli("presets", "verl_fully_async")
    assert said.code == 0
    assert "verl-project/verl at 1dda039b9 (2026-08-22)" in said.out
    assert "rollout.admission.max_head_offpolicyness = 0.1: async_training.staleness_threshold (0.1)" in said.out
    assert "left out:" in said.out


def test_an_unknown_preset_gets_the_nearest_name(cli: Cli) -> None:
    said = cli("presets", "nemo")
    assert said.code == 2 and said.err == "testbed: preset nemo: no such preset (nearest: nemo_rl)\n"
    assert cli("presets", "zzz").err == f"testbed: preset zzz: no such preset (nearest: {', '.join(PRESETS)})\n"


def test_doctor_and_help_say_that_there_are_presets(cli: Cli) -> None:
    assert f"framework presets: {', '.join(PRESETS)}" in cli("doctor").out
    assert "testbed presets" in cli("--help").out


def test_rp_03_the_report_of_runs_of_two_frameworks_ranks_none(cli: Cli, tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2] / "scenarios" / "presets"
    for name in ("miles", "nemo_rl"):
        short = ("--set", "run.num_rollout=3", "--set", "algorithm.rollout_batch_size=8")
        assert cli("run", folder / f"{name}.yaml", *short, "--out", name, "--no-report").code == 0
    assert cli("report", "miles", "nemo_rl", "--out", "both").code == 0
    assert 'class="best"' not in (tmp_path / "both" / "index.html").read_text()
