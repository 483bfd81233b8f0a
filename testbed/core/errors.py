"""How a backend can break the core's contract."""

from __future__ import annotations

from collections.abc import Mapping


class ProtocolError(RuntimeError):
    """A backend sent an event that cannot be true (unknown id, time going back, spans with a gap, ...)."""


class IllegalTransition(RuntimeError):
    """An input that a state machine (`states`) does not accept in its state."""

    def __init__(
        self, machine: str, who: object, state: str, given: str, table: Mapping[str, Mapping[str, str]]
    ) -> None:
        allowed = ", ".join(sorted(table.get(state, {}))) or "nothing: it is an end state"
        super().__init__(f"{machine} {who}: `{given}` in state `{state}` (accepts: {allowed})")
