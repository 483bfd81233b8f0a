"""The framework presets of `scenarios/presets`: which there are, and what each says of its source.

Raises `UserError`. It refuses to know how they are shown and run, and it compares nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.commands.errors import UserError
from testbed.commands.folders import shipped
from testbed.scenario.fields import closest
from testbed.scenario.load import load_scenario
from testbed.scenario.provenance import Provenance

FOLDER = "presets"


@dataclass(frozen=True)
class Preset:
    name: str
    path: Path
    provenance: Provenance
    values: dict[str, Any]
    """Dotted key of each setting that was read -> its value here."""


def preset_names() -> list[str]:
    """In the order of the alphabet; empty where the scenarios are not at hand (a package without its checkout)."""
    return sorted(path.stem for path in shipped(FOLDER).glob("*.yaml"))


def preset(name: str) -> Preset:
    """Raises `UserError` at a name that is none, with the nearest one."""
    names = preset_names()
    if name not in names:
        near = closest(name, names, 0.3) or ", ".join(names) or f"a checkout, with the folder {shipped(FOLDER)}"
        raise UserError(f"preset {name}: no such preset (nearest: {near})")
    path = shipped(FOLDER) / f"{name}.yaml"
    scenario = load_scenario(path).scenario
    if scenario.provenance is None:
        raise UserError(f"{path}: a preset says where its settings were read (nearest: a section `provenance`)")
    dumped = scenario.model_dump(mode="json")
    return Preset(name, path, scenario.provenance, {key: _at(dumped, key) for key in scenario.provenance.settings})


def _at(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data[part]
    return data
