"""Training stages as a graph of named checkpoints: pretrain, SFT, RL, on-policy distillation, evaluation, in an order
that the goal decides.

Each stage names the ONE model that it trains a copy of (`model`) and writes a checkpoint under its own name. Teachers
are information: read, never trained. Knows the file and what a sound graph is. It refuses to know how a stage is run
and where checkpoints lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from testbed.scenario import fields, rules, source
from testbed.scenario.base import PositiveInt, Section
from testbed.scenario.catalogue import CatalogueError, model_names, model_spec
from testbed.scenario.errors import Fault, ScenarioError
from testbed.scenario.load import build, in_order, place_of, with_overrides
from testbed.scenario.model import ConfigJsonModel, ModelConfig, PresetModel
from testbed.scenario.scenario import Scenario
from testbed.scenario.source import Source
from testbed.scenario.study import base_of, leaves, places_below

__all__ = ["Stage", "Stages", "StagesFile", "is_stages", "load_stages"]

Kind = Literal["pretrain", "sft", "rl", "opd", "reward_model", "evaluate"]
DEMONSTRATED = ("pretrain", "sft", "reward_model")
"""Kinds that learn from the environment's demonstrations; no engine generates."""
TEACHABLE = ("opd", "evaluate")
"""Kinds that may read teachers."""
EVALUATED_TASKS = 256

Teachers = tuple[str, ...] | dict[str, str]


