"""A program's workspace and the Python that runs in it: the parent's side (`sandbox_process.py` is the child's).

Files stay from call to call; processes do not. A call that takes too long, prints too much, fills its workspace, takes
too much memory or starts too many processes is ended, and its result says so. Whatever ends a call or a program, its
processes are gone and, at the end, its files. Refuses to know tokens, tasks and turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real.environments.sandbox_process import MEMORY, SPACE, descendants, kill_below
from real.errors import RealError

SCRIPT = Path(__file__).with_name("sandbox_process.py")
MARK = "TESTBED_PROGRAM"
"""Environment variable that every process of a program inherits."""
WATCH_EVERY_S = 0.02
GRACE_S = 2.0
"""For a call's own supervisor to clear up before it is killed too."""


class ToolLost(RealError):
    """A program's workspace is gone: it can't go on."""


@dataclass(frozen=True)
class Limits:
    """Of one call; files of all calls together."""

    time_s: float = 5.0
    memory_bytes: int = 512 * 2**20
    output_bytes: int = 4096
    workspace_bytes: int = 64 * 2**20
    workspace_files: int = 1000
    processes: int = 16


@dataclass(frozen=True)
class ToolResult:
    text: str
    """What it printed, cut at the limit."""
    fault: str
    """`time`, `memory`, `output`, `space`, `processes`, `died` (killed from outside), `error` (an exception, an exit
    code), or empty."""
    seconds: float


class Sandbox:
    """One program: a folder, and at most one call at a time."""

    def __init__(self, limits: Limits, root: Path | None = None) -> None:
        self.limits = limits
        self.folder = Path(tempfile.mkdtemp(prefix="program-", dir=root))
        self.mark = uuid.uuid4().hex
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the call that runs."""
        return None if self._process is None else self._process.pid

    def write(self, name: str, text: str) -> None:
        """Put a file into the workspace, before the first call."""
        (self.folder / name).write_text(text, encoding="utf-8")

    async def run(self, code: str) -> ToolResult:
        """Raises `ToolLost` if the workspace is gone or the program is over."""
        async with self._turn:
            if self._closed or not self.folder.is_dir():
                raise ToolLost(f"{self.folder}: the workspace is gone")
            try:
                return await self._run(code)
            finally:
                await self._clear()

    async def close(self) -> None:
        """End what runs and remove the files. May be called twice, and while a call runs: that one ends as `died`."""
        self._closed = True
        await self._clear()
        async with self._turn:
            await asyncio.to_thread(_remove, self.folder)

    # --- one call ---------------------------------------------------------------------------------------------------

    async def _run(self, code: str) -> ToolResult:
        limits = self.limits
        told = {
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.workspace_bytes,
            "cpu_s": int(limits.time_s) + 2,
        }
        folder = str(self.folder)
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-B",
            str(SCRIPT),
            json.dumps(told),
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", MARK: self.mark},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        started = time.monotonic()
        output = asyncio.ensure_future(self._read(process, code))
        watch = asyncio.ensure_future(self._watch(process.pid))
        fault = ""
        try:
            await asyncio.wait((output, watch), timeout=limits.time_s, return_when=asyncio.FIRST_COMPLETED)
            seconds = time.monotonic() - started
            if output.done():
                fault = "output" if len(output.result()) > limits.output_bytes else ""
            else:
                fault = watch.result() if watch.done() else "time"
            if fault:
                await self._stop(process)
            status = await process.wait()
            text = (await output)[: limits.output_bytes]
        finally:
            output.cancel()
            watch.cancel()
            await asyncio.gather(output, watch, return_exceptions=True)
        if not fault:
            fault = self._over_space() or _fault_of(status)
        return ToolResult(text.decode(errors="replace").strip(), fault, seconds)

    async def _read(self, process: asyncio.subprocess.Process, code: str) -> bytes:
        """Hand over the code, and take what is printed until the end or one byte beyond the limit."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(code.encode())
            await process.stdin.drain()
        process.stdin.close()
        read = b""
        while len(read) <= self.limits.output_bytes:
            part = await process.stdout.read(self.limits.output_bytes + 1 - len(read))
            if not part:
                break
            read += part
        return read

    async def _watch(self, pid: int) -> str:
        """The limit that no single process can be given; returns when one is passed."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._over_space():
                return "space"
            below = descendants(pid)
            if len(below) > self.limits.processes:
                return "processes"
            if sum(map(_resident, below)) > self.limits.memory_bytes:
                return "memory"

    def _over_space(self) -> str:
        files, size = _held(self.folder)
        return "space" if size > self.limits.workspace_bytes or files > self.limits.workspace_files else ""

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        """The call's own supervisor clears up; if it can't, everything below it is killed from here."""
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(GRACE_S):
                await self._drained(process)
        except TimeoutError:
            kill_below(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _drained(self, process: asyncio.subprocess.Process) -> None:
        """Wait for its end; what it still prints is thrown away, so that a full pipe holds nobody."""
        assert process.stdout is not None
        with contextlib.suppress(RuntimeError):  # somebody else reads
            while await process.stdout.read(65536):
                pass
        await process.wait()

    async def _clear(self) -> None:
        """Nothing of this program runs any more."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            kill_below(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await asyncio.to_thread(_sweep, self.mark)


def _fault_of(status: int) -> str:
    if status == MEMORY:
        return "memory"
    if status in (SPACE, 128 + signal.SIGXFSZ):
        return "space"
    if status == 128 + signal.SIGXCPU:
        return "time"
    if status < 0 or status >= 128:
        return "died"
    return "error" if status else ""


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _held(folder: Path) -> tuple[int, int]:
    """(files, bytes on disk) of a workspace."""
    files = size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(path, name))
                files += 1
                size += found.st_blocks * 512
    return files, size


def _sweep(mark: str) -> None:
    """Kill what carries the program's mark but fled from its call's supervisor."""
    wanted = f"{MARK}={mark}".encode()
    while found := [pid for pid in map(int, filter(str.isdigit, _listed("/proc"))) if wanted in _environ(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _environ(pid: int) -> bytes:
    """Empty for a process that is not ours, or is gone and waits to be noticed."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _remove(folder: Path) -> None:
    def again(function: Callable[..., Any], path: str, _: BaseException) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), stat.S_IRWXU)
            os.chmod(path, stat.S_IRWXU)
            function(path)

    shutil.rmtree(folder, onerror=lambda function, path, info: again(function, path, info[1]))
