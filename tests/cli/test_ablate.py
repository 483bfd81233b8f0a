"""RK-07 and `testbed ablate`: switches are independent, and saved time adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Cli
from tests.support.scenarios import tree
from tests.support.simulated import LINEAR, fixed, split


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    file = tmp_path / "agents.yaml"
    config = tree(
        placement=split(2, 1),
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 4},
        workload__prompt=fixed(1000),
        workload__reply={"type": "uniform", "low": 20, "high": 200},
        workload__turns=fixed(6),
        workload__observation=fixed(200),
        workload__tool_time={"type": "exponential", "mean_s": 1.0},
        rollout__routing={"type": "session_affinity"},
        rollout__programs={"type": "thunder_agent", "acting_half_life_s": 5.0},
        rollout__engine={"max_total_num_tokens": 8000, "speculative": {"accept_length": 2.0, "draft_step_share": 0.0}},
        run__num_rollout=4,
        simulation__engine_costs=LINEAR | {"prefill_base_s": 0.0, "prefill_per_token_s": 2e-4},
        training__cost={"type": "rate", "samples_per_s": 100.0},
    )
    file.write_text(yaml.safe_dump(config))
    return file


def test_rk_07_each_saving_saves_its_own_kind_of_time(cli: Cli, scenario_file: Path, tmp_path: Path) -> None:
    done = cli("ablate", str(scenario_file), "--json", "a.json")
    assert done.code == 0, done.err
    assert "saves" in done.out and "program scheduling" in done.out
    figures = json.loads((tmp_path / "a.json").read_text())
    savings = {s["saving"]: s for s in figures["savings"]}
    assert set(savings) == {"program scheduling", "prefix reuse", "slot filling", "speculation"}
    for s in savings.values():
        assert s["trajectory_s"] == pytest.approx(sum(s["parts"].values()))
    largest = {name: max(s["parts"], key=s["parts"].get) for name, s in savings.items()}
    assert largest["slot filling"] == "queue" and largest["speculation"] == "decode"
    assert savings["prefix reuse"]["against"] == "program scheduling off"
    assert savings["prefix reuse"]["parts"]["prefill"] > 0
    assert all(savings[name]["step_s"] > 0 for name in ("prefix reuse", "slot filling", "speculation"))


def test_switches_are_those_that_the_scenario_has(cli: Cli, scenario_file: Path, tmp_path: Path) -> None:
    off = ("rollout.engine.speculative=null", "rollout.programs={type: none}")
    done = cli("ablate", str(scenario_file), *(x for o in off for x in ("--set", o)), "--json", "a.json")
    assert done.code == 0, done.err
    figures = json.loads((tmp_path / "a.json").read_text())
    assert [(s["saving"], s["against"]) for s in figures["savings"]] == [
        ("prefix reuse", "everything on"),
        ("slot filling", "everything on"),
    ]


def test_bad_input_is_one_message(cli: Cli) -> None:
    done = cli("ablate", "nowhere.yaml")
    assert done.code == 2 and "nowhere.yaml" in done.err and "Traceback" not in done.err
