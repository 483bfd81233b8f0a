"""A study: one base scenario, variants that change some of its keys, and the rules of a fair comparison.

A comparison changes the layout, not the question: equal GPUs, equal workload, equal batches, equal seeds, unless the
study says `allow_unequal`. It refuses to know how runs are started and reports are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from testbed.scenario import fields, rules, source
from testbed.scenario.base import NonNegativeInt, Section
from testbed.scenario.errors import Fault, ScenarioError
from testbed.scenario.load import build, in_order, place_of, with_overrides
from testbed.scenario.placement import Colocated
from testbed.scenario.scenario import Scenario
from testbed.scenario.source import KeyPath, Source

__all__ = ["Study", "StudyFile", "Variant", "is_study", "load_study"]

MAX_VARIANTS = 1000

Unequal = Literal["gpus", "workload", "batch"]


class VariantFile(Section):
    """One layout of the comparison."""

    name: Annotated[str, Field(min_length=1)]
    note: str = ""
    """For the report."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys or nested sections that differ from the base. One that names another `type` replaces the old."""


class StudyFile(Section):
    """What a study file holds. Variants, a grid (every combination of its values), or variants times a grid."""

    study: Annotated[str, Field(min_length=1)]
    """Name of the study."""
    question: str = ""
    """The question it answers, for the head of the report."""
    base: dict[str, Any] | str
    """A scenario, or the path of one relative to the study."""
    seeds: tuple[NonNegativeInt, ...] = ()
    """Every variant runs once per seed. Empty: the base's `run.seed`."""
    baseline: str | None = None
    """The variant that others are compared with (its first point, if there is a grid); null: the first."""
    variants: tuple[VariantFile, ...] = ()
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Dotted key -> values, or sections of values that change together."""
    allow_unequal: tuple[Unequal, ...] = ()
    """What may differ between variants although comparisons normally forbid it."""
    alternatives: bool = True
    """false: the variants are cases to look at, not layouts to choose from; the report names none as the best."""


@dataclass(frozen=True)
class Variant:
    """One scenario of a study."""

    name: str
    note: str
    changes: Mapping[str, Any]
    """Dotted key -> value, as far as it was set for this variant."""
    scenario: Scenario
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A comparison that is ready to run."""

    name: str
    question: str
    seeds: tuple[int, ...]
    baseline: str
    variants: list[Variant]
    base_dir: Path
    """What file names in the scenarios are relative to: the folder of the base."""
    allow_unequal: tuple[Unequal, ...] = ()
    """What may differ between variants although comparisons normally forbid it."""
    alternatives: bool = True
    """Whether one of them may be named the best."""


@dataclass(frozen=True)
class _Change:
    """One assignment of a variant, with the places of the value's keys."""

    path: tuple[str, ...]
    value: Any
    where: Mapping[KeyPath, str]


@dataclass(frozen=True)
class _Plan:
    """A variant before its scenario is built."""

    name: str
    note: str
    changes: tuple[_Change, ...]
    where: str


def is_study(path: str | Path) -> bool:
    """Whether the file has a top-level key `study`. False for files that cannot be read: reading them tells why."""
    try:
        return "study" in source.read(Path(path)).data
    except ScenarioError:
        return False


def load_study(path: str | Path, overrides: Sequence[str] = (), *, simulated: bool = True) -> Study:
    """Read a study and check every variant. `overrides` hold for all variants and win over what a variant sets.

    Raises `ScenarioError`: wrong keys, impossible variants (each fault says which), unfair comparisons.
    """
    path = Path(path)
    written = source.read(path)
    file = build(written, StudyFile)
    base, base_dir = base_of(file.base, written, path)
    plans = _plans(file, written)
    variants, faults = _variants(plans, base, base_dir, overrides, simulated)
    if faults:
        raise ScenarioError(in_order(faults))
    baseline = _baseline(file, written, plans)
    seeds = _seeds(file, written, variants[0].scenario)
    reference = next(v for v in variants if v.name == baseline)
    places = {plan.name: plan.where for plan in plans}
    faults = [f.at(places[v.name]) for v in variants for f in _unfair(v, reference, file.allow_unequal)]
    if faults:
        raise ScenarioError(in_order(faults))
    return Study(file.study, file.question, seeds, baseline, variants, base_dir, file.allow_unequal, file.alternatives)


