"""One SGLang server as a child process: start, wait until it serves, stop without leaving anything behind.

Responsible for the process, its port and its log; refuses to know what is asked of the server over HTTP. SGLang runs
as three processes. All of them die with the process that started the server, however that ends: the kernel kills the
server when its parent's starting thread is gone (PR_SET_PDEATHSIG), and SGLang's own children do the same to
themselves. So start a server from a thread that lives as long as the server may."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil

from real.engines.options import ServerOptions
from real.errors import EngineStartError, RealError

_DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL; survives exec
    "if os.getppid() != int(sys.argv[1]): sys.exit('the starting process is gone')\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)
GRACE_S = 5.0
"""Seconds a server gets to end by itself; with requests held it never does."""


def gpu_count() -> int:
    """GPUs of this machine, without loading a CUDA library."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


class EngineServer:
    """A started server. `start` returns at once; `wait_ready` says when it serves."""

    def __init__(
        self, options: ServerOptions, process: subprocess.Popen[bytes], log: Path, hold: socket.socket
    ) -> None:
        self.options = options
        self._process = process
        self._log = log
        self._hold = hold

    @classmethod
    def start(cls, options: ServerOptions, log_path: str | Path) -> EngineServer:
        """Launch a server that writes its output to `log_path`.

        Raises:
            RealError: the model path holds no model, or there are fewer GPUs than asked for.
            EngineStartError: the port is taken, or the command does not exist.
        """
        options.check()
        if options.gpus and max(options.gpus) >= gpu_count():
            raise RealError(f"an engine wants GPUs {options.gpus}, but this machine has {gpu_count()}")
        hold = _hold_port(options.host, options.port)
        options = replace(options, port=hold.getsockname()[1])
        log = Path(log_path)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *options.argv()],
                env=os.environ | options.env(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: Ctrl-C is the driver's, and one kill reaches them all
            )
        return cls(options, process, log, hold)

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.options.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N: ended by signal N."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def wait_ready(self, timeout_s: float = 300.0) -> str:
        """Wait until the server serves; returns its URL. A server that does not come up is stopped.

        Raises:
            EngineStartError: it ended, or was not ready in time; the message ends with its last log lines.
        """
        deadline = time.monotonic() + timeout_s
        pause = 0.1
        while True:
            if _answers(f"{self.url}/health"):
                self._hold.close()
                return self.url
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=pause)  # the server gives no event when it is up, only when it dies
                raise EngineStartError(self._failure(f"ended with exit code {code} at start"))
            if time.monotonic() > deadline:
                self.stop(grace_s=0)
                raise EngineStartError(self._failure(f"did not serve within {timeout_s:g} s"))
            pause = min(1.0, 1.5 * pause)

    def log_tail(self, n: int = 20) -> str:
        """The last n lines of its output; long lines (SGLang prints all its options in one) are cut."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(line if len(line) <= 300 else line[:300] + " ..." for line in lines[-n:])

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End all its processes and wait for them: SIGINT first (on SIGTERM SGLang looks for open requests every 5 s
        before it goes), SIGKILL to the group after `grace_s` seconds. May be called twice."""
        family = _family(self._process.pid)
        if self.alive:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        psutil.wait_procs(family, timeout=30)
        self._hold.close()

    def _failure(self, what: str) -> str:
        who = f"engine on {self.url} (model {self.options.model_path})"
        return f"{who} {what}.\nLast lines of {self._log}:\n{self.log_tail()}"


def _hold_port(host: str, port: int) -> socket.socket:
    """Bind the port without listening and keep it: a server that sets SO_REUSEADDR can still bind it, and neither
    another engine nor an outgoing connection is given it meanwhile."""
    hold = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        hold.bind((host, port))
    except OSError as error:
        hold.close()
        raise EngineStartError(
            f"port {port} of {host} is taken ({error.strerror}): choose another, or 0 for a free one"
        ) from None
    return hold


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
