"""Rules about where settings come from: a source is of something that the scenario has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from testbed.scenario.errors import Fault
from testbed.scenario.fields import closest
from testbed.scenario.rules.context import Context


def settings_are_keys(c: Context) -> Iterator[Fault]:
    """A source is named for a key of this very scenario."""
    if c.scenario.provenance is None:
        return
    known = set(_keys(c.scenario.model_dump(exclude={"provenance"}), ""))
    for key in c.scenario.provenance.settings:
        if key not in known:
            what = "a source is named for it, and this scenario has no such key"
            yield Fault(f"provenance.settings.{key}", what, closest(key, sorted(known)))


def _keys(data: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in data.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