def base_of(base: dict[str, Any] | str, written: Source, path: Path) -> tuple[Source, Path]:
    """The scenario tree that the key `base` of a file holds or names, and what file names in it are relative to."""
    if not isinstance(base, str):
        return written.sub("base"), path.parent
    at = path.parent / base
    if not at.is_file():
        near = fields.closest(at.name, sorted(p.name for p in at.parent.glob("*.y*ml"))) if at.parent.is_dir() else ""
        raise ScenarioError(Fault("base", f"no such file: {at}", near, written.place(("base",))))
    found = source.read(at)
    for key, what in (("study", "a study"), ("stages", "a graph of stages")):
        if key in found.data:
            what = f"{at} is {what} itself; a base is a scenario"
            raise ScenarioError(Fault("base", what, "", written.place(("base",))))
    return found, at.parent


def _seeds(file: StudyFile, written: Source, first: Scenario) -> tuple[int, ...]:
    seeds = file.seeds or (first.run.seed,)
    if len(set(seeds)) < len(seeds):
        unique = ", ".join(map(str, dict.fromkeys(seeds)))
        raise ScenarioError(
            Fault(
                "seeds", "a seed is given twice: the repeats would be equal", f"[{unique}]", written.place(("seeds",))
            )
        )
    return seeds


def _baseline(file: StudyFile, written: Source, plans: Sequence[_Plan]) -> str:
    names = [plan.name for plan in plans]
    if file.baseline is None:
        return names[0]
    of_grid = next((name for name in names if name.startswith(f"{file.baseline} ")), None)
    if file.baseline not in names and of_grid is not None and any(v.name == file.baseline for v in file.variants):
        return of_grid
    if file.baseline not in names:
        near = fields.closest(file.baseline, names) or names[0]
        what = f"no variant is called `{file.baseline}`"
        raise ScenarioError(Fault("baseline", what, near, written.place(("baseline",))))
    return file.baseline


# --- which variants ---------------------------------------------------------------------------------------------------


def _plans(file: StudyFile, written: Source) -> list[_Plan]:
    """Variants x grid, in order; raises `ScenarioError` if there are none, too many, or two of one name."""
    listed = [
        _Plan(v.name, v.note, tuple(_set(written, i)), written.place(("variants", i, "name")))
        for i, v in enumerate(file.variants)
    ] or [_Plan("", "", (), "")]
    axes = [_axis(written, key, len(values)) for key, values in file.grid.items()]
    empty = next((key for key, values in file.grid.items() if not values), None)
    if empty is not None:
        raise ScenarioError(Fault(f"grid.{empty}", "no values", where=written.place(("grid", empty))))
    if not file.variants and not axes:
        near = "variants: [{name: colocated, set: {}}, {name: split, set: {placement: {...}}}]"
        raise ScenarioError(Fault("variants", "missing; a study needs variants or a grid", near, written.place(())))
    plans = [_cross(plan, point) for plan in listed for point in product(*axes)]
    if len(plans) > MAX_VARIANTS:
        raise ScenarioError(
            Fault("grid", f"{len(plans)} variants are more than {MAX_VARIANTS}", "", written.place(("grid",)))
        )
    seen: set[str] = set()
    for plan in plans:
        if plan.name in seen:
            raise ScenarioError(Fault("variants", f"two variants are called `{plan.name}`", "", plan.where))
        seen.add(plan.name)
    return plans


def _set(written: Source, i: int) -> Iterator[_Change]:
    changes: dict[str, Any] = written.data["variants"][i].get("set") or {}
    for key, value in changes.items():
        yield _Change(tuple(key.split(".")), value, places_below(written, ("variants", i, "set", key)))


def places_below(written: Source, path: KeyPath) -> dict[KeyPath, str]:
    """Where the keys below `path` are written, by their paths from there."""
    n = len(path)
    return {p[n:]: w for p, w in written.where.items() if p[:n] == path}


def _axis(written: Source, key: str, size: int) -> list[tuple[str, _Change]]:
    """(name of the point, what it sets) of each value of one grid key."""
    out = []
    for i in range(size):
        value = written.data["grid"][key][i]
        change = _Change(tuple(key.split(".")), value, places_below(written, ("grid", key, i)))
        out.append((_point_name(change), change))
    return out


def _point_name(change: _Change) -> str:
    """`rollout_num_gpus=40`, or for sections `bounded,max_head_offpolicyness=4`."""
    parts = []
    for path, value in leaves(change.path, change.value):
        parts.append(str(value) if path[-1] in ("type", "mode") else f"{path[-1]}={value}")
    return ",".join(parts)


def leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every plain value below `path`, with its own path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves((*path, key), inner)
    else:
        yield path, value


