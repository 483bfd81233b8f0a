"""Graphs of stages on the real backend: which stages run again, what is refused, and one small graph for real."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from real import stages as module
from real.engines.client import Generated
from real.environments import environment
from real.errors import RealError
from real.evaluate import Evaluator, _answer, scores_of
from real.models.tokenizer import CharTokenizer
from real.stages import StageFailed, digest_of, run_stages
from testbed.metrics.scores import Mean, Score, mean_of
from testbed.metrics.stages import StageResult
from testbed.scenario.stages import load_stages
from tests.real.test_cli_real import command_line
from tests.scenario.test_stages import OPD, write

GRAPH = f"""
  - {{name: sft, kind: sft, model: tiny-qwen3, set: {{real.warmup: {{steps: 2, batch_size: 4}}}}}}
  - {{name: plus, kind: rl, model: sft, set: {{workload.environment.operators: ["+"]}}}}
  - {{name: minus, kind: rl, model: sft, set: {{workload.environment.operators: ["-"]}}}}
  - {{name: student, kind: opd, model: sft, teachers: [plus, minus], {OPD}}}
  - {{name: score, kind: evaluate, model: student, tasks: 8}}
"""


class Quiet:
    """Remembers which stages had to run."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def began(self, stage: Any, steps: int) -> None:
        self.ran.append(stage.name)

    def doing(self, what: str) -> None: ...

    def progress(self, status: Any) -> None: ...


