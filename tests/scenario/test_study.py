"""Studies: variants and grids of one base, fair comparisons only, faults with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.scenario.errors import ScenarioError
from testbed.scenario.load import load_scenario
from testbed.scenario.study import is_study, load_study

BASE = """\
cluster: {gpu: H100, nodes: 8}
model: {type: preset, name: Qwen3-32B}
workload:
  type: lengths
  reply: {type: lognormal, mean: 4000, sigma: 1.0}
  max_response_length: 16384
placement: {mode: colocated, num_gpus: 64, rollout_num_gpus_per_engine: 4}
rollout: {admission: {type: sync}}
weights:
  path: {type: fixed, update_weight_transfer_mode: cuda_ipc}
  transition: {pause_generation_mode: retract, kv: flush}
"""

STUDY = """\
study: placement_64xh100_qwen3_32b
question: "64 H100: which placement?"
base: base.yaml
seeds: [1, 2, 3]
variants:
  - name: colocated-sync
    note: "the usual one"
  - name: split-40-24
    set:
      placement: {mode: disaggregated, rollout_num_gpus: 40, actor_num_gpus: 24, rollout_num_gpus_per_engine: 4}
      rollout.admission: {type: bounded, max_head_offpolicyness: 2}
      weights.path.update_weight_transfer_mode: broadcast
"""


def write(folder: Path, study: str, base: str = BASE) -> Path:
    (folder / "base.yaml").write_text(base)
    (folder / "study.yaml").write_text(study)
    return folder / "study.yaml"


def refused(folder: Path, study: str, *overrides: str, base: str = BASE) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        load_study(write(folder, study, base), overrides)
    return str(caught.value).replace(f"{folder}/", "").split("\n")


def test_variants_change_their_keys_and_nothing_else(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, STUDY))
    assert (study.name, study.question, study.seeds) == (
        "placement_64xh100_qwen3_32b",
        "64 H100: which placement?",
        (1, 2, 3),
    )
    assert (study.baseline, study.base_dir) == ("colocated-sync", tmp_path)
    first, second = study.variants
    base = load_scenario(tmp_path / "base.yaml").scenario
    assert (first.note, first.changes, first.scenario) == ("the usual one", {}, base)
    assert second.changes == {
        "placement.mode": "disaggregated",
        "placement.rollout_num_gpus": 40,
        "placement.actor_num_gpus": 24,
        "placement.rollout_num_gpus_per_engine": 4,
        "rollout.admission.type": "bounded",
        "rollout.admission.max_head_offpolicyness": 2,
        "weights.path.update_weight_transfer_mode": "broadcast",
    }
    same = {"placement", "rollout", "weights"}
    assert second.scenario.model_dump(exclude=same) == base.model_dump(exclude=same)
    assert second.scenario.weights.transition == base.weights.transition


def test_base_may_be_written_inside(tmp_path: Path) -> None:
    inside = "base:\n" + "".join(f"  {line}\n" for line in BASE.splitlines())
    study = load_study(write(tmp_path, STUDY.replace("base: base.yaml\n", inside)))
    outside = load_study(write(tmp_path, STUDY))
    assert study.variants == outside.variants


def test_overrides_hold_for_every_variant(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, STUDY), ["run.num_rollout=4", "rollout.engine.max_running_requests=64"])
    assert {v.scenario.run.num_rollout for v in study.variants} == {4}


def test_seeds_default_to_the_seed_of_the_base(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, STUDY.replace("seeds: [1, 2, 3]\n", "")), ["run.seed=7"])
    assert study.seeds == (7,)


def test_grid_is_every_combination_of_every_variant(tmp_path: Path) -> None:
    grid = "grid:\n  experience.staleness.bound: [1, 2]\n  rollout.routing: [{type: random}, {type: round_robin}]\n"
    study = load_study(write(tmp_path, STUDY + grid + "baseline: split-40-24\n"))
    assert [v.name for v in study.variants] == [
        f"{name} bound={bound} {routing}"
        for name in ("colocated-sync", "split-40-24")
        for bound in (1, 2)
        for routing in ("random", "round_robin")
    ]
    assert study.baseline == "split-40-24 bound=1 random"
    last = study.variants[-1].scenario
    assert (last.experience.staleness.bound, last.rollout.routing.type) == (2, "round_robin")


def test_grid_alone_of_sections_that_change_together(tmp_path: Path) -> None:
    text = """\
