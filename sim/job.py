"""One request at a station of `tools`. It refuses to know queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

Done = Callable[[Any], object]


class Job(Struct, eq=False, gc=False):
    """One request at a station. Times in seconds; `started` is -1 while it waits."""

    arrived: float
    service_s: float
    done: Done
    arg: Any
    started: float = -1.0
