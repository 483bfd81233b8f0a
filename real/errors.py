"""What can go wrong in a real run and is the user's to mend: one message, no traceback. Knows no component."""

from __future__ import annotations

from typing import Any


class RealError(Exception):
    """A real run cannot start or go on; the message says what, where and the nearest thing that works."""


class EngineStartError(RealError):
    """An engine died or did not answer at start; the message ends with its last log lines."""


class EngineGone(Exception):
    """The engine's process or connection is gone (not the user's to mend: the core routes around it)."""


class EngineRefused(Exception):
    """The engine answered with an error. `status` is the HTTP status, `message` what it said."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.message)


class UpdateFailed(Exception):
    """A step of a weight update did not succeed; the old version goes on serving. `stage`: prepare, copy, requantize
    or agree."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.stage, self.reason)
