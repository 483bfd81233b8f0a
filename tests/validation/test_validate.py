"""`testbed validate --run`: a run against itself has no error, a known change a known one, and bad input is refused.

Runs of the simulator stand for real ones: what went into them is known exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sim.serving.traffic import in_traffic
from testbed.calibration.design import Traffic, TrafficPoint
from testbed.calibration.profile import (
    ArrivalFit,
    DecodeFit,
    PrefillFit,
    Profile,
    TrainerFit,
    UpdateTimes,
    write_profile,
)
from testbed.calibration.speed import MachineSpeed, Probe, at_speed, write_speed
from testbed.journal import read_journal
from testbed.scenario.load import load_scenario
from tests.cli.conftest import Cli, dump, read_json, rewrite
from tests.support.scenarios import tree

TOOLS = {
    "workload__turns": {"type": "fixed", "tokens": 2},
    "workload__tool_time": {"type": "fixed", "seconds": 0.25},
    "workload__observation": {"type": "fixed", "tokens": 7},
}


def quantities(path: Path) -> dict[str, dict[str, Any]]:
    return {q["name"]: q for q in read_json(path)["quantities"]}


@pytest.fixture
def run(cli: Cli, tmp_path: Path) -> Path:
    """A finished run of `small.yaml`: uniform replies of 20 to 80 tokens."""
    assert cli("run", "small.yaml", "--out", "r", "--no-report").code == 0
    return tmp_path / "r"


def test_a_run_against_its_own_scenario_has_no_error(cli: Cli, run: Path, tmp_path: Path) -> None:
    said = cli("validate", "--run", "r", "--json", "f.json", "--max-error", "0", "--out", "v")
    assert said.code == 0, said.err
    figures = read_json(tmp_path / "f.json")
    assert all(d["difference"] == "" for d in figures["decisions"])
    for q in figures["quantities"]:
        assert q["timing_error"] == pytest.approx(0, abs=1e-9) and q["full_error"] == pytest.approx(0, abs=1e-9), q
    assert figures["turns"]["pairs"] == figures["turns"]["turns"] > 0
    assert figures["turns"]["same_cached"] == figures["turns"]["same_engine"] == 1.0
    assert set(figures["verdicts"].values()) == {"within"}
    assert "is a simulated run" in said.err
    assert (tmp_path / "v/report/index.html").is_file() and (tmp_path / "v/timing-1/journal.jsonl.zst").is_file()


def test_tools_and_several_turns_are_replayed(cli: Cli, tmp_path: Path) -> None:
    """Every turn of a two-turn trajectory has its counterpart, and a tool's 0.25 s are taken from the journal."""
    dump(tmp_path / "tools.yaml", tree(name="tools", run__warmup_steps=1, **TOOLS))
    assert cli("run", "tools.yaml", "--out", "t", "--no-report").code == 0
    assert cli("validate", "--run", "t", "--json", "f.json", "--no-report").code == 0
    figures = read_json(tmp_path / "f.json")
    assert figures["turns"]["pairs"] == figures["turns"]["turns"] == 2 * 2 * 2 * 2  # steps x groups x members x turns
    assert quantities(tmp_path / "f.json")["step_time"]["timing_error"] == pytest.approx(0, abs=1e-9)


def test_open_arrivals_come_when_they_did(cli: Cli, tmp_path: Path) -> None:
    arrivals = {"workload__arrivals": "poisson", "workload__arrival_rate_per_s": 2.0}
    changes = {**arrivals, "rollout__admission": {"type": "fully_async"}, "run__num_rollout": 6}
    dump(tmp_path / "open.yaml", tree(name="open", run__warmup_steps=1, **changes))
    assert cli("run", "open.yaml", "--out", "o", "--no-report").code == 0
    assert cli("validate", "--run", "o", "--json", "f.json", "--no-report").code == 0
    assert quantities(tmp_path / "f.json")["step_time"]["timing_error"] == pytest.approx(0, abs=1e-9)


