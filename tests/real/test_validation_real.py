"""A short part of the validation suite on actual engines: calibrate, validate, read the profile's refusals.

What is asserted holds on any machine, busy or not: decisions, matched turns, and whose numbers are in the profile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.real.test_cli_real import ROOT, command_line

SUITE = ROOT / "scenarios" / "validation"
SHORT = ("--set", "run.num_rollout=4", "--set", "algorithm.rollout_batch_size=2")


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A calibration with every experiment once and two scenarios on the deployment that it was made on: turns with
    tools, and an update in mid-generation. The folder, and what was said on the way."""
    folder = tmp_path_factory.mktemp("validation")
    shutil.copytree(SUITE, folder / "suite")
    study = yaml.safe_load((SUITE / "one_engine.yaml").read_text())
    study["variants"] = [v for v in study["variants"] if v["name"] in ("multi-turn with tools", "staleness 2")]
    study["variants"][0]["set"]["workload"]["turns"]["high"] = 3  # 36 + 3 x 16 + 2 x 12 tokens fit the window
    (folder / "suite" / "short.yaml").write_text(yaml.safe_dump(study))
    context = ("--set", "rollout.engine.context_length=112")  # fewer sizes: the shape of the profile is what is tested
    args = ("validate", "suite/short.yaml", "--calibrate", "1", "--out", "v", "--json", "f.json", *SHORT, *context)
    done = command_line(*args, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


@pytest.fixture(scope="module")
def profile(validated: tuple[Path, str]) -> Path:
    return validated[0] / "v" / "profiles" / "1-engine" / "profile.json"


def test_a_calibration_measures_every_part(profile: Path) -> None:
    said = json.loads(profile.read_text())
    assert said["model"] == "deep-qwen3" and said["server"]["attention_backend"] == "torch_native"
    assert said["prefill"]["padded"] is True and said["max_total_num_tokens"] == 8192
    for part in ("decode", "prefill", "trainer", "arrival"):
        quality = said["quality"][part]
        assert quality["points"] >= len(quality["coefficients"])
        assert any(c["value"] > 0 for c in quality["coefficients"].values())
    assert said["decode"]["base_s"] > 0 and said["start_s"] > 1 and said["probe_s"] > 0
    assert said["updates"]["broadcast"]["bytes"] == pytest.approx(4 * 0.99e6, rel=0.05)  # parameters in FP32
    assert set(said["controls"]) == {"abort", "retract", "in_place"}
    assert (profile.parent / "report" / "index.html").is_file()
    loops = json.loads((profile.parent / "points.json").read_text())["loops"]
    assert {part: len(points) for part, points in loops.items()} == {"engine": 7, "short_run": 4, "updates_s": 5}


def test_a_suite_runs_on_one_deployment_and_its_journals_decide_alike(validated: tuple[Path, str]) -> None:
    folder, said = validated
    assert said.count("starting Ray") == 1 and said.count("back to version 0") == 2
    figures: dict[str, Any] = json.loads((folder / "f.json").read_text())
    assert list(figures["scenarios"]) == ["one_engine-multi-turn with tools", "one_engine-staleness 2"]
    for v in figures["scenarios"].values():
        [decided] = v["decisions"]
        assert decided["difference"] == "" and decided["actions"] > 50
        assert v["turns"]["pairs"] >= 0.9 * v["turns"]["turns"] > 0 and v["turns"]["same_output"] == 1.0
        [factor] = v["machine_speeds"]  # loops before and after the run, on a machine in any state
        assert 0.2 < factor < 5.0
        assert v["kinds"]["engine_step"] == "calibrated" and v["kinds"]["trainer"] == "calibrated"
    tools = figures["scenarios"]["one_engine-multi-turn with tools"]["turns"]
    assert tools["pairs"] == tools["turns"] and tools["same_engine"] == 1.0
    assert tools["same_cached"] >= 0.75  # of a machine in any state; `make validate` asks for 99 %
    assert (folder / "v" / "report" / "index.html").is_file()


def test_a_profile_of_another_engine_version_or_machine_is_refused_before_anything_starts(
    profile: Path, tmp_path: Path
) -> None:
    for key, words in (("versions", "sglang 0.1.0, here"), ("machine", "cpu abacus, here")):
        other = json.loads(profile.read_text())
        other[key] = {"versions": {"sglang": "0.1.0"}, "machine": {"cpu": "abacus"}}[key]
        (tmp_path / "other.json").write_text(json.dumps(other))
        done = command_line("validate", str(SUITE / "single_turn.yaml"), "--profile", "other.json", cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and "starting" not in done.stderr
