"""`testbed real` on the command line: its run folder, and one message with exit code 2 for what cannot run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.core.events import TaskArrived
from testbed.journal import read_journal
from tests.support.real_rig import for_real
from tests.support.scenarios import scenario

ROOT = Path(__file__).parents[2]


def command_line(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "testbed.cli", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


def first_task(run: Path) -> int:
    _, records = read_journal(run / "journal.jsonl.zst")
    return next(r.event.task for r in records if isinstance(r.event, TaskArrived))


def small_tree() -> dict[str, Any]:
    """A scenario of one engine and one rank, two batches, as it is written."""
    config = for_real(scenario(run__num_rollout=2))
    tree = config.model_dump(mode="json")
    tree["placement"] = {"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1}
    tree["run"]["seed"] = 3
    return tree


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(small_tree()))
    return file


def test_rp_12_a_run_leaves_the_folder_that_a_simulation_leaves_and_replays(small: Path, tmp_path: Path) -> None:
    saving = ("--set", "real.save_interval=1")
    done = command_line("real", "small.yaml", "--out", "out", "--json", "figures.json", *saving, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names >= {
        "scenario.yaml",
        "journal.jsonl.zst",
        "metrics.parquet",
        "summary.json",
        "training.jsonl",
        "report",
    }
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["backend"] == "real" and len(figures["rewards"]) == 2
    assert figures["name"] == "test", "the scenario's own"
    assert figures["core_share"] < 0.05
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "measured" in page
    again = command_line("replay", "out", cwd=tmp_path)
    assert again.returncode == 0 and "all equal" in again.stdout
    assert {p.name for p in (tmp_path / "out" / "checkpoints").iterdir()} == {"step-1", "step-2"}
    position = json.loads((tmp_path / "out" / "checkpoints" / "step-2" / "trainer.json").read_text())["position"]
    went_on = command_line(
        "real", "small.yaml", "--out", "on", "--set", "real.load=out/checkpoints/step-2", cwd=tmp_path
    )
    assert went_on.returncode == 0, went_on.stderr
    assert position["batches"] == 2 and first_task(tmp_path / "on") == position["tasks"] >= 4
    assert first_task(tmp_path / "out") == 0
    simulated = command_line("run", "small.yaml", "--out", "sim", cwd=tmp_path)
    assert simulated.returncode == 0, simulated.stderr
    compared = command_line("report", "out", "sim", "--out", "both", "--json", "both.json", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    kinds = {v["runs"][0]["backend"] for v in json.loads((tmp_path / "both.json").read_text())["variants"]}
    assert kinds == {"real", "simulated"}


def test_ws_12_a_delta_of_a_real_step_is_a_part_of_the_bytes(small: Path, tmp_path: Path) -> None:
    """In bf16 at a usual learning rate most words stay what they were; each publication says how many changed."""
    precision = ("training.precision=bf16", "rollout.engine.weight_precision=bf16", "real.optimizer.lr=1.0e-5")
    path = ("weights.path.update_weight_transfer_mode=disk_delta",)
    sets = [x for o in (*precision, *path) for x in ("--set", o)]
    done = command_line("real", small.name, "--out", "out", "--no-report", *sets, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "weights.jsonl").read_text().splitlines()]
    assert [(r["version"], r["path"]) for r in rows] == [(1, "disk_delta"), (2, "disk_delta")]
    for r in rows:
        assert r["full_bytes"] == 2 * r["words"] > 1_000_000
        assert 0 < r["changed_words"] < 0.5 * r["words"]
        assert r["bytes"] < 0.5 * r["full_bytes"]


def refused(file: Path, *overrides: str) -> str:
    sets = [x for o in overrides for x in ("--set", o)]
    done = command_line("real", file.name, *sets, "--out", "refused", cwd=file.parent)
    assert done.returncode == 2, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    assert not (file.parent / "refused").exists(), "nothing half-written"
    return done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model={type: config_json, path: nowhere/config.json, name: Qwen3-8B}",), ("nowhere", "config.json")),
        (("real.device=cuda",), ("no CUDA device", "real.device: cpu")),
        (("real.loss.mismatch=tis",), ("has none", "real.loss.denominator: decoupled")),
        (("real.ray_address=127.0.0.1:1",), ("no Ray cluster at", "127.0.0.1:1")),
    ],
)
def test_what_cannot_run_is_said_in_one_message(small: Path, overrides: tuple[str, ...], said: tuple[str, ...]) -> None:
    message = refused(small, *overrides)
    assert all(s in message for s in said), message


def test_rk_05_speculation_is_refused_with_what_the_cpu_path_lacks(small: Path) -> None:
    """One message. The day SGLang's attention for CPUs has a step that verifies drafts, the second half fails, and
    speculation is to be offered."""
    message = refused(small, "rollout.engine.speculative={accept_length: 2.0}")
    assert message.count("rollout.engine.speculative: ") == 2, "the key, and what to write instead"
    assert "torch_native" in message and "simulated only" in message and "rollout.engine.speculative: null" in message
    source = importlib.util.find_spec("sglang.srt.layers.attention.torch_native_backend").origin
    assert "verify" not in Path(source).read_text()


def test_an_engine_that_dies_at_start_shows_its_last_log_lines(small: Path) -> None:
    message = refused(small, "real.engine_args=[--no-such-flag]")
    assert "no-such-flag" in message and "unrecognized arguments" in message


def test_a_tokenizer_that_the_vocabulary_cannot_hold_is_refused(small: Path, tmp_path: Path) -> None:
    from real.models.tokenizer import CharTokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    CharTokenizer().save(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 64,
        "eos_token_id": 2,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    message = refused(small, "model={type: config_json, path: model/config.json}")
    assert "127" in message and "vocab_size is 64" in message


def test_check_engine_names_the_case_nearest_to_an_unknown_one(tmp_path: Path) -> None:
    said = command_line("check-engine", "victim", cwd=tmp_path)
    assert said.returncode == 2
    assert "victim: no such case (nearest: victims; all: testbed check-engine --list)" in said.stderr
    assert "priority scheduling with preemption" in command_line("check-engine", "--list", cwd=tmp_path).stdout
