"""Graphs of training stages: order, lineage, what a stage starts from, and graphs that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.scenario.errors import ScenarioError
from testbed.scenario.load import load_scenario
from testbed.scenario.model import ConfigJsonModel, PresetModel
from testbed.scenario.stages import Stages, is_stages, load_stages

SHIPPED = Path(__file__).parents[2] / "scenarios" / "learning"

BASE = """\
cluster: {gpu: CPU, nodes: 1, gpus_per_node: 2}
workload:
  type: lengths
  environment: {type: arithmetic}
  prompt: {type: fixed, tokens: 5}
  reply: {type: uniform, low: 2, high: 4}
  max_response_length: 8
algorithm: {n_samples_per_prompt: 4, rollout_batch_size: 4}
placement: {mode: disaggregated, rollout_num_gpus: 1, actor_num_gpus: 1}
rollout:
  engine: {weight_precision: fp32, max_running_requests: 32, max_total_num_tokens: 8192, context_length: 256}
  admission: {type: sync}
training: {precision: fp32}
weights:
  path: {type: fixed, update_weight_transfer_mode: broadcast}
  transition: {pause_generation_mode: retract, kv: flush}
real: {warmup: {steps: 100}}
"""
OPD = "set: {algorithm.advantage: distillation}"
SFT = "{name: sft, kind: sft, model: tiny-qwen3}"
TEACHER_FIRST = f"""
  - {{name: score, kind: evaluate, model: student, tasks: 64}}
  - {{name: student, kind: opd, model: sft, teachers: [teacher], {OPD}}}
  - {{name: teacher, kind: rl, model: sft}}
  - {SFT}
"""
STUDENT_GOES_ON = f"""
  - {SFT}
  - {{name: teacher, kind: sft, model: sft}}
  - {{name: student, kind: opd, model: sft, teachers: [teacher], {OPD}}}
  - {{name: student-rl, kind: rl, model: student}}
"""


def write(folder: Path, graph: str, base: str = BASE) -> Path:
    (folder / "base.yaml").write_text(base)
    file = folder / "stages.yaml"
    file.write_text(f'stages: test\nquestion: "Why?"\nbase: base.yaml\ngraph:{graph}')
    return file


def loaded(folder: Path, graph: str, *overrides: str) -> Stages:
    return load_stages(write(folder, graph), overrides)


def refused(folder: Path, graph: str, *overrides: str, base: str = BASE) -> str:
    with pytest.raises(ScenarioError) as caught:
        load_stages(write(folder, graph, base), overrides)
    return str(caught.value).replace(f"{folder}/", "")


def trained_by(stages: Stages, kind: str) -> list[str]:
    return [s.name for s in stages.stages if s.kind == kind]


def test_op_08_the_order_of_rl_and_opd_decides_which_model_rl_trains(tmp_path: Path) -> None:
    """Teacher RL, then student OPD and its evaluation; or student OPD, then the same student's RL."""
    first = loaded(tmp_path, TEACHER_FIRST)
    assert [s.name for s in first.stages] == ["sft", "teacher", "student", "score"], "whatever their order in the file"
    assert first.lineage("student") == ("sft", "student")
    assert trained_by(first, "rl") == ["teacher"] and "teacher" not in first.lineage("student")
    assert first.by_name["student"].reads == ("teacher",)
    assert first.lineage("score") == first.lineage("student"), "an evaluation trains nothing"

    then = loaded(tmp_path, STUDENT_GOES_ON)
    assert trained_by(then, "rl") == ["student-rl"]
    assert then.lineage("student-rl") == ("sft", "student", "student-rl"), "the student that was distilled goes on"
    assert "teacher" not in then.lineage("student-rl")


def test_op_08_stages_come_in_any_order_that_the_goal_wants(tmp_path: Path) -> None:
    graph = f"""
  - {{name: base, kind: pretrain, model: tiny-qwen3}}
  - {{name: sft, kind: sft, model: base}}
  - {{name: rl, kind: rl, model: sft}}
  - {{name: opd, kind: opd, model: rl, teachers: [sft, rl], {OPD}}}
  - {{name: again, kind: rl, model: opd}}
"""
    stages = loaded(tmp_path, graph)
    assert stages.lineage("again") == ("base", "sft", "rl", "opd", "again")
    assert [s.name for s in stages.needed_for(["rl"])] == ["base", "sft", "rl"]
    assert [s.name for s in stages.needed_for(["opd"])] == ["base", "sft", "rl", "opd"]


