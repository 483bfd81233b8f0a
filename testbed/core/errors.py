"""How a backend can break the core's contract."""

from __future__ import annotations


class ProtocolError(RuntimeError):
    """A backend sent an event that cannot be true (unknown id, time going back, spans with a gap, ...)."""
