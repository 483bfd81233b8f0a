"""`testbed calibrate` from what was measured to what is written, on measurements made up from known coefficients.

The short run is a simulated one with those coefficients; while it was made, the machine took 1.25 times as long as
while the engine was measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import testbed.cli.calibrate as command
from sim.run import simulate
from testbed.calibration.design import CrowdPoint, Traffic, TrafficPoint, short_run
from testbed.calibration.phases import TrainPoint
from testbed.calibration.profile import (
    ArrivalFit,
    DecodeFit,
    PrefillFit,
    Profile,
    TrainerFit,
    UpdateTimes,
    write_profile,
)
from testbed.calibration.speed import Loops, at_speed
from testbed.run_files import JOURNAL
from tests.calibration.test_fit import engine_points
from tests.cli.conftest import Cli, dump, read_json
from tests.support.scenarios import scenario, tree

SLOWER = 1.25
CPU: dict[str, Any] = {
    "cluster__gpu": "CPU",
    "model": {"type": "preset", "name": "tiny-qwen3"},
    "placement": {"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1},
    "rollout__engine": {"weight_precision": "fp32", "max_total_num_tokens": 4096, "max_running_requests": 8},
    "weights__path": {"type": "fixed", "update_weight_transfer_mode": "broadcast"},
    "training__max_tokens_per_gpu": 1024,
    "training__precision": "fp32",
}
TRAINER = TrainerFit(0.2, 0.05, 1e-4, 1e-7)
UPDATE = UpdateTimes(0.1, 0.02, 0.3, 0.0, 0.05)


@pytest.fixture
def measured(tmp_path: Path) -> SimpleNamespace:
    truth = Profile(
        format=1,
        decode=DecodeFit(2e-3, 1.5e-4),
        prefill=PrefillFit(5e-3, 1e-5, per_request_s=1e-4),
        arrival=ArrivalFit(1e-3, 2e-4),
        trainer=TRAINER,
        updates={"broadcast": UPDATE},
    )
    write_profile(tmp_path / "slow.json", at_speed(truth, SLOWER))
    costs = {"type": "calibrated", "profile": "slow.json"}
    name, run = short_run(scenario(**CPU, simulation__engine_costs=costs, training__cost=costs))
    assert simulate(run, tmp_path, tmp_path / name).problem == ""
    loop = Traffic(1, ((8, 4), (8, 4)))
    rows = [(16,) * n for n in (1, 2, 5)] + [(128,), (512, 256), (1000,), (1000, 900)]
    return SimpleNamespace(
        engine=engine_points(),
        crowd=[
            CrowdPoint(n, 0.01 + 0.001 * n, 0.013 + 0.0012 * n, 0.1, p) for n, p in ((1, 0.12), (8, 0.14), (8, 0.11))
        ],
        controls=[],
        loops=Loops(
            engine=[TrafficPoint(loop, s) for s in (0.08, 0.08)],
            updates_s=[0.3, 0.5],
            short_run=[TrafficPoint(loop, s) for s in (0.12, 0.08)],
        ),
        updates=[TrainPoint(r, TRAINER.seconds(r)) for r in rows],
        beside=[],
        server={"attention_backend": "torch_native"},
        max_total_num_tokens=4096,
        start_s=12.0,
        runs=[tmp_path / name / JOURNAL],
        engines=1,
        padded=False,
        seen_late=False,
    )


def test_a_calibration_is_brought_to_one_speed_and_written(
    cli: Cli, measured: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump(tmp_path / "cpu.yaml", tree(name="cpu", **CPU))
    monkeypatch.setattr(command, "_measured", lambda *args: [measured])
    monkeypatch.setattr("testbed.cli.real.ready_for_real", lambda scenario: None)
    said = cli("calibrate", "cpu.yaml", "--out", "c", "--json", "f.json")
    assert said.code == 0, said.err
    found = read_json(tmp_path / "c/profile.json")
    assert (found["decode"]["base_s"], found["decode"]["per_sequence_s"]) == pytest.approx((2e-3, 1.5e-4))
    assert found["trainer"]["fixed_s"] == pytest.approx(TRAINER.fixed_s, rel=1e-3)
    assert found["trainer"]["per_row_s"] == pytest.approx(TRAINER.per_row_s, rel=1e-3)
    parts = ("prepare_s", "pause_s", "copy_s", "resume_s")
    assert [found["updates"]["broadcast"][p] for p in parts] == pytest.approx([getattr(UPDATE, p) for p in parts])
    assert found["crowd"] == pytest.approx({"base_s": 0.003, "per_sequence_s": 0.0002, "prefill": 1.2})
    assert found["probe_s"] == pytest.approx(0.4)
    assert found["start_s"] == 12.0 and found["engines"] == 1
    assert read_json(tmp_path / "f.json")["folder"] == "c"
    points = read_json(tmp_path / "c/points.json")
    assert [p["seconds"] for p in points["loops"]["short_run"]] == [0.12, 0.08]
    assert (tmp_path / "c/report/index.html").is_file()
