"""How long admission and the trainer waited for what, from the core's notes. It refuses to know why: the core says it.

Seconds in each (subject, state) since the start; a subject is in the state of its last note.
"""

from __future__ import annotations

from testbed.core.actions import Note
from testbed.metrics.fold import Handlers


class Waits:
    """The fold. `seconds` is right after `settle`."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = {}
        self._now: dict[str, tuple[str, float]] = {}
        self.handlers: Handlers = {Note: self._note}

    def _note(self, t: float, a: Note) -> None:
        self._close(a.subject, t)
        self._now[a.subject] = (a.state, t)

    def settle(self, t: float) -> None:
        """Bring every figure up to `t`."""
        for subject, (state, _) in list(self._now.items()):
            self._close(subject, t)
            self._now[subject] = (state, t)

    def _close(self, subject: str, t: float) -> None:
        if subject in self._now:
            state, since = self._now[subject]
            self.seconds[subject, state] = self.seconds.get((subject, state), 0.0) + t - since
