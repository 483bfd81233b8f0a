"""Runs a graph of training stages, one after another: checkpoints in, a checkpoint out, each under its stage's name.

Responsible for which stages have to run (a finished one whose inputs are the same is kept), for what a stage starts
from and leaves behind, and for checking that what was only read has not changed. Every stage starts with a fresh
optimizer. It refuses to know how a run works, the command line and reports."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from real.deployment import cache_folder, environment_of, model_of
from real.driver import Status
from real.errors import RealError
from real.evaluate import Evaluator
from real.models.prepare import PreparedModel, prepare_model
from real.models.presets import PRESETS, TINY
from real.models.reward_model import RewardTraining, train_reward_model
from real.run import CHECKPOINTS as OF_RUN
from real.run import versions
from real.session import LOGS, Job, run_jobs
from testbed.metrics import stages as told
from testbed.metrics.stages import StagePlan, StageResult
from testbed.run_files import SCENARIO
from testbed.scenario import Scenario
from testbed.scenario.load import dump_scenario
from testbed.scenario.stages import Stage, Stages

MADE = "made"
"""Where a stage's own folder has what it made until it is given its name."""
NOT_WEIGHTS = ("trainer.json", "prepared.json", "reward_model.json")
"""Files of a checkpoint that say how its run went: a later stage starts from weights alone."""


class StageFailed(Exception):
    """A stage did not come to its end. `interrupted`: by Ctrl-C."""

    def __init__(self, stage: str, reason: str, *, interrupted: bool = False) -> None:
        super().__init__(f"stage {stage}: {reason}")
        self.stage = stage
        self.interrupted = interrupted


class Listener(Protocol):
    """Hears what is being done."""

    def began(self, stage: Stage, steps: int) -> None:
        """A stage that has to run starts, with at most so many steps."""

    def doing(self, what: str) -> None:
        """What it is bringing up, in words."""

    def progress(self, status: Status) -> None:
        """Where its run stands."""


def plan_of(stages: Stages) -> list[StagePlan]:
    """The graph as reports read it."""
    plans = []
    for s in stages.stages:
        teachers = s.teachers if isinstance(s.teachers, dict) else {str(i): t for i, t in enumerate(s.teachers)}
        lineage = list(stages.lineage(s.name))
        plans.append(StagePlan(s.name, s.kind, s.model, teachers, lineage, s.reward_model or "", s.note))
    return plans


def run_stages(stages: Stages, chosen: Sequence[Stage], out: Path, listener: Listener) -> Iterator[StageResult]:
    """Run `chosen` (in order, with all that they read among them) and yield each stage's result as it is done; `kept`
    says that it was finished before.

    Writes `out/NAME/` (a run folder, and `stage.json` when it is finished) and `out/checkpoints/NAME` of each. Raises
    `RealError` for what cannot start, `StageFailed` for a stage that did not come to its end; those before it stay.
    """
    for stage in chosen:
        try:
            _check(stage, stages)
        except RealError as error:
            raise RealError(f"stage {stage.name}: {error}") from None
    checkpoints = (out / told.CHECKPOINTS).resolve()
    folders = {s.name: checkpoints / s.name for s in stages.stages}
    evaluator = Evaluator()
    try:
        for stage in chosen:
            inputs = folders | {name: _outside(name, stages) for name in stage.reads if name not in folders}
            if stage.trains:
                evaluator.close()  # its memory is the run's now
            try:
                result = _run_or_keep(stage, stages, out, inputs, evaluator, listener)
            except KeyboardInterrupt:
                raise StageFailed(stage.name, "interrupted", interrupted=True) from None
            except RealError as error:
                raise RealError(f"stage {stage.name}: {error}") from error
            yield result
    finally:
        evaluator.close()


def _check(stage: Stage, stages: Stages) -> None:
    """What can be known before the first stage runs: the models and the tasks are there."""
    if stage.kind == "pretrain" and stage.model not in TINY:
        what = f"{stage.model} has been trained already, and pretraining starts from random weights"
        raise RealError(f"{what} (nearest: kind: sft, or model: {TINY[0]})")
    environment_of(stage.scenario, stages.base_dir, _bare(stage.scenario, stages.base_dir))
    for name in stage.reads:
        if name not in stages.by_name:
            _outside(name, stages)


