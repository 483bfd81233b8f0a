"""Replay: feed a journal's events to a fresh core and compare every action. The proof that there is one core.

It refuses to know backends: a journal of either is replayed alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from testbed.core.core import Core
from testbed.core.errors import IllegalTransition, ProtocolError
from testbed.journal.format import JournalError
from testbed.journal.reader import read_journal, require_complete
from testbed.scenario import Scenario


class Difference(Struct, frozen=True):
    """The first record whose actions differ."""

    line: int
    event: dict[str, Any]
    recorded: list[dict[str, Any]]
    replayed: list[dict[str, Any]]
    error: str = ""
    """What the core raised instead of answering."""

    def __str__(self) -> str:
        index = next(
            (i for i, (a, b) in enumerate(zip(self.recorded, self.replayed, strict=False)) if a != b),
            min(len(self.recorded), len(self.replayed)),
        )

        def at(actions: list[dict[str, Any]]) -> str:
            return msgspec.json.encode(actions[index]).decode() if index < len(actions) else "(nothing)"

        lines = [
            f"line {self.line}: event {msgspec.json.encode(self.event).decode()}",
            f"  action {index + 1} recorded: {at(self.recorded)}",
            f"  action {index + 1} replayed: {at(self.replayed)}",
        ]
        if self.error:
            lines.append(f"  the core refused the event: {self.error}")
        return "\n".join(lines)


class Replayed(Struct, frozen=True):
    """Result of a replay. `difference` is None if all actions are equal."""

    events: int
    actions: int
    difference: Difference | None
    truncated: str
    """Why the journal ends early, if it does."""


def replay(path: Path | str, scenario: Scenario | None = None) -> Replayed:
    """Feed the events of the journal at `path` to a new core and compare, up to the first difference.

    `scenario`: None takes the one in the journal's header. Raises `JournalError` if the journal is sampled or
    unreadable.
    """
    header, records = read_journal(path)
    require_complete(path, header)
    if scenario is None:
        if header.scenario is None:
            raise JournalError(path, 1, "the header holds no scenario: hand one in")
        scenario = Scenario.model_validate(header.scenario)
    core = Core(scenario)
    events = actions = 0
    for record in records:
        events += 1
        error = ""
        try:
            answered = core.handle(record.event)
        except (ProtocolError, IllegalTransition, LookupError) as refused:
            answered, error = [], f"{type(refused).__name__}: {refused}"
        if error or list(record.actions) != answered:
            plain = msgspec.to_builtins
            difference = Difference(
                events + 1, plain(record.event), plain(list(record.actions)), plain(answered), error
            )
            return Replayed(events, actions, difference, "")
        actions += len(answered)
    return Replayed(events, actions, None, records.truncated or "")