def test_error_of_the_times(cli: Cli, run: Path, tmp_path: Path) -> None:
    """Engines four times as slow in the simulation: decode per token is off by +300 %, all of it of the times."""
    slow = "simulation.engine_costs={type: linear, base_s: 0.02, per_sequence_s: 0.0002}"
    fast = "simulation.engine_costs={type: linear, base_s: 0.005, per_sequence_s: 0.00005}"
    cli("run", "small.yaml", "--out", "fast", "--no-report", "--set", fast)
    said = cli("validate", "--run", "fast", "--set", slow, "--json", "f.json", "--no-report")
    assert said.code == 0
    q = quantities(tmp_path / "f.json")
    assert q["decode_per_token"]["timing_error"] == pytest.approx(3.0, rel=1e-6)
    assert q["decode_per_token"]["work_error"] == pytest.approx(0.0, abs=1e-9)
    assert q["output_tokens"]["timing_error"] == 0
    causes = read_json(tmp_path / "f.json")["causes"]
    assert sum(c["of_times"] for c in causes) == pytest.approx(q["step_time"]["timing_error"], rel=1e-6)


def test_error_of_the_work(cli: Cli, run: Path, tmp_path: Path) -> None:
    """Another work model (replies of 100 tokens for a mean of about 50): the times are right, the work is not."""
    longer = "workload.reply={type: fixed, tokens: 100}"
    assert cli("validate", "--run", "r", "--set", longer, "--json", "f.json", "--no-report").code == 0
    q = quantities(tmp_path / "f.json")
    assert q["step_time"]["timing_error"] == pytest.approx(0.0, abs=1e-9)
    assert q["output_tokens"]["work_error"] == pytest.approx(100 / q["output_tokens"]["real_mean"] - 1)
    assert q["step_time"]["full_error"] == q["step_time"]["work_error"] > 0


def test_max_error_reads_the_simulation_with_the_runs_own_work(cli: Cli, run: Path) -> None:
    work = cli("validate", "--run", "r", "--set", "workload.reply={type: fixed, tokens: 100}", "--max-error", "1")
    assert work.code == 0
    slow = "simulation.engine_costs={type: linear, base_s: 0.02}"
    times = cli("validate", "--run", "r", "--set", slow, "--max-error", "5")
    assert times.code == 1
    assert "off by more than 5 % and the real side's own spread: step time +" in times.err


def test_several_runs_have_a_spread(cli: Cli, tmp_path: Path) -> None:
    """Two seeds as two real runs: the spread is their sample standard deviation, |a - b| / sqrt(2)."""
    for seed in (1, 2):
        cli("run", "small.yaml", "--out", f"s/{seed}", "--seed", seed, "--no-report")
    assert cli("validate", "--run", "s", "--json", "f.json", "--no-report").code == 0
    step = quantities(tmp_path / "f.json")["step_time"]
    a, b = (read_json(tmp_path / f"s/{seed}/summary.json")["step_time_mean_s"] for seed in (1, 2))
    assert step["real"] == [a, b]
    assert step["real_std"] == pytest.approx(abs(a - b) / 2**0.5)
    assert step["timing"] == pytest.approx([a, b]) and step["full"] == pytest.approx([a, b])


def test_a_changed_decision_is_shown_and_fails(cli: Cli, run: Path) -> None:
    def other_engine(lines: list[dict[str, Any]]) -> None:
        start = next(a for line in lines[1:] for a in line["actions"] if a["type"] == "StartTurn")
        start["engine"] = 1 - start["engine"]

    rewrite(run / "journal.jsonl.zst", other_engine)
    said = cli("validate", "--run", "r", "--no-report")
    assert said.code == 1
    assert "the core answers differently" in said.err and "recorded:" in said.err