def _bare(scenario: Scenario, base_dir: Path) -> PreparedModel:
    """The scenario's model without a warm-up."""
    none = scenario.real.warmup.model_copy(update={"steps": 0})
    real = scenario.real.model_copy(update={"warmup": none})
    return model_of(scenario.model_copy(update={"real": real}), base_dir)


def _outside(name: str, stages: Stages) -> Path:
    """Folder of a model that no stage makes."""
    path = name if name in PRESETS else str((stages.model_dir / name).resolve())
    return prepare_model(path, cache_folder(), 0).path.resolve()


def _run_or_keep(
    stage: Stage,
    stages: Stages,
    out: Path,
    folders: Mapping[str, Path],
    evaluator: Evaluator,
    listener: Listener,
) -> StageResult:
    scenario = stage.with_inputs(folders)
    start = _bare(scenario, stages.base_dir).path
    read = {stage.model: start, **{name: folders[name] for name in stage.reads}}
    before = {name: digest_of(folder) for name, folder in read.items()}
    key = _key(stage, stages, before)
    folder, checkpoint = out / stage.name, folders[stage.name]
    known = told.read_stage(folder)
    if known is not None and known.key == key and (not stage.trains or _is(checkpoint, known.weights)):
        known.kept = True
        return known
    if (folder / SCENARIO).is_file():  # what an earlier stage of this name left; there is nothing else in it
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCENARIO).write_text(dump_scenario(scenario), encoding="utf-8")
    result = StageResult(stage.name, stage.kind, key, stage.model, list(stage.reads), note=stage.note, inputs=before)
    started = time.monotonic()
    if stage.kind in ("pretrain", "sft"):
        made = _supervise(stage, scenario, stages, result, listener)
    elif stage.kind == "reward_model":
        made = _reward_model(stage, scenario, stages, folder, result, listener)
    elif stage.kind == "evaluate":
        listener.began(stage, 0)
        log = folder.resolve() / LOGS / "engine-0.log"
        result.scores = evaluator.evaluate(scenario, stages.base_dir, stage.tasks, log, listener.doing)
        made = None
    else:
        made = _run(stage, scenario, stages, folder, result, listener)
    if made is not None:
        _publish(made, checkpoint)
        result.checkpoint = f"{told.CHECKPOINTS}/{stage.name}"
        result.weights = digest_of(checkpoint)
        if made == folder / MADE or (stage.kind in ("rl", "opd") and scenario.real.save_interval is None):
            shutil.rmtree(made)  # it has its name now
            if not any(made.parent.iterdir()):
                made.parent.rmdir()
    result.seconds = time.monotonic() - started
    changed = [name for name, there in read.items() if digest_of(there) != before[name]]
    if changed:
        raise StageFailed(stage.name, f"the files of {', '.join(changed)} changed while it read them")
    told.write_result(folder / told.STAGE, result)
    return result


# --- kinds of stages --------------------------------------------------------------------------------------------------


def _supervise(stage: Stage, scenario: Scenario, stages: Stages, result: StageResult, listener: Listener) -> Path:
    """On the environment's demonstrations, by the warm-up machinery and its cache."""
    listener.began(stage, scenario.real.warmup.steps)
    listener.doing(f"learning from demonstrations, at most {scenario.real.warmup.steps} steps")
    prepared = model_of(scenario, stages.base_dir)
    trained = prepared.warmup
    assert trained is not None
    result.steps, result.answer_probability = trained.steps, trained.probability
    notes = [stage.note] if stage.note else []
    if not trained.reached:
        notes.append(f"target {scenario.real.warmup.target:g} not reached")
    if prepared.cached:
        notes.append("weights from the cache")
    result.note = "; ".join(notes)
    return prepared.path


