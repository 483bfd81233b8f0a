"""What is said to a user whose file cannot be used: where, what is wrong, and the nearest thing that works.

Knows how a message looks. It refuses to know YAML, models, rules and exit codes (the command line prints the message
and exits 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. `str()` is `WHERE: KEY: WHAT (nearest: NEAREST)`, without the parts that are empty."""

    key: str
    """Dotted key, e.g. `rollout.admission.type`; empty for a fault of the whole file."""
    what: str
    nearest: str = ""
    """A key, a value or a combination that works."""
    where: str = ""
    """`FILE:LINE`, or `--set KEY=VALUE`; empty until the reader fills it in."""
    see: str = ""
    """A related key, whose place is shown if `key` was left to its default."""

    def at(self, where: str) -> Fault:
        """The same fault with its place, unless it has one."""
        return self if self.where else replace(self, where=where)

    def __str__(self) -> str:
        said = ": ".join(part for part in (self.where, self.key, self.what) if part)
        return f"{said} (nearest: {self.nearest})" if self.nearest else said


class ScenarioError(Exception):
    """A scenario or study that is refused. `str()` has one line per fault; `faults` is never empty."""

    def __init__(self, faults: Fault | Iterable[Fault]) -> None:
        self.faults: Sequence[Fault] = (faults,) if isinstance(faults, Fault) else tuple(dict.fromkeys(faults))
        super().__init__("\n".join(str(fault) for fault in self.faults))

    @property
    def where(self) -> str:
        return self.faults[0].where

    @property
    def what(self) -> str:
        return self.faults[0].what

    @property
    def nearest(self) -> str:
        return self.faults[0].nearest
