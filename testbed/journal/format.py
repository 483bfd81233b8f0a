"""What a journal's lines say: the header and the record. It refuses to know files, compression and what the events
mean.

A journal is JSON lines: line 1 is a `JournalHeader`, every other line a `Record`. Events and actions are tagged with
their class name in `type`. Floats are written in their shortest exact form, so a record read back equals the one
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from testbed.core.actions import AnyAction
from testbed.core.events import AnyEvent

FORMAT = "testbed-journal/1"
Level = Literal["full", "sampled", "off"]


class JournalHeader(Struct, frozen=True, kw_only=True):
    """First line of a journal. `level` and `sample` are set by the writer."""

    format: str = FORMAT
    scenario_hash: str
    seed: int
    backend: str
    """`simulated` or `real`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package -> version."""
    level: Level = "full"
    sample: float = 1.0
    """Share of groups whose records were kept."""
    scenario: dict[str, Any] | None = None
    """The resolved scenario as plain data, for folds and replays that have nothing but the journal."""


class Record(Struct, frozen=True):
    """One call of the core: the event it was given, and the actions it answered with, in order."""

    event: AnyEvent
    actions: Sequence[AnyAction]


class JournalError(Exception):
    """A journal that cannot be used: where (`path`, `line`, counted from 1; 0: the file as a whole) and `what` is
    wrong."""

    def __init__(self, path: Path | str, line: int, what: str) -> None:
        self.path = Path(path)
        self.line = line
        self.what = what
        place = f"{self.path}:{line}" if line else str(self.path)
        super().__init__(f"{place}: {what}")