class StageFile(Section):
    """One stage: a node of the graph, and the checkpoint of the same name."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    kind: Kind
    """`pretrain` (a preset's random weights) and `sft`: supervised on the environment's demonstrations, by
    `real.warmup`; `rl`: rewards; `opd`: on-policy distillation from `teachers`; `reward_model`: a model that scores
    responses; `evaluate`: measures rewards on held-out tasks, trains nothing."""
    model: str
    """What it trains a copy of: another stage, a preset, or a model folder relative to this file."""
    teachers: Teachers = ()
    """Stages, presets or folders whose probabilities are read (`opd`; `evaluate`: to measure the KL). A list: task i is
    taught by teacher i modulo their number; a mapping: kind of task -> teacher."""
    reward_model: str | None = None
    """A stage of kind `reward_model`, or a folder: it scores the responses (`rl`, `opd`); null: the environment's
    verifier."""
    tasks: PositiveInt | None = None
    """`evaluate`: held-out tasks, one response each; null: 256."""
    note: str = ""
    """For the report."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys or nested sections of the scenario that differ from the base."""


class StagesFile(Section):
    """What a file of stages holds."""

    stages: Annotated[str, Field(min_length=1)]
    """Name of the whole."""
    question: str = ""
    base: dict[str, Any] | str
    """A scenario, or the path of one relative to this file, that every stage changes. Its `model` is not read: stages
    name theirs."""
    graph: Annotated[tuple[StageFile, ...], Field(min_length=1)]
    """In any order; together without a cycle."""


@dataclass(frozen=True)
class Stage:
    """One stage that is ready to run once its inputs are there."""

    name: str
    kind: Kind
    model: str
    teachers: Teachers
    reward_model: str | None
    tasks: int
    note: str
    scenario: Scenario
    """With the model that its ancestors began with, and no teachers: `with_inputs` puts in the actual ones."""
    remarks: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        return self.kind != "evaluate"

    @property
    def reads(self) -> tuple[str, ...]:
        """Models that are information only: teachers and the reward model, each once."""
        return tuple(dict.fromkeys((*_named(self.teachers), *([self.reward_model] if self.reward_model else ()))))

    def with_inputs(self, folders: Mapping[str, Path]) -> Scenario:
        """The scenario with the model folders of `model` (if it is among them: presets need none) and of the others."""
        teachers: Any = (
            {kind: str(folders[name]) for kind, name in self.teachers.items()}
            if isinstance(self.teachers, dict)
            else tuple(str(folders[name]) for name in self.teachers)
        )
        reward_model = str(folders[self.reward_model]) if self.reward_model else None
        real = self.scenario.real.model_copy(update={"teachers": teachers, "reward_model": reward_model})
        update: dict[str, Any] = {"name": self.name, "real": real}
        if self.model in folders:
            update["model"] = ConfigJsonModel(path=str(folders[self.model] / "config.json"), name=self.model)
        return self.scenario.model_copy(update=update)


@dataclass(frozen=True)
class Stages:
    """A checked graph."""

    name: str
    question: str
    stages: tuple[Stage, ...]
    """Each after all that it reads, evaluations last; otherwise in the order of the file."""
    base_dir: Path
    """What file names in the scenarios are relative to."""
    model_dir: Path
    """What model folders in `model` and `teachers` are relative to: the folder of the file."""

    @cached_property
    def by_name(self) -> dict[str, Stage]:
        return {s.name: s for s in self.stages}

    def inputs(self, stage: Stage) -> tuple[str, ...]:
        """The stages whose checkpoints it reads."""
        return tuple(n for n in dict.fromkeys((stage.model, *stage.reads)) if n in self.by_name)

    def lineage(self, name: str) -> tuple[str, ...]:
        """The stages that trained the weights of this checkpoint, first to last; what only taught is not among them."""
        stage = self.by_name.get(name)
        return () if stage is None else (*self.lineage(stage.model), *((name,) if stage.trains else ()))

    def needed_for(self, names: Sequence[str]) -> tuple[Stage, ...]:
        """These stages and all that they are made of, in order."""
        wanted = set(names)
        for stage in reversed(self.stages):
            if stage.name in wanted:
                wanted |= set(self.inputs(stage))
        return tuple(s for s in self.stages if s.name in wanted)


def is_stages(path: str | Path) -> bool:
    """Whether the file has a top-level key `stages`. False for files that cannot be read: reading them tells why."""
    try:
        return "stages" in source.read(Path(path)).data
    except ScenarioError:
        return False


def load_stages(path: str | Path, overrides: Sequence[str] = ()) -> Stages:
    """Read a graph of stages and check it and the scenario of every stage. `overrides` hold for all stages and win over
    what a stage sets.

    Raises `ScenarioError`: wrong keys, a graph that cannot be, impossible scenarios (each fault says of which stage).
    """
    path = Path(path)
    written = source.read(path)
    file = build(written, StagesFile)
    base, base_dir = base_of(file.base, written, path)
    faults = [*_graph_faults(file, written, path.parent), *_taken_keys(file, written, overrides)]
    if faults:
        raise ScenarioError(in_order(faults))
    order = _order(file, written)
    stages: list[Stage] = []
    found: dict[Fault, list[str]] = {}
    origins = _origins(file, path.parent)
    for i in order:
        try:
            stages.append(_stage(file, i, written, base, base_dir, overrides, origins))
        except ScenarioError as error:
            for fault in error.faults:
                found.setdefault(fault, []).append(file.graph[i].name)
    for fault, names in found.items():
        if len(names) == len(file.graph):
            faults.append(fault)
        else:
            faults += [Fault(f"stage {n}: {fault.key}", fault.what, fault.nearest, fault.where) for n in names]
    if faults:
        raise ScenarioError(in_order(faults))
    return Stages(file.stages, file.question, tuple(stages), base_dir, path.parent)


def _named(teachers: Teachers) -> tuple[str, ...]:
    return tuple(teachers.values()) if isinstance(teachers, dict) else teachers


# --- the graph --------------------------------------------------------------------------------------------------------


def _graph_faults(file: StagesFile, written: Source, folder: Path) -> Iterator[Fault]:
    """Names, references and what each kind of stage may have."""
    kinds = {s.name: s.kind for s in file.graph}
    seen: set[str] = set()
    for i, stage in enumerate(file.graph):

        def fault(key: str, what: str, near: str = "", i: int = i, name: str = stage.name) -> Fault:
            return Fault(f"stage {name}: {key}", what, near, written.place(("graph", i, key)))

        if stage.name in seen:
            yield fault("name", f"two stages are called `{stage.name}`", f"{stage.name}-2")
        elif stage.name in model_names():
            yield fault("name", f"`{stage.name}` is a preset of that name already", f"{stage.name}-trained")
        seen.add(stage.name)
        if stage.kind == "opd" and not stage.teachers:
            others = [n for n, kind in kinds.items() if n != stage.name and kind not in ("evaluate", "reward_model")]
            near = f"teachers: [{others[0]}]" if others else ""
            yield fault("teachers", "missing: an opd stage learns from teachers", near)
        if stage.teachers and stage.kind not in TEACHABLE:
            yield fault("teachers", f"a stage of kind `{stage.kind}` reads no teachers", "kind: opd")
        if stage.tasks is not None and stage.kind != "evaluate":
            yield fault(
                "tasks", f"a stage of kind `{stage.kind}` counts batches, not tasks", "set: {run.num_rollout: 40}"
            )
        if stage.kind == "pretrain" and stage.model not in model_names():
            yield fault("model", f"pretraining starts from a preset, not from `{stage.model}`", "kind: sft")
        if stage.reward_model is not None and stage.kind not in ("rl", "opd"):
            yield fault("reward_model", f"a stage of kind `{stage.kind}` asks no reward model", "kind: rl")
        scorer = (stage.reward_model,) if stage.reward_model is not None else ()
        for key, names in (("model", (stage.model,)), ("teachers", _named(stage.teachers)), ("reward_model", scorer)):
            for name in names:
                if kinds.get(name) == "evaluate":
                    what = f"`{name}` evaluates and writes no checkpoint, nothing can come after it"
                    yield fault(key, what, file.graph[list(kinds).index(name)].model)
                elif name in kinds and (kinds[name] == "reward_model") != (key == "reward_model"):
                    scores = "is a reward model: it scores responses and writes none"
                    writes = "writes responses; a reward model comes from a stage of kind `reward_model`"
                    yield fault(key, f"`{name}` {writes if key == 'reward_model' else scores}")
                elif not _exists(name, kinds, folder):
                    known = [n for n in (*kinds, *model_names()) if n != stage.name]
                    what = f"`{name}` is no stage, no preset and no model folder in {folder.absolute()}"
                    yield fault(key, what, fields.closest(name, known, 0.5) or f"one of {', '.join(kinds)}")


def _exists(name: str, stages: Mapping[str, Any], folder: Path) -> bool:
    return name in stages or name in model_names() or (folder / name / "config.json").is_file()


def _taken_keys(file: StagesFile, written: Source, overrides: Sequence[str]) -> Iterator[Fault]:
    """Keys of the scenario that the graph itself says."""
    instead = {
        ("model",): "the key `model` of the stage",
        ("real", "teachers"): "the key `teachers` of the stage",
        ("real", "reward_model"): "the key `reward_model` of the stage",
        ("real", "load"): "the key `model` of the stage",
    }
    set_by = [(text.partition("=")[0], None, f"--set {text}") for text in overrides]
    for i, stage in enumerate(file.graph):
        set_by += [(k, v, written.place(("graph", i, "set", k))) for k, v in stage.set.items()]
    for dotted, value, where in set_by:
        for path, _ in leaves(tuple(dotted.strip().split(".")), value):
            taken = next((key for key in instead if path[: len(key)] == key), None)
            if taken is not None:
                yield Fault(source.dotted(path), "a stage's inputs are what its graph says", instead[taken], where)
    for i, stage in enumerate(file.graph):
        given = [p for k, v in stage.set.items() for p, _ in leaves(tuple(k.split(".")), v)]
        if stage.kind not in DEMONSTRATED and any(p[:2] == ("real", "warmup") for p in given):
            what = f"a stage of kind `{stage.kind}` starts from the weights of `{stage.model}` as they are"
            near = "a stage of kind `sft` before it"
            yield Fault(f"stage {stage.name}: real.warmup", what, near, written.place(("graph", i, "set")))


def _order(file: StagesFile, written: Source) -> list[int]:
    """Indices of the stages, each after its inputs, evaluations last. Raises `ScenarioError` at a cycle."""
    at = {s.name: i for i, s in enumerate(file.graph)}
    inputs = {s.name: {n for n in (s.model, *_named(s.teachers), s.reward_model) if n in at} for s in file.graph}
    sorter = TopologicalSorter(inputs)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = list(error.args[1])
        what = f"a checkpoint cannot come before itself: {' -> '.join(cycle)}"
        first = min(cycle, key=lambda n: at[n])
        raise ScenarioError(Fault("graph", what, "", written.place(("graph", at[first], "model")))) from None
    order: list[int] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=lambda n: at[n])
        sorter.done(*ready)
        order += [at[n] for n in ready]
    return sorted(order, key=lambda i: file.graph[i].kind == "evaluate")  # nothing waits for them: together, at the end