def _reward_model(
    stage: Stage, scenario: Scenario, stages: Stages, folder: Path, result: StageResult, listener: Listener
) -> Path:
    """On pairs of right and wrong responses; length, batch and learning rate are those of `real.warmup`."""
    o = scenario.real.warmup
    listener.began(stage, o.steps)
    listener.doing(f"learning which responses are right, {o.steps} steps")
    start = _bare(scenario, stages.base_dir)
    environment = environment_of(scenario, stages.base_dir, start)
    options = RewardTraining(o.steps, o.batch_size, o.lr, scenario.run.seed)
    fit = train_reward_model(start.path, folder / MADE, environment, options)
    result.steps, result.accuracy = fit.steps, fit.accuracy
    return folder / MADE


def _run(
    stage: Stage, scenario: Scenario, stages: Stages, folder: Path, result: StageResult, listener: Listener
) -> Path:
    """A real run; returns its last checkpoint."""
    last, interval = scenario.run.num_rollout, scenario.real.save_interval
    if interval is None or last % interval:
        scenario = scenario.model_copy(update={"real": scenario.real.model_copy(update={"save_interval": last})})
    listener.began(stage, last)
    found = run_jobs(
        [Job(scenario, stages.base_dir, folder, stage.name)],
        stage=listener.doing,
        progress=lambda _, status: listener.progress(status),
        done=lambda _index, _measured: None,
    )
    problem = found[0].problem if found else "interrupted"
    if problem:
        raise StageFailed(stage.name, problem, interrupted=problem == "interrupted")
    done = found[0].summary.steps
    made = folder / OF_RUN / f"step-{last}"
    if not made.is_dir():
        what = f"ended after {len(done)} of {last} batches ({found[0].finish_reason})"
        raise StageFailed(stage.name, f"{what} (nearest: run.num_rollout: {max(len(done), 1)})")
    result.steps = len(done)
    if "reward" in scenario.algorithm.signals and (ends := told.fifths(found[0].rewards)):
        result.first, result.last = ends
    if ends := told.fifths([s.learning["teacher_kl"] for s in done if "teacher_kl" in s.learning]):
        result.first_kl, result.last_kl = ends
    return made


# --- checkpoints and keys ---------------------------------------------------------------------------------------------


def _publish(made: Path, checkpoint: Path) -> None:
    """The weights of `made` as a model folder that is there as a whole or not at all."""
    new = checkpoint.with_name(f".{checkpoint.name}.tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for file in made.iterdir():
        if file.is_file() and file.name not in NOT_WEIGHTS:
            shutil.copyfile(file, new / file.name)
    shutil.rmtree(checkpoint, ignore_errors=True)
    new.rename(checkpoint)


def digest_of(folder: Path) -> str:
    """SHA-256 over the files of a model folder: names and bytes."""
    parts = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.is_file() and p.name not in NOT_WEIGHTS):
        with file.open("rb") as f:
            parts.update(file.name.encode() + hashlib.file_digest(f, "sha256").digest())
    return parts.hexdigest()


def _is(checkpoint: Path, digest: str) -> bool:
    return checkpoint.is_dir() and digest_of(checkpoint) == digest


def _key(stage: Stage, stages: Stages, inputs: Mapping[str, str]) -> str:
    """Equal for equal scenarios, equal weights of all that is read, equal files and equal packages."""
    tree = stage.scenario.model_dump(mode="json", exclude={"name", "question", "model"})
    del tree["real"]["ray_address"]
    files = {}
    for name in _words(tree["workload"]):
        file = stages.base_dir / name
        if file.is_file():
            files[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    taught = stage.teachers if isinstance(stage.teachers, dict) else list(stage.teachers)
    facts = [stage.kind, stage.tasks, stage.model, taught, stage.reward_model, tree, dict(inputs), files, versions()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _words(value: Any) -> Iterator[str]:
    """Every text in plain data that may be the name of a file."""
    if isinstance(value, str):
        if value and len(value) < 1024 and "\n" not in value:
            yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _words(inner)
