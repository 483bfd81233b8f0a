"""A helper process that answers one line per line: the child's side (`helper.py` is the parent's).

Light, because a calculator imports it for every trajectory. Refuses to know what is asked."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(answer: Callable[[Any], Any]) -> None:
    """The child's loop: say that it is ready, then answer requests until the parent's end of the pipe is closed."""
    _die_with_parent()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not break the protocol
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


def _die_with_parent() -> None:
    """The closed pipe ends a helper that waits; this ends one that works (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