def test_a_cut_journal_is_compared_up_to_the_cut(cli: Cli, tmp_path: Path) -> None:
    """As many batches are simulated as the journal has whole, and there is no error in them."""
    cli("run", "small.yaml", "--out", "long", "--no-report", "--set", "run.num_rollout=80")
    journal = tmp_path / "long/journal.jsonl.zst"
    journal.write_bytes(journal.read_bytes()[: 2 * journal.stat().st_size // 3])
    said = cli("validate", "--run", "long", "--json", "f.json", "--no-report", "--out", "v")
    assert said.code == 0, said.err
    assert "breaks off after line" in said.err and "compared up to there" in said.err
    trained = [a for r in read_journal(journal)[1] for a in [r.event] if type(a).__name__ == "TrainStepFinished"]
    assert 0 < len(trained) < 80
    assert read_json(tmp_path / "f.json")["measured_steps"] == len(trained) - 1
    assert len(read_json(tmp_path / "v/timing-1/summary.json")["steps"]) == len(trained)
    assert quantities(tmp_path / "f.json")["step_time"]["timing_error"] == pytest.approx(0, abs=1e-9)


def test_bad_input(cli: Cli, run: Path, tmp_path: Path) -> None:
    for args, words in (
        ((), "which scenario?"),
        (("--run", "nothing"), "no such run folder"),
        (("--run", "r", "--repeats", "2"), "--repeats: the real runs are given"),
        (("--run", "r", "--seed", "2"), "--seed: the real runs are given"),
        (("other.yaml", "--run", "r", "--set", "algorithm.rollout_batch_size=4"), "rollout_batch_size: 4, in the real"),
        (("--run", "r", "--set", "run.warmup_step=1"), "warmup_steps"),
    ):
        said = cli("validate", *args)
        assert said.code == 2, (args, said)
        assert words in said.err, (args, said.err)
        assert "Traceback" not in said.err


def test_a_run_without_measured_steps_is_refused(cli: Cli, run: Path) -> None:
    def cut(lines: list[dict[str, Any]]) -> None:
        first = next(i for i, line in enumerate(lines) if line.get("event", {}).get("type") == "TrainStepFinished")
        del lines[first + 1 :]

    rewrite(run / "journal.jsonl.zst", cut)
    said = cli("validate", "--run", "r")
    assert said.code == 2 and "1 batches were trained and 1 are warm-up" in said.err


def test_a_profile_of_another_engine_version_is_refused(cli: Cli, run: Path, tmp_path: Path) -> None:
    """With the difference."""
    profile = {
        "format": 1,
        "decode": {"base_s": 0.01},
        "prefill": {"base_s": 0.01, "per_token_s": 0.0},
        "versions": {"sglang": "0.4.0"},
    }
    (tmp_path / "r/p.json").write_text(json.dumps(profile))
    said = cli("validate", "--run", "r", "--set", "simulation.engine_costs={type: calibrated, profile: p.json}")
    assert said.code == 2
    assert "p.json was made with sglang 0.4.0, here none" in said.err and "testbed calibrate" in said.err


def test_a_run_is_simulated_at_the_speed_its_loops_had(cli: Cli, tmp_path: Path) -> None:
    """A run on a machine 1.2 times as slow as when it was calibrated, its trainer 1.5 times, as loops and updates
    around it say: no error. Without them the simulation is that much faster; loops of something else are refused."""
    profile = Profile(
        format=1,
        decode=DecodeFit(0.005, 1e-4),
        prefill=PrefillFit(0.01, 1e-5),
        arrival=ArrivalFit(0.004, 0.0005),
        trainer=TrainerFit(0.5, per_token_s=1e-4),
        updates={"broadcast": UpdateTimes(0.1, 0.01, 0.2, 0.0, 0.01)},
        traffic_s=0.002,
        probe_s=0.4,
    )
    write_profile(tmp_path / "quiet.json", profile)
    write_profile(tmp_path / "slow.json", at_speed(profile, 1.2, trainer=1.5))

    def with_profile(name: str) -> list[str]:
        costs = f"simulation.engine_costs={{type: calibrated, profile: {tmp_path / name}}}"
        return ["--set", costs, "--set", f"training.cost={{type: calibrated, profile: {tmp_path / name}}}"]

    updates = ("--set", "weights.path={type: fixed, update_weight_transfer_mode: broadcast}")
    instant = ("--set", "workload.rewards.latency={type: fixed, seconds: 0}")
    said = cli("run", "small.yaml", "--out", "r", "--no-report", *with_profile("slow.json"), *updates, *instant)
    assert said.code == 0, said.err

    def errors() -> tuple[float, Any]:
        said = cli(
            "validate", "--run", "r", *with_profile("quiet.json"), "--json", "f.json", "--no-report", "--out", "v"
        )
        assert said.code == 0, said.err
        figures = read_json(tmp_path / "f.json")
        return quantities(tmp_path / "f.json")["step_time"]["timing_error"], figures["machine_speeds"]

    error, none = errors()
    assert 1 / 1.5 - 1 < error < 1 / 1.2 - 1 and none == []
    config, loop = load_scenario(tmp_path / "r/scenario.yaml").scenario, Traffic(2, ((8, 4), (9, 6), (7, 5), (8, 8)))
    predicted = 1 / in_traffic(profile, config, tmp_path, [TrafficPoint(loop, 1.0)])
    probes = [  # two engines; two looks were disturbed
        Probe([TrafficPoint(loop, 1.2 * predicted * swing * s) for s in (0.9, 1.1)], 1.5 * 0.4 * swing)
        for swing in (0.7, 1.0, 1.9)
    ]
    write_speed(tmp_path / "r", MachineSpeed(probes[:1], probes[1:]))
    assert errors() == (pytest.approx(0, abs=1e-6), [pytest.approx(1.2)])
    (tmp_path / "r/machine_speed.json").write_text("{}")
    said = cli("validate", "--run", "r", *with_profile("quiet.json"), "--no-report")
    assert said.code == 2 and "machine_speed.json does not hold closed loops" in said.err


def test_the_scenario_of_a_folder_is_needed(cli: Cli, run: Path) -> None:
    (run / "scenario.yaml").unlink()
    said = cli("validate", "--run", "r")
    assert said.code == 2 and "scenario.yaml: missing" in said.err
    shutil.rmtree(run)


# --- several scenarios at once ----------------------------------------------------------------------------------------


@pytest.fixture
def suite(cli: Cli, tmp_path: Path) -> Path:
    """Runs of two experiments as an earlier validation leaves them: `suite/a/real-1`, `real-2` and `suite/b/real-1`."""
    for place, seed, tokens in (("a/real-1", 1, 80), ("a/real-2", 2, 80), ("b/real-1", 1, 200)):
        longer = f"workload.reply={{type: uniform, low: 20, high: {tokens}}}"
        run = ("run", "small.yaml", "--out", f"suite/{place}", "--seed", seed, "--no-report", "--set", longer)
        assert cli(*run).code == 0
    return tmp_path / "suite"


def test_a_folder_of_runs_is_validated_by_experiment(cli: Cli, suite: Path, tmp_path: Path) -> None:
    said = cli("validate", "--run", "suite", "--json", "f.json", "--out", "v", "--doc", "suite.md", "--max-error", "0")
    assert said.code == 0, said.err
    figures = read_json(tmp_path / "f.json")
    assert sorted(figures["scenarios"]) == ["a", "b"]
    assert [len(figures["scenarios"][name]["runs"]) for name in "ab"] == [2, 1]
    assert figures["cached_tokens_equal"] == 1.0 and figures["missed"] == [] and set(figures["verdicts"]) == {"within"}
    assert figures["turns"] == sum(s["turns"]["pairs"] for s in figures["scenarios"].values()) > 0
    page = (tmp_path / "v/report/index.html").read_text(encoding="utf-8")
    for name in "ab":
        assert f'href="../{name}/report/index.html"' in page and (tmp_path / f"v/{name}/report/index.html").is_file()
    assert "| a |" in (tmp_path / "suite.md").read_text(encoding="utf-8")


def test_what_an_earlier_validation_simulated_is_no_real_run(cli: Cli, suite: Path, tmp_path: Path) -> None:
    """A suite's folder holds simulations beside its real runs: they are left out."""

    def real(lines: list[dict[str, Any]]) -> None:
        lines[0]["backend"] = "real"

    for journal in suite.rglob("journal.jsonl.zst"):
        rewrite(journal, real)
    assert cli("validate", "--run", "suite", "--out", "suite/again", "--no-report").code == 0
    assert cli("validate", "--run", "suite", "--json", "f.json", "--out", "v", "--no-report").code == 0
    scenarios = read_json(tmp_path / "f.json")["scenarios"]
    assert {name: len(s["runs"]) for name, s in scenarios.items()} == {"a": 2, "b": 1}


def test_the_short_run_of_a_calibration_is_no_real_run(cli: Cli, suite: Path, tmp_path: Path) -> None:
    shutil.copytree(suite / "b/real-1", suite / "b/calibration/8x8")
    assert cli("validate", "--run", "suite", "--json", "f.json", "--out", "v", "--no-report").code == 0
    scenarios = read_json(tmp_path / "f.json")["scenarios"]
    assert {name: len(s["runs"]) for name, s in scenarios.items()} == {"a": 2, "b": 1}


def test_a_miss_of_one_scenario_is_named_with_its_cause(cli: Cli, suite: Path, tmp_path: Path) -> None:
    slow = "simulation.engine_costs={type: linear, base_s: 0.02, per_sequence_s: 0.0002}"
    said = cli("validate", "--run", "suite", "--set", slow, "--json", "f.json", "--max-error", "5", "--no-report")
    assert said.code == 1
    assert "a: step time +" in said.err and "b: step time +" in said.err
    missed = read_json(tmp_path / "f.json")["missed"]
    latency = next(m for m in missed if m["scenario"] == "a" and m["limit"] == "latency_p50")
    assert latency["cause"].startswith("decode: +")
    step = next(m for m in missed if m["scenario"] == "b" and m["limit"] == "step_time")
    assert "% of a step" in step["cause"]


def test_two_real_runs_are_compared_turn_by_turn(cli: Cli, tmp_path: Path) -> None:
    """One experiment, one seed, twice: not a turn is apart. Engines twice as fast the second time: every turn is."""
    fast = "simulation.engine_costs={type: linear, base_s: 0.0025, per_sequence_s: 0.00005}"
    cli("run", "small.yaml", "--out", "p/1", "--no-report")
    cli("run", "small.yaml", "--out", "p/2", "--no-report")
    cli("run", "small.yaml", "--out", "q/2", "--no-report", "--set", fast)
    assert cli("validate", "--run", "p", "--json", "f.json", "--no-report").code == 0
    same = read_json(tmp_path / "f.json")["turns_between_real_runs"]
    assert same["pairs"] == same["turns"] > 0 and same["same_cached"] == 1.0 and same["latency_error_p95"] == 0
    args = ("validate", "small.yaml", "--run", "p/1", "--run", "q/2", "--json", "f.json", "--no-report")
    assert cli(*args).code == 0
    apart = read_json(tmp_path / "f.json")["turns_between_real_runs"]
    assert apart["latency_error_median"] < -0.3 and apart["decode_s"] < 0
    assert cli("validate", "--run", "p/1", "--json", "f.json", "--no-report").code == 0
    assert read_json(tmp_path / "f.json")["turns_between_real_runs"] is None


def test_bad_input_to_a_suite(cli: Cli, suite: Path, tmp_path: Path) -> None:
    for args, words in (
        (("small.yaml", "other.yaml", "--variant", "x"), "--variant: goes with one FILE, and there are 2"),
        (("small.yaml", "other.yaml", "--run", "suite"), "--run: goes with one FILE, and there are 2"),
        (("study.yaml", "--variant", "nothing"), "--variant nothing: no such variant"),
        (("--run", "suite", "--profile", "none.json"), "--profile none.json: no such file"),
        (("--run", "suite", "--doc", "suite"), "--doc suite: this is a folder"),
        (
            ("--run", "suite", "--calibrate", "1"),
            "--calibrate: goes with runs to be made and no profile",
        ),
    ):
        said = cli("validate", *args)
        assert (said.code, said.out) == (2, ""), said
        assert words in said.err and "Traceback" not in said.err
