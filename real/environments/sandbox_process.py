"""A tool call's own process: runs a program's Python in its workspace, under limits, and leaves nothing running.

`python -I -B sandbox_process.py '{"memory_bytes": ..., "file_bytes": ..., "cpu_s": ...}'` reads code from its input,
runs it in a child and ends as that child did, after every process that the code started is gone: orphans become this
process's children, whatever session they fled to. Standard library only. It keeps accidents in bounds, not attacks: the
code sees the machine's files and network. Refuses to know programs, turns and what output means."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import sys
import traceback
from types import FrameType

MEMORY, SPACE = 97, 98
"""Exit codes of a child that ran out of memory, or out of room for a file."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, parents first (Linux)."""
    found: list[int] = []
    _collect(pid, found)
    return found


def _collect(pid: int, found: list[int]) -> None:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                for child in map(int, file.read().split()):
                    if child not in found:
                        found.append(child)
                        _collect(child, found)


def kill_below(pid: int) -> None:
    """Kill what runs below `pid`: stopped first, so that nothing starts meanwhile."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for process in descendants(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, sign)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _limited(limits: dict[str, int]) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _child(code: str, limits: dict[str, int]) -> int:
    """Runs the code; what it prints goes where this process's output goes."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _limited(limits)
    try:
        exec(compile(code, "<tool>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except MemoryError:
        return MEMORY
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
            return SPACE
        print(f"{type(error).__name__}: {error}")
        return 1
    except BaseException as error:
        print("".join(traceback.format_exception_only(error)).strip())
        return 1
    return 0


def main() -> int:
    limits = json.loads(sys.argv[1])
    code = sys.stdin.read()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _child(code, limits)
            sys.stdout.flush()
        except BaseException:  # a full pipe, a broken interpreter: it only has to end
            pass
        finally:
            os._exit(status)
    try:
        while True:
            ended, status = os.wait()
            if ended == child:
                code_of = os.waitstatus_to_exitcode(status)
                return code_of if code_of >= 0 else 128 - code_of
    finally:
        while descendants(os.getpid()):
            kill_below(os.getpid())
            with contextlib.suppress(ChildProcessError):
                os.wait()


if __name__ == "__main__":
    sys.exit(main())