study: splits
base: base.yaml
grid:
  placement:
    - {mode: disaggregated, rollout_num_gpus: 32, actor_num_gpus: 32}
    - {mode: disaggregated, rollout_num_gpus: 40, actor_num_gpus: 24}
"""
    base = BASE.replace("cuda_ipc", "broadcast").replace("Qwen3-32B", "Qwen3-8B")
    study = load_study(write(tmp_path, text, base))
    assert [v.name for v in study.variants] == [
        "disaggregated,rollout_num_gpus=32,actor_num_gpus=32",
        "disaggregated,rollout_num_gpus=40,actor_num_gpus=24",
    ]
    assert study.baseline == study.variants[0].name


def test_variants_may_be_cases_instead_of_alternatives(tmp_path: Path) -> None:
    assert load_study(write(tmp_path, STUDY)).alternatives
    assert not load_study(write(tmp_path, STUDY + "alternatives: false\n")).alternatives


def test_is_study(tmp_path: Path) -> None:
    path = write(tmp_path, STUDY)
    assert is_study(path)
    assert not is_study(tmp_path / "base.yaml")
    assert not is_study(tmp_path / "nowhere.yaml")


# --- fair comparisons -------------------------------------------------------------------------------------------------


def test_rp_13_pl_13_equal_gpus(tmp_path: Path) -> None:
    fewer = STUDY.replace("actor_num_gpus: 24", "actor_num_gpus: 16")
    assert refused(tmp_path, fewer) == [
        "study.yaml:8: variant split-40-24: placement: 56 GPUs against 64 of `colocated-sync`: "
        "a comparison has equal GPUs (nearest: 64 GPUs, or allow_unequal: [gpus])"
    ]
    assert len(load_study(write(tmp_path, fewer + "allow_unequal: [gpus]\n")).variants) == 2


def test_rp_13_equal_kind_of_gpu(tmp_path: Path) -> None:
    other = STUDY.replace("rollout.admission: {type", "cluster.gpu: H200\n      rollout.admission: {type")
    assert refused(tmp_path, other) == [
        "study.yaml:8: variant split-40-24: cluster.gpu: H200 against H100 of `colocated-sync`: "
        "a comparison has equal GPUs (nearest: H100, or allow_unequal: [gpus])"
    ]


@pytest.mark.parametrize(
    ("change", "message", "word"),
    [
        (
            "workload.reply.mean: 8000",
            "workload.reply.mean: 8000.0 against 4000.0 of `colocated-sync`: a comparison has equal work "
            "(nearest: 4000.0, or allow_unequal: [workload])",
            "workload",
        ),
        (
            "algorithm.rollout_batch_size: 64",
            "algorithm.rollout_batch_size: 64 against 32 of `colocated-sync`: a comparison has equal batches "
            "(nearest: 32, or allow_unequal: [batch])",
            "batch",
        ),
    ],
)
def test_rp_13_equal_work_and_batches(change: str, message: str, word: str, tmp_path: Path) -> None:
    text = STUDY.replace("rollout.admission: {type", f"{change}\n      rollout.admission: {{type")
    assert refused(tmp_path, text) == [f"study.yaml:8: variant split-40-24: {message}"]
    assert len(load_study(write(tmp_path, f"{text}allow_unequal: [{word}]\n")).variants) == 2


def test_rp_13_equal_seeds(tmp_path: Path) -> None:
    text = STUDY.replace("rollout.admission: {type", "run.seed: 5\n      rollout.admission: {type")
    assert refused(tmp_path, text) == [
        "study.yaml:8: variant split-40-24: run.seed: 5 against 0 of `colocated-sync`: variants run on the same seeds "
        "(nearest: leave it out, and write `seeds:` in the study)"
    ]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_fault_of_a_variant_has_its_name_and_line(tmp_path: Path) -> None:
    text = STUDY.replace("max_head_offpolicyness: 2", "max_head_offpolicynes: 2")
    assert refused(tmp_path, text) == [
        "study.yaml:11: variant split-40-24: rollout.admission.max_head_offpolicynes: unknown key "
        "(nearest: rollout.admission.max_head_offpolicyness)"
    ]


def test_impossible_variant_is_refused_with_its_line(tmp_path: Path) -> None:
    text = STUDY.replace("      weights.path.update_weight_transfer_mode: broadcast\n", "")
    assert refused(tmp_path, text) == [
        "base.yaml:10: variant split-40-24: weights.path.update_weight_transfer_mode: `cuda_ipc` on a disaggregated "
        "placement: it hands over GPU memory, so trainer and engine must share the GPU "
        "(nearest: weights.path.update_weight_transfer_mode: broadcast)"
    ]


def test_fault_of_the_base_is_said_once(tmp_path: Path) -> None:
    assert refused(tmp_path, STUDY, base=BASE.replace("gpu: H100", "gpu: H101")) == [
        "base.yaml:1: cluster.gpu: `H101` is not one of A100, H100, H200, B200, H20, CPU (nearest: H100)"
    ]


def test_fault_of_an_override_is_said_once(tmp_path: Path) -> None:
    assert refused(tmp_path, STUDY, "cluster.nodess=8") == [
        "--set cluster.nodess=8: cluster.nodess: unknown key (nearest: cluster.nodes)"
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: [1, 2, 3]", "seed: [1, 2, 3]", "study.yaml:4: seed: unknown key (nearest: seeds)"),
        (
            "seeds: [1, 2, 3]",
            "seeds: [1, 2, 1]",
            "study.yaml:4: seeds: a seed is given twice: the repeats would be equal (nearest: [1, 2])",
        ),
        (
            "seeds: [1, 2, 3]",
            "baseline: colocated",
            "study.yaml:4: baseline: no variant is called `colocated` (nearest: colocated-sync)",
        ),
        ("base: base.yaml", "base: bse.yaml", "study.yaml:3: base: no such file: bse.yaml (nearest: base.yaml)"),
        (
            "base: base.yaml",
            "base: study.yaml",
            "study.yaml:3: base: study.yaml is a study itself; a base is a scenario",
        ),
        ("split-40-24", "colocated-sync", "study.yaml:8: variants: two variants are called `colocated-sync`"),
        (
            "    note:",
            "    notes:",
            "study.yaml:7: variants[0].notes: unknown key (nearest: variants[0].note)",
        ),
        (
            "seeds: [1, 2, 3]",
            "grid: {run.num_rollout: []}",
            "study.yaml:4: grid.run.num_rollout: no values",
        ),
        (
            "seeds: [1, 2, 3]",
            "allow_unequal: [gpu]",
            "study.yaml:4: allow_unequal[0]: `gpu` is not one of gpus, workload, batch (nearest: gpus)",
        ),
    ],
)
def test_broken_studies(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert refused(tmp_path, STUDY.replace(old, new)) == [message]


def test_a_study_without_variants_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, STUDY.partition("variants:")[0]) == [
        "study.yaml:1: variants: missing; a study needs variants or a grid "
        "(nearest: variants: [{name: colocated, set: {}}, {name: split, set: {placement: {...}}}])"
    ]


def test_a_study_is_no_scenario(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="this is a study"):
        load_scenario(write(tmp_path, STUDY))
