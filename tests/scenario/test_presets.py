"""The framework presets: each has a source for what it repeats, runs, and is part of a map, not of a ranking."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reports import VariantRuns, build_comparison, html, markdown
from sim.run import simulate
from testbed.commands.chosen import about_comparison, one_framework, study_of
from testbed.scenario.errors import ScenarioError
from testbed.scenario.load import dump_scenario, load_scenario, parse_scenario

FOLDER = Path(__file__).resolve().parents[2] / "scenarios" / "presets"
FILES = sorted(FOLDER.glob("*.yaml"))
READ = (
    "placement.mode",
    "rollout.admission.type",
    "rollout.routing.type",
    "experience.buffer.type",
    "experience.staleness.action",
    "weights.path.update_weight_transfer_mode",
    "weights.transition.pause_generation_mode",
    "weights.transition.kv",
)
"""What makes a schedule, and must be the framework's."""
SHORT = ("run.num_rollout=3", "run.warmup_steps=1", "algorithm.rollout_batch_size=8")

COMMITS = {
    "THUDM/slime": "624b824a8",
    "radixark/miles": "31f1ca961",
    "NVIDIA-NeMo/RL": "7ea279abf",
    "verl-project/verl": "1dda039b9",
    "inclusionAI/AReaL": "4aef98d8d",
    "PrimeIntellect-ai/prime-rl": "559b44772",
}
"""The states of the repositories that were read."""

DEFAULTS: dict[str, dict[str, object]] = {
    "slime": {
        "placement.mode": "disaggregated",
        "rollout.admission.type": "sync",
        "rollout.routing.balance_abs_threshold": 10,
        "weights.path.update_weight_transfer_mode": "broadcast",
        "weights.transition.pause_generation_mode": "abort",
        "weights.update_weight_buffer_size": 512 * 2**20,
    },
    "miles": {
        "placement.mode": "disaggregated",
        "rollout.admission.type": "sync",
        "rollout.routing.balance_abs_threshold": 64,
        "experience.staleness.bound": None,
        "weights.transition.pause_generation_mode": "retract",
        "weights.transition.kv": "flush",
    },
    "miles_fully_async": {
        "rollout.admission.type": "fully_async",
        "rollout.admission.submission_granularity": "sample",
        "experience.buffer.async_data_buffer_capacity_factor": 2.0,
        "experience.staleness.bound": None,
        "experience.staleness.action": "drop",
    },
    "nemo_rl": {
        "placement.mode": "colocated",
        "algorithm.kl_coef": 0.01,
        "weights.path.update_weight_transfer_mode": "cuda_ipc",
    },
    "nemo_rl_async": {
        "placement.mode": "disaggregated",
        "experience.staleness.bound": 1,
        "weights.transition.pause_generation_mode": "finish",
        "weights.transition.kv": "keep",
    },
    "verl": {
        "placement.mode": "colocated",
        "placement.rollout_num_gpus_per_engine": 2,
        "experience.buffer.type": "store_then_ready",
        "experience.staleness.bound": 8,
    },
    "verl_fully_async": {
        "placement.mode": "disaggregated",
        "rollout.admission.max_head_offpolicyness": 0.1,
        "weights.update_weights_interval": 4,
        "weights.transition.pause_generation_mode": "retract",
    },
    "areal": {
        "placement.mode": "disaggregated",
        "rollout.admission.max_head_offpolicyness": 0,
        "rollout.routing.type": "round_robin",
        "weights.path.update_weight_transfer_mode": "broadcast",
    },
    "prime_rl": {
        "rollout.concurrency.max_inflight": 1024,
        "rollout.concurrency.grow_factor": 1.25,
        "experience.staleness.bound": 8,
        "experience.staleness.measure": "dispatch",
        "weights.transition.kv": "salt_by_version",
    },
}
"""Out of each framework's documentation and option tables, written down a second time."""


def named(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", FILES, ids=named)
def test_rp_03_a_preset_says_where_the_framework_has_what_all_have(path: Path) -> None:
    provenance = load_scenario(path).scenario.provenance
    assert provenance is not None
    parts = provenance.parts
    assert all((parts.generation, parts.training, parts.data, parts.weight_sync)) and provenance.left_out


def test_rp_03_the_three_frameworks_of_the_map_are_there() -> None:
    scenarios = {path.stem: load_scenario(path).scenario for path in FILES}
    frameworks = {s.provenance.framework: s.provenance.parts for s in scenarios.values() if s.provenance is not None}
    assert {"slime", "Miles", "NeMo RL"} <= set(frameworks)
    assert "SGLang" in frameworks["slime"].generation
    assert "Router" in frameworks["Miles"].generation and "data sources" in frameworks["Miles"].data
    assert "environment" in frameworks["NeMo RL"].generation and "policy" in frameworks["NeMo RL"].training


@pytest.mark.parametrize("path", FILES, ids=named)
def test_rp_04_a_preset_cites_repository_and_commit_of_every_part_of_its_schedule(path: Path) -> None:
    provenance = load_scenario(path).scenario.provenance
    assert provenance is not None
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.commit)
    assert provenance.commit.startswith(COMMITS[provenance.repository])
    assert [key for key in READ if key not in provenance.settings] == []
    assert all(s.option for s in provenance.settings.values())
    assert f"testbed run scenarios/presets/{path.name}" in path.read_text()


