"""From a scenario file and `--set` arguments to a checked `Scenario`, or one `ScenarioError` that says what
is wrong and where.

Knows the order of the steps: YAML, overrides, types, rules. It refuses to know what any key means and how a message is
shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from testbed.scenario import rules, source
from testbed.scenario.base import Section
from testbed.scenario.errors import Fault, ScenarioError
from testbed.scenario.explain import explain, impostors
from testbed.scenario.scenario import Scenario
from testbed.scenario.source import Source

__all__ = ["Loaded", "build", "dump_scenario", "load_scenario", "parse_scenario", "scenario_hash", "with_overrides"]

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Loaded:
    """A scenario that passed every check."""

    scenario: Scenario
    base_dir: Path
    """What file names in the scenario are relative to: the folder of its file."""
    path: Path
    source_lines: Mapping[str, int]
    """Dotted key -> line of the file (keys given on the command line and defaults are absent)."""
    overrides: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    """What the user should know although nothing is wrong, e.g. unused GPUs."""


def load_scenario(path: str | Path, overrides: Sequence[str] = (), *, simulated: bool = True) -> Loaded:
    """Read, override (`a.b=value`), check. `simulated=False` leaves out rules that only the simulated backend has.

    Raises `ScenarioError` with every fault that was found: broken YAML alone, else all wrong keys and values, else all
    impossible combinations.
    """
    path = Path(path)
    return _load(source.read(path), path, overrides, simulated)


def parse_scenario(
    text: str, name: str = "scenario.yaml", base_dir: Path | None = None, *, simulated: bool = True
) -> Loaded:
    """As `load_scenario`, from text; `name` stands in messages."""
    return _load(source.parse(text, name), (base_dir or Path()) / name, (), simulated)


def _load(read: Source, path: Path, overrides: Sequence[str], simulated: bool) -> Loaded:
    if "study" in read.data:
        what = "this is a study (a base and its variants), not a scenario"
        raise ScenarioError(Fault("study", what, "a scenario is what a study has under `base`", read.place(("study",))))
    if "stages" in read.data:
        what = "this is a graph of training stages, not a scenario"
        raise ScenarioError(Fault("stages", what, f"testbed real {path}", read.place(("stages",))))
    written = with_overrides(read, overrides, Scenario)
    scenario = build(written, Scenario)
    base_dir = path.parent
    faults = [fault.at(place_of(written, fault)) for fault in rules.check(scenario, base_dir, simulated=simulated)]
    if faults:
        raise ScenarioError(in_order(faults))
    lines = {
        source.dotted(p): int(w.rsplit(":", 1)[1]) for p, w in written.where.items() if p and not w.startswith("--set")
    }
    return Loaded(scenario, base_dir, path, lines, tuple(overrides), tuple(rules.remarks(scenario, base_dir)))


def with_overrides(read: Source, overrides: Sequence[str], root: type[Section]) -> Source:
    """`KEY=VALUE` arguments applied in their order; the value is YAML. Raises `ScenarioError`."""
    for text in overrides:
        where = f"--set {text}"
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            raise ScenarioError(
                Fault("", "expected KEY=VALUE, with dots between the parts of KEY", "run.seed=1", where)
            )
        read = read.set(path, source.value_of(value, where, key.strip()), where, root)
    return read


def build(written: Source, model: type[S]) -> S:
    """The typed model of plain data. Raises `ScenarioError` with every wrong key and value."""
    faults = impostors(written, model)
    try:
        built = model.model_validate(written.data)
    except ValidationError as err:
        taken = {fault.key for fault in faults}
        faults += [fault for fault in explain(err, written, model) if fault.key not in taken]
    if faults:
        raise ScenarioError(in_order(faults))
    return built


def place_of(written: Source, fault: Fault) -> str:
    """Where a fault's key is written, else the key to see, else the section that should have it."""
    key, see = tuple(fault.key.split(".")), tuple(fault.see.split("."))
    return written.place(see if key not in written.where and see in written.where else key)


def in_order(faults: Iterable[Fault]) -> list[Fault]:
    """Faults in the order of their lines; those of the command line come first."""

    def line(fault: Fault) -> int:
        match = re.search(r":(\d+)$", fault.where)
        return int(match[1]) if match else 0

    return sorted(faults, key=line)


# --- writing ----------------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Quotes whatever our reader or a plain YAML 1.1 reader would not take for text."""


for _first, _resolvers in source.Loader.yaml_implicit_resolvers.items():
    for _tag, _regexp in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _regexp, [_first])


def dump_scenario(scenario: Scenario) -> str:
    """The whole scenario as YAML, defaults written out, in the order of the models. Read back, it is equal."""
    data: dict[str, Any] = scenario.model_dump(mode="json")
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def scenario_hash(scenario: Scenario) -> str:
    """12 hexadecimal digits of the SHA-256 of the scenario as JSON with sorted keys: equal for equal scenarios."""
    text = json.dumps(scenario.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]