def _cross(plan: _Plan, point: tuple[tuple[str, _Change], ...]) -> _Plan:
    name = " ".join(part for part in (plan.name, *(n for n, _ in point)) if part)
    where = plan.where or (next(iter(point[0][1].where.values())) if point else "")
    return _Plan(name, plan.note, (*plan.changes, *(c for _, c in point)), where)


# --- their scenarios --------------------------------------------------------------------------------------------------


def _variants(
    plans: Sequence[_Plan], base: Source, base_dir: Path, overrides: Sequence[str], simulated: bool
) -> tuple[list[Variant], list[Fault]]:
    """Every variant that can be built, and the faults of the others: once without a name if all variants share it."""
    variants: list[Variant] = []
    found: dict[Fault, list[str]] = {}
    for plan in plans:
        try:
            variants.append(_variant(plan, base, base_dir, overrides, simulated))
        except ScenarioError as err:
            for fault in err.faults:
                found.setdefault(fault, []).append(plan.name)
    faults: list[Fault] = []
    for fault, names in found.items():
        if len(names) == len(plans):
            faults.append(fault)
        else:
            faults += [Fault(f"variant {name}: {fault.key}", fault.what, fault.nearest, fault.where) for name in names]
    return variants, faults


def _variant(plan: _Plan, base: Source, base_dir: Path, overrides: Sequence[str], simulated: bool) -> Variant:
    written = base
    for change in plan.changes:
        written = written.set(change.path, change.value, change.where, Scenario)
    written = with_overrides(written, overrides, Scenario)
    scenario = build(written, Scenario)
    faults = [f.at(place_of(written, f)) for f in rules.check(scenario, base_dir, simulated=simulated)]
    if faults:
        raise ScenarioError(faults)
    changes = {source.dotted(p): v for c in plan.changes for p, v in leaves(c.path, c.value)}
    return Variant(plan.name, plan.note, changes, scenario, tuple(rules.remarks(scenario, base_dir)))


# --- is the comparison fair -------------------------------------------------------------------------------------------


def placed_gpus(scenario: Scenario) -> int:
    """GPUs that the placement uses."""
    p = scenario.placement
    return p.num_gpus if isinstance(p, Colocated) else p.rollout_num_gpus + p.actor_num_gpus


def _unfair(variant: Variant, baseline: Variant, allowed: Sequence[Unequal]) -> Iterator[Fault]:
    """What this variant has unequal to the baseline, and may not."""
    mine, theirs = variant.scenario, baseline.scenario
    name = f"variant {variant.name}"
    if "gpus" not in allowed:
        pairs: tuple[tuple[str, int | str, int | str], ...] = (
            ("placement", placed_gpus(mine), placed_gpus(theirs)),
            ("cluster", mine.cluster.num_gpus, theirs.cluster.num_gpus),
            ("cluster.gpu", mine.cluster.gpu, theirs.cluster.gpu),
        )
        for key, a, b in pairs:
            if a != b:
                unit = "" if key == "cluster.gpu" else " GPUs"
                what = f"{a}{unit} against {b} of `{baseline.name}`: a comparison has equal GPUs"
                near = f"{b}{unit}, or allow_unequal: [gpus]"
                yield Fault(f"{name}: {key}", what, near)
    if "workload" not in allowed:
        yield from _differing(
            f"{name}: workload", mine.workload.model_dump(), theirs.workload.model_dump(), "workload", baseline
        )
    if "batch" not in allowed:
        keys = {"n_samples_per_prompt", "rollout_batch_size", "num_steps_per_rollout"}
        batches = (mine.algorithm.model_dump(include=keys), theirs.algorithm.model_dump(include=keys))
        yield from _differing(f"{name}: algorithm", *batches, "batch", baseline)
    if mine.run.seed != theirs.run.seed:
        what = f"{mine.run.seed} against {theirs.run.seed} of `{baseline.name}`: variants run on the same seeds"
        yield Fault(f"{name}: run.seed", what, "leave it out, and write `seeds:` in the study")


def _differing(key: str, mine: Any, theirs: Any, word: str, baseline: Variant) -> Iterator[Fault]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for k in dict.fromkeys((*mine, *theirs)):
            yield from _differing(f"{key}.{k}", mine.get(k), theirs.get(k), word, baseline)
    elif mine != theirs:
        equal = "batches" if word == "batch" else "work"
        what = f"{mine} against {theirs} of `{baseline.name}`: a comparison has equal {equal}"
        yield Fault(key, what, f"{theirs}, or allow_unequal: [{word}]")
