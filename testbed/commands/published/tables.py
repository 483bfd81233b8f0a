"""One file per published source: conditions, numbers, which of them are fitted, and what must hold between them.

It refuses to know how a number is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from testbed.commands.errors import UserError
from testbed.scenario import source
from testbed.scenario.base import PositiveFloat, Section
from testbed.scenario.fields import closest
from testbed.scenario.load import build
from testbed.scenario.study import Variant, is_study, load_study

FOLDER = Path(__file__).resolve().parents[2] / "data" / "published"
"""The bundled tables."""

Role = Literal["fitted", "predicted", "given"]
"""`fitted`: a coefficient was chosen so that this number comes out. `given`: it went into the scenario as it is.
`predicted`: neither; only these count."""


class Number(Section):
    """One published value and what stands for it in the simulator."""

    name: Annotated[str, Field(min_length=1)]
    variant: str = ""
    """Of the table's study; empty where the scenario file is a single scenario."""
    quantity: str
    """A name of `sim.quantities`."""
    over: str = ""
    """A variant: the value is the ratio of `variant` to this one, quantity by quantity."""
    published: PositiveFloat
    scale: PositiveFloat = 1.0
    """Simulated value x scale has the published unit."""
    unit: str
    role: Role
    note: str = ""


class Order(Section):
    """A sign or a ranking: the simulated values of these numbers rise in this order, as the published ones do."""

    says: str
    rising: Annotated[tuple[str, ...], Field(min_length=2)]


class Parameter(Section):
    """What a fit varies: a coefficient of the simulator or a key of the scenario (then `key` is dotted)."""

    coefficient: str = ""
    key: str = ""
    share: bool = False
    """It lies between 0 and 1."""

    @model_validator(mode="after")
    def _one_of(self) -> Parameter:
        if bool(self.coefficient) == bool(self.key):
            raise ValueError("give exactly one of `coefficient` and `key`")
        return self

    @property
    def name(self) -> str:
        return self.coefficient or self.key


class Table(Section):
    """What one source says."""

    table: str
    """The file's name without its ending."""
    title: str
    source: str
    """Where the numbers stand, and whether that was read itself or a note about it."""
    conditions: str
    model: str = ""
    """How the simulator gets at the numbers, and what had to be assumed."""
    kind: Literal["calibrated", "analytic", "assumed"] = "calibrated"
    """What the simulated numbers rest on."""
    scenario: str = ""
    """A file of `scenarios/published`."""
    numbers: tuple[Number, ...] = ()
    orders: tuple[Order, ...] = ()
    fit: tuple[Parameter, ...] = ()
    misses: tuple[str, ...] = ()
    """Why predicted numbers are off."""
    pending: str = ""
    """Why nothing is simulated yet: which policy or data is missing."""

    @model_validator(mode="after")
    def _whole(self) -> Table:
        names = [n.name for n in self.numbers]
        if len(set(names)) < len(names):
            raise ValueError("two numbers have the same name")
        if bool(self.pending) == bool(self.numbers):
            raise ValueError("a table has either numbers or a reason why it is `pending`")
        if bool(self.numbers) != bool(self.scenario):
            raise ValueError("numbers need a `scenario`")
        published = {n.name: n.published for n in self.numbers}
        for order in self.orders:
            for name in order.rising:
                if name not in published:
                    near = closest(name, names)
                    raise ValueError(
                        f"`{order.says}` names `{name}`, which is no number of the table (nearest: {near})"
                    )
            values = [published[name] for name in order.rising]
            if any(b <= a for a, b in pairwise(values)):
                raise ValueError(f"`{order.says}`: the published values do not rise in this order")
        if any(n.role == "fitted" for n in self.numbers) != bool(self.fit):
            raise ValueError("fitted numbers and `fit` belong together")
        return self


@dataclass(frozen=True)
class Case:
    """One scenario of a table and the quantities that are asked of it."""

    table: str
    variant: Variant
    base_dir: Path
    quantities: tuple[str, ...]


def load_tables(folder: Path = FOLDER, only: Sequence[str] = ()) -> list[Table]:
    """The tables in the order of their names, pending ones last. Raises `UserError` and `ScenarioError`."""
    files = {p.stem: p for p in sorted(folder.glob("*.yaml"))}
    for name in only:
        if name not in files:
            near = closest(name, list(files), 0.0) if files else "none"
            raise UserError(f"--only {name}: no such table (nearest: {near}); there are: {', '.join(files)}")
    tables = [_read(path) for stem, path in files.items() if not only or stem in only]
    return sorted(tables, key=lambda t: bool(t.pending))


def _read(path: Path) -> Table:
    table = build(source.read(path), Table)
    if table.table != path.stem:
        raise UserError(f"{path}: the table calls itself `{table.table}` (nearest: table: {path.stem})")
    return table


def cases(table: Table, scenarios: Path, overrides: Sequence[str] = ()) -> list[Case]:
    """The variants that a table needs, each once, with their quantities. Raises `UserError` and `ScenarioError`."""
    if not table.scenario:
        return []
    variants, base_dir = _variants(scenarios / table.scenario, overrides)
    wanted: dict[str, list[str]] = {}
    for name, quantity in _asked(table):
        if name not in variants:
            near = closest(name, list(variants), 0.0)
            raise UserError(f"{table.table}: {table.scenario} has no variant `{name}` (nearest: {near})")
        wanted.setdefault(name, []).append(quantity)
    return [
        Case(table.table, variants[name], base_dir, tuple(dict.fromkeys(quantities)))
        for name, quantities in wanted.items()
    ]


def _asked(table: Table) -> Iterator[tuple[str, str]]:
    for number in table.numbers:
        yield number.variant, number.quantity
        if number.over:
            yield number.over, number.quantity


def _variants(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Variant], Path]:
    from testbed.scenario.load import load_scenario

    if not path.is_file():
        raise UserError(f"{path}: no such file (nearest: --scenarios with the folder scenarios/published)")
    if is_study(path):
        study = load_study(path, overrides)
        return {v.name: v for v in study.variants}, study.base_dir
    loaded = load_scenario(path, overrides)
    return {"": Variant("", "", {}, loaded.scenario, loaded.remarks)}, loaded.base_dir