def test_op_09_two_specialists_teach_one_student_by_kind(tmp_path: Path) -> None:
    stages = load_stages(SHIPPED / "stages_deepseek_v4.yaml")
    student = stages.by_name["student"]
    assert student.teachers == {"sums": "sums", "differences": "differences"}
    assert stages.lineage("student") == ("sft", "student"), "no teacher's weights are in the student"
    assert {stages.lineage(t) for t in student.reads} == {("sft", "sums"), ("sft", "differences")}
    assert [s.name for s in stages.stages if s.kind == "opd"] == ["student"]


def test_op_15_a_stage_starts_from_named_checkpoints(tmp_path: Path) -> None:
    stages = loaded(tmp_path, TEACHER_FIRST)
    folders = {name: Path("/there") / name for name in stages.by_name}
    sft, student = stages.by_name["sft"], stages.by_name["student"]
    assert sft.with_inputs(folders).model == PresetModel(name="tiny-qwen3")
    assert sft.with_inputs(folders).real.warmup.steps == 100
    begun = student.with_inputs(folders)
    assert begun.model == ConfigJsonModel(path="/there/sft/config.json", name="sft")
    assert begun.real.teachers == ("/there/teacher",)
    assert begun.real.warmup.steps == 0, "the weights as the stage before left them"
    assert begun.name == "student"
    score = stages.by_name["score"].with_inputs(folders)
    assert score.model == ConfigJsonModel(path="/there/student/config.json", name="student")


def test_a_stage_changes_its_keys_and_overrides_win(tmp_path: Path) -> None:
    graph = """
  - {name: sft, kind: sft, model: tiny-qwen3, set: {real.warmup: {target: 0.2}}}
  - {name: rl, kind: rl, model: sft, set: {run: {num_rollout: 7}, real.optimizer.lr: 0.25}}
"""
    sft, rl = loaded(tmp_path, graph, "run.seed=5").stages
    assert (sft.scenario.real.warmup.target, sft.scenario.real.warmup.steps) == (0.2, 100)
    assert (rl.scenario.run.num_rollout, rl.scenario.real.optimizer.lr, rl.scenario.run.seed) == (7, 0.25, 5)
    assert loaded(tmp_path, graph, "run.num_rollout=3").by_name["rl"].scenario.run.num_rollout == 3


