"""Tasks of real runs: kinds that are told apart and have teachers, sources that are there, turns to start from.

Asked for real runs only: a simulation reads no environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from testbed.scenario import fields
from testbed.scenario.environment import (
    CalculatorTasks,
    Environment,
    MixtureTasks,
    PrefixTasks,
    WorkspaceTasks,
    kinds_of,
)
from testbed.scenario.errors import Fault
from testbed.scenario.rules.context import Context
from testbed.scenario.workload import LengthsWorkload

KEY = "workload.environment"


def parts_are_told_apart(c: Context) -> Iterator[Fault]:
    """A mixture has parts; a part's name is the kind of its tasks."""
    tasks, key = _environment(c), KEY
    if isinstance(tasks, PrefixTasks):
        tasks, key = tasks.environment, f"{KEY}.environment"
    if not isinstance(tasks, MixtureTasks):
        return
    names = [part.name for part in tasks.tasks]
    if not names:
        near = "tasks: [{name: sums, environment: {type: arithmetic}}]"
        yield Fault(f"{key}.tasks", "a mixture of nothing has no tasks", near)
    for i, name in enumerate(names):
        if name in names[:i]:
            free = next(n for n in (f"{name}_{k}" for k in range(2, len(names) + 2)) if n not in names)
            what = f"two parts are called `{name}`, and a part's name is the kind of its tasks"
            yield Fault(f"{key}.tasks[{i}].name", what, f"name: {free}", see=f"{key}.tasks")


def every_kind_has_a_teacher(c: Context) -> Iterator[Fault]:
    """Teachers by kind: one for each kind of task that there is, none for another."""
    given = c.scenario.real.teachers
    if not isinstance(given, Mapping) or not given:
        return
    kinds = kinds_of(_environment(c))
    for kind in given:
        if kind not in kinds:
            what = f"no task is of kind `{kind}`; kinds: {', '.join(kinds)}"
            yield Fault(f"real.teachers.{kind}", what, fields.closest(kind, kinds), see="real.teachers")
    known = ", ".join(kind for kind in given if kind in kinds) or "none"
    for kind in kinds:
        if kind not in given:
            what = f"no teacher is assigned to tasks of kind `{kind}`; kinds with one: {known}"
            folder = next((t for t in given.values() if isinstance(t, str)), "FOLDER")
            yield Fault("real.teachers", what, f"real.teachers.{kind}: {folder}")


def sources_are_there(c: Context) -> Iterator[Fault]:
    """Files of rollouts, and the kind that theirs are of."""
    tasks = _environment(c)
    if not isinstance(tasks, PrefixTasks):
        return
    kinds = kinds_of(tasks)
    for i, source in enumerate(tasks.sources):
        key = f"{KEY}.sources[{i}]"
        if source.file is not None and not (file := c.base_dir / source.file).is_file():
            names = [p.name for p in file.parent.glob("*.parquet")] if file.parent.is_dir() else []
            near = fields.closest(file.name, names)
            near = f"file: {Path(source.file).with_name(near)}" if near else "demonstrations: 64"
            yield Fault(f"{key}.file", f"no such file: {file}", near, see=f"{KEY}.sources")
        if source.kind is not None and source.kind not in kinds:
            what = f"no task is of kind `{source.kind}`; kinds: {', '.join(kinds)}"
            near = fields.closest(source.kind, kinds) or kinds[0]
            yield Fault(f"{key}.kind", what, f"kind: {near}", see=f"{KEY}.sources")
        if source.kind is None and source.file is not None and len(kinds) > 1:
            what = f"tasks are of {len(kinds)} kinds, and a file does not say of which its rollouts are"
            yield Fault(f"{key}.kind", what, f"kind: {' or '.join(kinds)}", see=f"{KEY}.sources")


def starts_follow_turns(c: Context) -> Iterator[Fault]:
    """A fresh turn follows source turns that are there. It has a reward, where one is needed, only as the last turn of
    a task."""
    tasks = _environment(c)
    if not isinstance(tasks, PrefixTasks) or tasks.full_share == 1:
        return
    all_full = f"{KEY}.full_share: 1"
    if not tasks.sources:
        near = f"{KEY}.sources: [{{demonstrations: 64}}], or {all_full}"
        yield Fault(f"{KEY}.sources", "without a source there is no history to start from", near)
        return
    recorded = any(source.file is not None for source in tasks.sources)
    turns = {n for source in tasks.sources if source.file is None for n in _turns(tasks, source.kind)}
    most = max(turns, default=0)
    if not most and not recorded:  # of a kind that there is not: a fault of its own
        return
    if not recorded and most == 1:
        what = "these demonstrations have one turn each: between question and answer there is no history to start from"
        near = f"{KEY}.environment: {{type: calculator, operations: 3, max_turns: 4}}, or {all_full}"
        yield Fault(f"{KEY}.sources", what, near)
        return
    beyond = [n for n in tasks.after if n >= most]
    if not recorded and beyond:
        can = f"the longest demonstration has {most} turns: a fresh turn can follow 1 to {most - 1} of them"
        yield Fault(f"{KEY}.after", f"{can}, not {beyond[0]}", f"{KEY}.after: [{most - 1}]")
        return
    advantage = c.scenario.algorithm.advantage
    last_only = not recorded and turns == {most} and set(tasks.after) == {most - 1}
    if advantage != "distillation" and not last_only:
        why = "one that goes on from a recorded rollout" if recorded else "one in the middle of a dialogue"
        instead = f"{KEY}.after: [{most - 1}], or " if not recorded and turns == {most} else ""
        what = f"`{advantage}` needs a reward for every fresh turn, and {why} has none"
        yield Fault("algorithm.advantage", what, f"algorithm.advantage: distillation, or {instead}{all_full}")


def _environment(c: Context) -> Environment | None:
    w = c.scenario.workload
    return w.environment if isinstance(w, LengthsWorkload) else None


def _calls(part: CalculatorTasks | WorkspaceTasks) -> int:
    """Of a tool, in a demonstration with turns enough."""
    return part.operations if isinstance(part, CalculatorTasks) else 1


def _turns(tasks: PrefixTasks, kind: str | None) -> list[int]:
    """Turns of a demonstration of each part (of the part `kind`)."""
    inner = tasks.environment
    parts = {p.name: p.environment for p in inner.tasks} if isinstance(inner, MixtureTasks) else {inner.type: inner}
    return [
        min(_calls(part), part.max_turns - 1) + 1 if isinstance(part, CalculatorTasks | WorkspaceTasks) else 1
        for name, part in parts.items()
        if kind in (None, name)
    ]