def _origins(file: StagesFile, folder: Path) -> Callable[[str], ModelConfig]:
    """For any model name of the graph: what the first of its ancestors starts from."""
    starts = {s.name: s.model for s in file.graph}

    def origin(name: str) -> ModelConfig:
        while name in starts:
            name = starts[name]
        if name in model_names():
            return PresetModel(name=name)
        return ConfigJsonModel(path=str((folder / name / "config.json").absolute()), name=name)

    return origin


# --- the stages' scenarios --------------------------------------------------------------------------------------------


def _stage(
    file: StagesFile,
    i: int,
    written: Source,
    base: Source,
    base_dir: Path,
    overrides: Sequence[str],
    origin: Callable[[str], ModelConfig],
) -> Stage:
    """Raises `ScenarioError` with everything that is wrong with the stage's scenario."""
    stage = file.graph[i]
    tree = base
    for key, value in stage.set.items():
        tree = tree.set(tuple(key.split(".")), value, places_below(written, ("graph", i, "set", key)), Scenario)
    tree = with_overrides(tree, overrides, Scenario)
    where = written.place(("graph", i, "model"))
    tree = tree.set(("model",), origin(stage.model).model_dump(exclude_none=True), where, Scenario)
    if stage.kind not in DEMONSTRATED:
        tree = tree.set(("real", "warmup", "steps"), 0, where, Scenario)
    scenario = build(tree, Scenario)
    named = {"teachers": stage.teachers, "reward_model": stage.reward_model}
    checked = scenario.model_copy(update={"real": scenario.real.model_copy(update=named)})
    faults = [f.at(place_of(tree, f)) for f in rules.check(checked, base_dir, simulated=False)]
    faults = [
        *faults,
        *(f.at(written.place(("graph", i, f.key))) for f in _kind_faults(stage, scenario, origin, base_dir)),
    ]
    if faults:
        raise ScenarioError(faults)
    remarks = tuple(rules.remarks(scenario, base_dir)) if stage.kind in ("rl", "opd") else ()
    tasks = stage.tasks or EVALUATED_TASKS
    return Stage(
        stage.name, stage.kind, stage.model, stage.teachers, stage.reward_model, tasks, stage.note, scenario, remarks
    )