class Runs:
    """Stands for runs and evaluations: a run appends its name to the weights it started from."""

    def __init__(self) -> None:
        self.problem: dict[str, str] = {}
        self.batches = 10
        self.spoil: Path | None = None
        self.jobs: list[Any] = []

    def __call__(self, jobs: list[Any], **_: Any) -> list[Any]:
        [job] = jobs
        self.jobs.append(job)
        last = job.scenario.run.num_rollout
        if self.batches >= last and not self.problem.get(job.name):
            made = job.folder / "checkpoints" / f"step-{last}"
            start = Path(job.scenario.model.path).parent
            shutil.copytree(start, made)
            with (made / "model.safetensors").open("ab") as f:
                f.write(job.name.encode())
            (made / "trainer.json").write_text("{}")
            (made / "trainer").mkdir()
        if self.spoil is not None:
            (self.spoil / "model.safetensors").write_bytes(b"")
        rewards = [0.25] * min(self.batches, last)
        summary = SimpleNamespace(steps=[SimpleNamespace(learning={"teacher_kl": 0.5})] * len(rewards))
        problem, reason = self.problem.get(job.name, ""), "completed" if self.batches >= last else "tasks_exhausted"
        return [SimpleNamespace(problem=problem, rewards=rewards, summary=summary, finish_reason=reason)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(module, "run_jobs", made)
    score = [Score("", Mean(0.5, 0.4, 0.6, 8))]
    monkeypatch.setattr(Evaluator, "evaluate", lambda *_: score)
    return made


def go(folder: Path, *overrides: str, only: tuple[str, ...] = ()) -> tuple[dict[str, StageResult], list[str]]:
    stages = load_stages(write(folder, GRAPH), overrides)
    listener = Quiet()
    chosen = stages.needed_for(only) if only else stages.stages
    return {r.name: r for r in run_stages(stages, chosen, folder / "out", listener)}, listener.ran


@pytest.mark.backend("CORE")
def test_op_15_artefacts_are_named_checkpoints_that_later_stages_start_from(runs: Runs, tmp_path: Path) -> None:
    results, ran = go(tmp_path)
    assert ran == ["sft", "plus", "minus", "student", "score"]
    checkpoints = tmp_path / "out" / "checkpoints"
    assert {p.name for p in checkpoints.iterdir()} == {"sft", "plus", "minus", "student"}
    names = {p.name for p in (checkpoints / "student").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {"trainer", "trainer.json", "prepared.json"}, "weights alone: a stage has a fresh optimizer"
    weights = {p.name: (p / "model.safetensors").read_bytes() for p in checkpoints.iterdir()}
    assert weights["plus"] == weights["sft"] + b"plus" and weights["student"] == weights["sft"] + b"student"
    student = next(j.scenario for j in runs.jobs if j.name == "student")
    assert student.real.teachers == (str(checkpoints.resolve() / "plus"), str(checkpoints.resolve() / "minus"))
    assert student.real.load is None and student.real.save_interval == student.run.num_rollout
    assert results["plus"].first == Mean(0.25, 0.25, 0.25, 2) and results["student"].first is None, "no reward is read"
    assert results["student"].last_kl == Mean(0.5, 0.5, 0.5, 2) and results["student"].steps == 10
    assert results["student"].inputs == {n: digest_of(checkpoints / n) for n in ("sft", "plus", "minus")}
    assert not (tmp_path / "out" / "student" / "checkpoints").exists(), "one copy, under the stage's name"


@pytest.mark.backend("CORE")
def test_lm_03_a_stage_makes_the_reward_model_that_scores_another(runs: Runs, tmp_path: Path) -> None:
    graph = """
  - {name: sft, kind: sft, model: tiny-qwen3, set: {real.warmup: {steps: 2, batch_size: 4}}}
  - {name: judge, kind: reward_model, model: sft, set: {real.warmup: {steps: 2, batch_size: 4}}}
  - {name: rl, kind: rl, model: sft, reward_model: judge}
"""
    stages = load_stages(write(tmp_path, graph))
    _, judge, rl = run_stages(stages, stages.stages, tmp_path / "out", Quiet())
    folder = tmp_path / "out" / "checkpoints" / "judge"
    assert "Classification" in json.loads((folder / "config.json").read_text())["architectures"][0]
    assert (judge.steps, rl.inputs["judge"]) == (2, digest_of(folder)) and 0 <= (judge.accuracy or 0) <= 1
    assert runs.jobs[0].scenario.real.reward_model == str(folder.resolve())


@pytest.mark.backend("CORE")
def test_finished_stages_are_kept_and_a_change_runs_what_depends_on_it(runs: Runs, tmp_path: Path) -> None:
    first, _ = go(tmp_path)
    again, ran = go(tmp_path)
    assert ran == [] and all(r.kept for r in again.values())
    for r in again.values():
        r.kept = False
    assert again == first
    file = tmp_path / "stages.yaml"

    changed = GRAPH.replace('operators: ["-"]}', 'operators: ["-"], real.optimizer.lr: 0.5}')
    stages = load_stages(write(tmp_path, changed))
    listener = Quiet()
    # the stand-in's weights do not depend on the learning rate: what reads them sees no change
    list(run_stages(stages, stages.stages, tmp_path / "out", listener))
    assert listener.ran == ["minus"]

    (tmp_path / "out" / "checkpoints" / "plus" / "model.safetensors").write_bytes(b"torn")
    file.unlink()
    _, ran = go(tmp_path, "real.optimizer.lr=0.5", only=("plus",))
    assert ran == ["sft", "plus"], "another scenario; its weights were torn as well"
    _, ran = go(tmp_path, "real.optimizer.lr=0.5", "run.seed=7")
    assert ran == ["sft", "plus", "minus", "student", "score"]


@pytest.mark.backend("CORE")
def test_a_torn_checkpoint_is_made_again(runs: Runs, tmp_path: Path) -> None:
    go(tmp_path)
    (tmp_path / "out" / "checkpoints" / "plus" / "model.safetensors").write_bytes(b"torn")
    results, ran = go(tmp_path)
    assert ran == ["plus"] and not results["plus"].kept and results["student"].kept


@pytest.mark.backend("CORE")
def test_an_interrupted_stage_starts_over_and_those_before_it_are_kept(runs: Runs, tmp_path: Path) -> None:
    runs.problem = {"minus": "interrupted"}
    with pytest.raises(StageFailed, match="stage minus: interrupted") as caught:
        go(tmp_path)
    assert caught.value.interrupted
    runs.problem = {"minus": "nothing happened for 60 s"}
    with pytest.raises(StageFailed, match="stage minus: nothing happened for 60 s") as caught:
        go(tmp_path)
    assert not caught.value.interrupted
    runs.problem = {}
    _, ran = go(tmp_path)
    assert ran == ["minus", "student", "score"]


@pytest.mark.backend("CORE")
def test_ctrl_c_and_an_error_name_the_stage(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: BaseException) -> None:
        def evaluate(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(Evaluator, "evaluate", evaluate)

    fails(KeyboardInterrupt())
    with pytest.raises(StageFailed, match="stage score: interrupted") as caught:
        go(tmp_path)
    assert caught.value.interrupted
    fails(RealError("no port is free"))
    with pytest.raises(RealError, match="stage score: no port is free"):
        go(tmp_path)


@pytest.mark.backend("CORE")
def test_a_run_that_ends_before_its_last_batch_is_no_stage(runs: Runs, tmp_path: Path) -> None:
    runs.batches = 3
    with pytest.raises(
        StageFailed, match=r"ended after 3 of 10 batches \(tasks_exhausted\) \(nearest: run.num_rollout: 3\)"
    ):
        go(tmp_path)


@pytest.mark.backend("CORE")
def test_op_09_a_teacher_that_changes_while_it_teaches_is_noticed(runs: Runs, tmp_path: Path) -> None:
    go(tmp_path, only=("plus", "minus"))
    runs.spoil = tmp_path / "out" / "checkpoints" / "minus"
    with pytest.raises(StageFailed, match="stage student: the files of minus changed while it read them"):
        go(tmp_path)


@pytest.mark.backend("CORE")
@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ("{name: p, kind: pretrain, model: smollm2-135m}", "stage p: smollm2-135m has been trained already"),
        ("{name: r, kind: rl, model: Qwen2.5-0.5B}", "stage r: no model 'Qwen2.5-0.5B'"),
        (
            "{name: s, kind: rl, model: sft, set: {workload.environment: {type: reasoning_gym, dataset: chain_sums}}}",
            "stage s: .*chain_sums",
        ),
    ],
)
def test_what_cannot_start_is_said_before_anything_runs(runs: Runs, tmp_path: Path, graph: str, said: str) -> None:
    graph = f"\n  - {{name: sft, kind: sft, model: tiny-qwen3}}\n  - {graph}\n"
    stages = load_stages(write(tmp_path, graph), ["real.warmup.steps=2", "cluster.gpu=H100"])
    listener = Quiet()
    with pytest.raises(RealError, match=said):
        list(run_stages(stages, stages.stages, tmp_path / "out", listener))
    assert listener.ran == [] and not (tmp_path / "out").exists()


@pytest.mark.backend("CORE")
def test_scores_are_means_over_tasks_and_kls_over_tokens() -> None:
    def answered(kind: str, reward: float, mask: list[bool]) -> Any:
        return SimpleNamespace(task=SimpleNamespace(kind=kind), reward=reward, mask=mask)

    done = [answered("a", 1.0, [True, False, True]), answered("a", 0.0, [True]), answered("b", 1.0, [True])]
    whole, a, b = scores_of(done, [0.6, -0.3, 0.5])
    assert (whole.kind, a.kind, b.kind) == ("", "a", "b")
    assert whole.reward == mean_of([1.0, 0.0, 1.0]) and a.reward.mean == 0.5 and b.reward.mean == 1.0
    assert (whole.kl, a.kl, b.kl) == (pytest.approx(0.8 / 4), pytest.approx(0.3 / 3), pytest.approx(0.5))
    assert [s.kl for s in scores_of(done, [None] * 3)] == [None] * 3
    assert [s.kind for s in scores_of(done[:2], [None] * 2)] == [""], "one kind needs no row of its own"


class Scripted:
    """An engine that says what it is told, and remembers what it was asked."""

    def __init__(self, *texts: str) -> None:
        self.texts = [CharTokenizer().encode(t) for t in texts]
        self.asked: list[list[int]] = []

    async def generate(self, *, input_ids: list[int], **_: Any) -> Generated:
        ids = self.texts[len(self.asked)]
        self.asked.append(list(input_ids))
        n = len(ids)
        return Generated(ids, [-0.5] * n, (("0", 0, n),), 0, len(input_ids), "stop", None, None, None, 0)


@pytest.mark.backend("CORE")
def test_er_13_an_evaluation_keeps_the_ids_of_every_turn_and_tool_answer(tmp_path: Path) -> None:
    """`8+3=` by way of the tool: the second prompt is the first, what was sampled, and what the tool said, as ids."""
    graph = "\n  - {name: e, kind: evaluate, model: tiny-qwen3, set: {workload.environment: {type: calculator}}}\n"
    [stage] = load_stages(write(tmp_path, graph)).stages
    world = environment(
        stage.scenario.workload.environment,  # type: ignore[union-attr]
        tokenizer=CharTokenizer(),
        members=1,
        seed=0,
    )
    task = world.draw()
    assert task is not None
    [(expression, result)] = task.payload
    engine = Scripted(f"<tool>{expression}</tool>", f"{result}<eos>")

    async def answer() -> Any:
        try:
            return await _answer(stage.scenario, engine, world, task)  # type: ignore[arg-type]
        finally:
            await world.close()

    c = asyncio.run(answer())
    observed = CharTokenizer().encode(f"<obs>{result}</obs>")
    assert engine.asked == [list(task.prompt_ids), [*task.prompt_ids, *engine.texts[0], *observed]]
    assert c.reward == 1.0
    assert c.mask == [True] * len(engine.texts[0]) + [False] * len(observed) + [True] * len(engine.texts[1])
    assert world.processes() == []  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SFT of three steps, a student that one teacher taught for a batch, an evaluation, on the command line."""
    folder = tmp_path_factory.mktemp("stages")
    graph = f"""
  - {{name: teacher, kind: pretrain, model: tiny-qwen3, set: {{real.warmup: {{steps: 30, batch_size: 16}}}}}}
  - {{name: student, kind: opd, model: tiny-qwen3, teachers: {{arithmetic: teacher}}, {OPD}}}
  - {{name: score, kind: evaluate, model: student, tasks: 12, teachers: [teacher]}}
"""
    write(folder, graph)
    sets = ("run.num_rollout=2", "run.warmup_steps=1", "real.optimizer.lr=0.01")
    args = [x for o in sets for x in ("--set", o)]
    done = command_line("real", "stages.yaml", "--out", "out", "--json", "done.json", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    again = command_line("real", "stages.yaml", "--out", "out", *args, cwd=folder)
    assert again.returncode == 0, again.stderr
    (folder / "said-again").write_text(again.stdout)
    return folder


def test_op_09_only_the_student_is_trained_and_the_teacher_is_byte_equal(ran: Path) -> None:
    from safetensors.numpy import load_file

    results = {r["name"]: r for r in json.loads((ran / "done.json").read_text())["results"]}
    teacher = ran / "out" / "checkpoints" / "teacher"
    assert results["student"]["inputs"]["teacher"] == results["teacher"]["weights"] == digest_of(teacher)
    weights = {n: load_file(ran / "out" / "checkpoints" / n / "model.safetensors") for n in ("teacher", "student")}
    assert weights["student"].keys() == weights["teacher"].keys()
    assert any((weights["student"][k] != weights["teacher"][k]).any() for k in weights["student"])
    losses = [json.loads(line) for line in (ran / "out" / "student" / "training.jsonl").read_text().splitlines()]
    assert len(losses) == 2 and all(u["stats"]["grad_norm"] > 0 for u in losses)
    assert results["student"]["first_kl"]["mean"] > 0 and results["student"]["first"] is None


def test_op_15_transformers_load_every_checkpoint_and_it_is_the_one_that_was_trained(ran: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("teacher", "student"):
        model = AutoModelForCausalLM.from_pretrained(ran / "out" / "checkpoints" / name)
        assert model.config.vocab_size == 128
    start = yaml_of(ran / "out" / "student" / "scenario.yaml")
    assert start["real"]["teachers"] == {"arithmetic": str(ran / "out" / "checkpoints" / "teacher")}


def test_op_08_the_same_command_keeps_what_is_finished(ran: Path) -> None:
    lines = [line for line in (ran / "said-again").read_text().splitlines() if line.startswith("[")]
    assert len(lines) == 3 and all("kept, its inputs are the same" in line for line in lines)
    first = [line for line in (ran / "said").read_text().splitlines() if line.startswith("[")]
    assert not any("kept" in line for line in first)
    page = (ran / "out" / "index.html").read_text()
    assert 'href="student/report/index.html"' in page and (ran / "out" / "student" / "report" / "index.html").is_file()


def test_an_evaluation_measures_reward_and_kl_of_held_out_tasks(ran: Path) -> None:
    [score] = json.loads((ran / "out" / "score" / "stage.json").read_text())["scores"]
    assert score["reward"]["n"] == 12 and 0 <= score["reward"]["low"] <= score["reward"]["high"] <= 1
    assert score["kl"] is not None and score["kl"] > 0, "the student has not become its teacher in two batches"


def yaml_of(path: Path) -> Any:
    import yaml

    return yaml.safe_load(path.read_text())
