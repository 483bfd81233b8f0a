"""What a fold is: an object with a table of handlers. It refuses to know which folds there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[[float, Any], None]
"""Takes the time, and an event or action of one type."""
Handlers = Mapping[type, Handler]
"""Type of an event or action -> what a fold does with it, given the time."""