def _kind_faults(
    stage: StageFile, scenario: Scenario, origin: Callable[[str], ModelConfig], base_dir: Path
) -> Iterator[Fault]:
    """What the kind of the stage asks of its scenario."""
    algorithm = scenario.algorithm
    if stage.kind == "rl" and algorithm.needs_teacher:
        what = f"`{algorithm.advantage}` learns from a teacher, and rl from rewards alone"
        yield Fault("kind", what, "kind: opd with teachers, or algorithm.advantage: group")
    if stage.kind == "opd" and not algorithm.needs_teacher:
        what = f"opd learns from teachers, and algorithm.advantage is `{algorithm.advantage}`"
        yield Fault("kind", what, "set: {algorithm.advantage: distillation}")
    if stage.kind in (*DEMONSTRATED, "evaluate") and getattr(scenario.workload, "environment", None) is None:
        near = "workload.environment: {type: arithmetic}"
        yield Fault("kind", f"`{stage.kind}` needs tasks with text and a verifier, and there are none", near)
    if stage.kind in DEMONSTRATED and not scenario.real.warmup.steps:
        yield Fault("kind", f"`{stage.kind}` would train for no step: real.warmup.steps is 0", "real.warmup.steps: 400")
    try:
        student = model_spec(scenario.model, base_dir)
        for name in dict.fromkeys(_named(stage.teachers)):
            teacher = model_spec(origin(name), base_dir)
            if teacher.vocab != student.vocab:
                what = f"teacher `{name}` has {teacher.vocab} token ids and `{stage.model}` {student.vocab}"
                yield Fault("teachers", f"{what}: they must share a tokenizer", "a teacher of the same family")
    except CatalogueError:  # a fault of its own: see rules.memory.model_known
        return