def test_a_model_folder_beside_the_file_is_a_start(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,'
        '"num_key_value_heads": 2, "intermediate_size": 64}'
    )
    [rl] = loaded(tmp_path, "\n  - {name: rl, kind: rl, model: mine}\n").stages
    assert rl.scenario.model == ConfigJsonModel(path=str(folder / "config.json"), name="mine")


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("stages_*.yaml")), ids=lambda p: p.stem)
def test_shipped_graphs_are_valid_and_ask_a_question(file: Path) -> None:
    stages = load_stages(file)
    assert stages.name == file.stem and stages.question.endswith("?")
    assert is_stages(file)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (
            "{name: rl, kind: rl, model: stf}",
            "stages.yaml:6: stage rl: model: `stf` is no stage, no preset and no model folder in",
        ),
        ("{name: rl, kind: rl, model: stf}", "(nearest: sft)"),
        ("{name: sft, kind: rl, model: tiny-qwen3}", "stages.yaml:6: stage sft: name: two stages are called `sft`"),
        ("{name: tiny-llama, kind: rl, model: sft}", "`tiny-llama` is a preset of that name already"),
        ("{name: opd, kind: opd, model: sft}", "stage opd: teachers: missing: an opd stage learns from teachers"),
        ("{name: opd, kind: opd, model: sft}", "(nearest: teachers: [sft])"),
        ("{name: rl, kind: rl, model: sft, teachers: [sft]}", "a stage of kind `rl` reads no teachers"),
        ("{name: rl, kind: rl, model: sft, tasks: 5}", "counts batches, not tasks"),
        (
            "{name: p, kind: pretrain, model: sft}",
            "pretraining starts from a preset, not from `sft` (nearest: kind: sft)",
        ),
        ("{name: a, kind: rl, model: a}", "a checkpoint cannot come before itself: a -> a"),
        (
            "{name: a, kind: rl, model: b}\n  - {name: b, kind: rl, model: a}",
            "stages.yaml:6: graph: a checkpoint cannot come before itself: ",
        ),
        (
            "{name: e, kind: evaluate, model: sft}\n  - {name: b, kind: rl, model: e}",
            "stage b: model: `e` evaluates and writes no checkpoint, nothing can come after it (nearest: sft)",
        ),
        ("{name: m, kind: reward_model, model: sft}\n  - {name: b, kind: rl, model: m}", "`m` is a reward model"),
        ("{name: b, kind: rl, model: sft, reward_model: sft}", "comes from a stage of kind `reward_model`"),
        ("{name: e, kind: evaluate, model: sft, reward_model: sft}", "asks no reward model (nearest: kind: rl)"),
        ("{name: r, kind: dpo, model: sft}", "dpo"),
        ("{name: R!, kind: rl, model: sft}", "graph[1].name"),
        (
            "{name: r, kind: rl, model: sft, teacher: [sft]}",
            "graph[1].teacher: unknown key (nearest: graph[1].teachers)",
        ),
        ("{name: o, kind: opd, model: sft, teachers: [sft]}", "nearest: set: {algorithm.advantage: distillation}"),
        ("{name: r, kind: rl, model: sft, set: {algorithm.advantage: distillation}}", "kind: opd with teachers"),
        ("{name: r, kind: rl, model: sft, set: {real.load: x}}", "real.load: a stage's inputs are what its graph says"),
        (
            "{name: r, kind: rl, model: sft, set: {model: {type: preset, name: tiny-llama}}}",
            "the key `model` of the stage",
        ),
        ("{name: r, kind: rl, model: sft, set: {real: {teachers: [x]}}}", "the key `teachers` of the stage"),
        (
            "{name: r, kind: rl, model: sft, set: {real.warmup.steps: 5}}",
            "starts from the weights of `sft` as they are",
        ),
        ("{name: s, kind: sft, model: sft, set: {real.warmup.steps: 0}}", "(nearest: real.warmup.steps: 400)"),
        ("{name: r, kind: rl, model: sft, set: {run.seeds: 3}}", "stage r: run.seeds"),
        (
            "{name: r, kind: rl, model: sft, set: {training: {tensor_parallel: 2}}}",
            "stages.yaml:6: stage r: training.tensor_parallel",
        ),
        (
            f"{{name: o, kind: opd, model: sft, teachers: [smollm2-135m], {OPD}}}",
            "teacher `smollm2-135m` has 49152 token ids and `sft` 128: they must share a tokenizer",
        ),
        (f"{{name: o, kind: opd, model: sft, teachers: {{sums: sft}}, {OPD}}}", "stage o: real.teachers"),
    ],
)
def test_what_cannot_be_is_refused_with_stage_and_line(tmp_path: Path, graph: str, said: str) -> None:
    message = refused(tmp_path, f"\n  - {SFT}\n  - {graph}\n")
    assert said in message, message


def test_faults_of_the_base_are_said_once(tmp_path: Path) -> None:
    graph = f"\n  - {SFT}\n  - {{name: rl, kind: rl, model: sft}}\n"
    message = refused(tmp_path, graph, base=BASE.replace("admission: {type: sync}", "admission: {type: snc}"))
    assert message.count("snc") == 1 and "stage" not in message and message.startswith("base.yaml:")


def test_overrides_of_what_the_graph_says_are_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, f"\n  - {SFT}\n", "real.teachers=[x]")
    assert message == (
        "--set real.teachers=[x]: real.teachers: a stage's inputs are what its graph says "
        "(nearest: the key `teachers` of the stage)"
    )


def test_other_kinds_of_files_are_told_apart(tmp_path: Path) -> None:
    file = write(tmp_path, f"\n  - {SFT}\n")
    assert is_stages(file) and not is_stages(tmp_path / "base.yaml") and not is_stages(tmp_path / "none.yaml")
    with pytest.raises(ScenarioError, match="this is a graph of training stages, not a scenario"):
        load_scenario(file)
    (tmp_path / "other.yaml").write_text(f"stages: other\nbase: stages.yaml\ngraph:\n  - {SFT}\n")
    with pytest.raises(ScenarioError, match="is a graph of stages itself; a base is a scenario"):
        load_stages(tmp_path / "other.yaml")
    with pytest.raises(ScenarioError, match="graph"):
        load_stages(write(tmp_path, " []\n"))