def test_every_preset_is_written_down_here_a_second_time() -> None:
    assert set(DEFAULTS) == {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_rp_04_a_preset_has_the_defaults_it_names(path: Path) -> None:
    dumped = load_scenario(path).scenario.model_dump(mode="json")
    for key, wanted in DEFAULTS[path.stem].items():
        value: object = dumped
        for part in key.split("."):
            value = value[part]  # type: ignore[index]
        assert value == wanted, key


def test_presets_have_the_same_machine_work_and_run() -> None:
    """So that two of them can be set beside each other."""
    first, *rest = [load_scenario(path).scenario for path in FILES]
    for other in rest:
        for part in ("cluster", "model", "workload", "training", "run", "simulation"):
            assert getattr(other, part) == getattr(first, part), (other.name, part)
        assert other.algorithm.rollout_batch_size == first.algorithm.rollout_batch_size
        assert other.algorithm.n_samples_per_prompt == first.algorithm.n_samples_per_prompt


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_preset_simulates_and_is_what_its_dump_says(path: Path) -> None:
    scenario = load_scenario(path, SHORT).scenario
    done = simulate(scenario, FOLDER)
    assert done.problem == "" and done.finish_reason == "completed"
    assert parse_scenario(dump_scenario(scenario), base_dir=FOLDER).scenario == scenario


# --- no ranking -------------------------------------------------------------------------------------------------------


def compared(*names: str) -> tuple[str, str, bool]:
    """(HTML, Markdown, whether a best one may be named) of a comparison of presets."""
    files = [FOLDER / f"{name}.yaml" for name in names]
    study = study_of(files, (*SHORT, "experience.staleness.measure=oldest_token"), False)
    about = about_comparison(study, study.variants, [0], "testbed compare")
    runs = [VariantRuns("", v.name, "", [simulate(v.scenario, FOLDER).summary]) for v in study.variants]
    comparison = build_comparison(
        study=study.name,
        question=study.question,
        variants=runs,
        facts=about["facts"],
        alternatives=about["alternatives"],
        seconds=1.0,
    )
    return html.render(comparison), markdown.render(comparison), about["alternatives"]


def test_rp_03_a_comparison_of_frameworks_names_none_as_the_best_and_says_why() -> None:
    page, text, alternatives = compared("miles", "verl_fully_async")
    assert not alternatives
    assert 'class="best"' not in page and "best of its column" not in page + text
    for said in (page, text):
        assert "Settings, not frameworks" in said and "none is ranked" in said
        assert "radixark/miles at 31f1ca961" in said and "verl-project/verl at 1dda039b9" in said
        assert not re.search(r"league|leaderboard|winner", said)


def test_rp_03_two_modes_of_one_framework_may_be_chosen_from() -> None:
    both = [load_scenario(FOLDER / f"{name}.yaml").scenario for name in ("miles", "miles_fully_async")]
    assert one_framework(both) and one_framework([])
    assert not one_framework([*both, load_scenario(FOLDER / "slime.yaml").scenario])


# --- bad input --------------------------------------------------------------------------------------------------------


def changed(old: str, new: str) -> str:
    text = (FOLDER / "miles.yaml").read_text()
    assert text.count(old) == 1
    return text.replace(old, new)


def test_a_source_of_a_key_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ScenarioError) as refused:
        parse_scenario(changed("    weights.transition.kv:", "    weights.transition.kvs:"), base_dir=FOLDER)
    assert "provenance.settings.weights.transition.kvs" in str(refused.value)
    assert refused.value.nearest == "weights.transition.kv"


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("commit: 31f1ca961a94cb860cec3b2dea34ec332bfa8f76", "commit: main", "provenance.commit"),
        ("repository: radixark/miles", "repository: miles", "provenance.repository"),
        ("date: 2026-08-21", "date: August", "provenance.date"),
    ],
)
def test_rp_04_a_source_without_repository_or_commit_is_none(old: str, new: str, key: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        parse_scenario(changed(old, new), base_dir=FOLDER)
    assert [fault.key for fault in refused.value.faults] == [key]
