"""Environments of real runs: what is refused, with the nearest thing that works, and that it does work."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.scenario.errors import ScenarioError
from testbed.scenario.load import load_scenario

FILE = """\
cluster: {gpu: CPU, nodes: 1}
model: {type: preset, name: tiny-qwen3}
workload:
  type: lengths
  environment:
    type: prefixes
    environment: {type: calculator, operations: 3, max_turns: 4}
    sources: [{demonstrations: 16}]
  prompt: {type: fixed, tokens: 13}
  reply: {type: uniform, low: 2, high: 8}
  max_response_length: 12
algorithm: {advantage: distillation, n_samples_per_prompt: 2, rollout_batch_size: 4}
placement: {mode: disaggregated, rollout_num_gpus: 1, actor_num_gpus: 1}
rollout: {engine: {weight_precision: fp32, context_length: 256, max_total_num_tokens: 4096}, admission: {type: sync}}
training: {precision: fp32}
weights:
  path: {type: fixed, update_weight_transfer_mode: broadcast}
  transition: {pause_generation_mode: retract, kv: flush}
run: {num_rollout: 3, warmup_steps: 0}
"""
SUMS = "{name: sums, environment: {type: arithmetic}}"
AGENT = "{name: agent, environment: {type: calculator, operations: 3, max_turns: 4}}"
BOTH = f"{{type: mixture, tasks: [{SUMS}, {AGENT}]}}"
E = "workload.environment"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    (tmp_path / "teacher.parquet").write_text("whether it is one is seen when it is read")
    return path


REFUSED = {
    "a kind without a teacher": (
        (f"{E}={BOTH}", "real.teachers={sums: a}"),
        "real.teachers: no teacher is assigned to tasks of kind `agent`; kinds with one: sums "
        "(nearest: real.teachers.agent: a)",
        ("real.teachers.agent=a",),
    ),
    "a teacher of no kind": (
        ("real.teachers={calculator: a, calculater: b}",),
        "real.teachers.calculater: no task is of kind `calculater`; kinds: calculator (nearest: calculator)",
        ("real.teachers=[a]",),
    ),
    "teachers that are a word": (
        ("real.teachers=a",),
        "real.teachers: expected a list or a mapping, got `a`",
        ("real.teachers=[a]",),
    ),
    "a teacher that is a number": (
        ("real.teachers={calculator: 3}",),
        "real.teachers.calculator: Input should be a valid string, got `3`",
        ("real.teachers={calculator: a}",),
    ),
    "a list of numbers": (
        ("real.teachers=[3]",),
        "real.teachers[0]: Input should be a valid string, got `3`",
        ("real.teachers=[a]",),
    ),
    "two parts of one name": (
        (f"{E}={{type: mixture, tasks: [{SUMS}, {SUMS}]}}",),
        f"{E}.tasks[1].name: two parts are called `sums`, and a part's name is the kind of its tasks "
        "(nearest: name: sums_2)",
        (f"{E}={BOTH}",),
    ),
    "a mixture of nothing": (
        (f"{E}={{type: mixture, tasks: []}}",),
        f"{E}.tasks: a mixture of nothing has no tasks (nearest: tasks: [{SUMS}])",
        (f"{E}={{type: mixture, tasks: [{SUMS}]}}",),
    ),
    "a mixture in a mixture": (
        (f"{E}={{type: mixture, tasks: [{{name: a, environment: {BOTH}}}]}}",),
        f"{E}.tasks[0].environment.type: unknown type `mixture`; one of arithmetic, reasoning_gym, gsm8k, calculator",
        (f"{E}={BOTH}",),
    ),
    "a file that is not there": (
        (f"{E}.sources=[{{file: teecher.parquet}}]",),
        "/teecher.parquet (nearest: file: teacher.parquet)",
        (f"{E}.sources=[{{file: teacher.parquet}}]",),
    ),
    "a file of which kind": (
        (f"{E}.environment={BOTH}", f"{E}.sources=[{{file: teacher.parquet}}]"),
        f"{E}.sources[0].kind: tasks are of 2 kinds, and a file does not say of which its rollouts are "
        "(nearest: kind: sums or agent)",
        (f"{E}.sources=[{{file: teacher.parquet, kind: agent}}]",),
    ),
    "a source of no kind": (
        (f"{E}.sources=[{{demonstrations: 4, kind: calculater}}]",),
        f"{E}.sources[0].kind: no task is of kind `calculater`; kinds: calculator (nearest: kind: calculator)",
        (f"{E}.sources=[{{demonstrations: 4, kind: calculator}}]",),
    ),
    "no source": (
        (f"{E}.sources=[]",),
        f"{E}.sources: without a source there is no history to start from (nearest: {E}.sources: "
        f"[{{demonstrations: 64}}], or {E}.full_share: 1)",
        (f"{E}.full_share=1",),
    ),
    "a source that is two things": (
        (f"{E}.sources=[{{demonstrations: 4, file: teacher.parquet}}]",),
        f"{E}.sources[0]: give exactly one of `file` and `demonstrations` (nearest: demonstrations: 64)",
        (f"{E}.sources=[{{demonstrations: 64}}]",),
    ),
    "dialogues of one turn": (
        (f"{E}.environment={{type: arithmetic}}",),
        f"{E}.sources: these demonstrations have one turn each: between question and answer there is no history to "
        f"start from (nearest: {E}.environment: {{type: calculator, operations: 3, max_turns: 4}}, or "
        f"{E}.full_share: 1)",
        (f"{E}.environment={{type: calculator, operations: 3, max_turns: 4}}",),
    ),
    "a turn after the last": (
        (f"{E}.after=[2, 4]",),
        f"{E}.after: the longest demonstration has 4 turns: a fresh turn can follow 1 to 3 of them, not 4 "
        f"(nearest: {E}.after: [3])",
        (f"{E}.after=[2, 3]",),
    ),
    "a turn after nothing": (
        (f"{E}.after=[0]",),
        f"{E}.after[0]: Input should be greater than 0, got `0`",
        (f"{E}.after=[1]",),
    ),
    "a reward in the middle": (
        ("algorithm.advantage=group_with_distillation",),
        "algorithm.advantage: `group_with_distillation` needs a reward for every fresh turn, and one in the middle of "
        f"a dialogue has none (nearest: algorithm.advantage: distillation, or {E}.after: [3], or {E}.full_share: 1)",
        (f"{E}.after=[3]",),
    ),
    "a reward of somebody's rollout": (
        ("algorithm.advantage=group", f"{E}.sources=[{{file: teacher.parquet}}]"),
        "algorithm.advantage: `group` needs a reward for every fresh turn, and one that goes on from a recorded "
        f"rollout has none (nearest: algorithm.advantage: distillation, or {E}.full_share: 1)",
        ("algorithm.advantage=distillation",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_op_12_and_op_10_refused_with_what_works_instead(file: Path, case: str) -> None:
    overrides, message, mended = REFUSED[case]
    with pytest.raises(ScenarioError) as refused:
        load_scenario(file, overrides, simulated=False)
    assert message in str(refused.value)
    assert len(refused.value.faults) == 1, "one fault, one message"
    load_scenario(file, (*overrides, *mended), simulated=False)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("real.teachers={}",),
        ("real.teachers=[a, b]",),
        (f"{E}.environment={BOTH}", "real.teachers={sums: a, agent: b}", f"{E}.sources=[{{demonstrations: 9}}]"),
        (f"{E}={BOTH}", "algorithm.advantage=group", "real.teachers={sums: a, agent: a}"),
        (f"{E}.full_share=1", "algorithm.advantage=group"),
        (f"{E}=null", "real.teachers={planned: a}"),
    ],
)
def test_what_is_no_fault(file: Path, overrides: tuple[str, ...]) -> None:
    load_scenario(file, overrides, simulated=False)
