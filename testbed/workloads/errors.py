"""The one error of workloads: which file, which line, what is wrong."""

from __future__ import annotations

from pathlib import Path


class WorkloadError(Exception):
    """`str()` is `PATH:LINE: message`; without a line (1-based) or a path, that part is left out.

    `path`, `line` and `message` are kept for callers that print them differently.
    """

    def __init__(self, path: Path | str | None, line: int | None, message: str) -> None:
        self.path = path
        self.line = line
        self.message = message
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(where + message)
