"""How a simulated run and its engines can fail."""

from __future__ import annotations


class StuckError(RuntimeError):
    """Work is queued and nothing finishes."""


class EngineStuck(RuntimeError):
    """A request waits, nothing runs, and it can never be admitted."""


class PrefillOutOfMemory(RuntimeError):
    """The real engine would raise here: a prefill batch needs more slots than can be freed."""
