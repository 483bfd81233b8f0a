"""A helper process that answers one line per line: the parent's side (`serve.py` is the child's).

Verifiers and tools run in helpers so that they overlap generation, can be stopped in the middle, and cannot take the
run with them. A helper ends when its parent does, however that ends. Refuses to know what is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from typing import IO, Any

from real.errors import RealError

START_TIMEOUT_S = 180.0
"""Importing a verifier's packages on a busy machine."""
_TAIL = 2000


class HelperTimeout(Exception):
    """No answer in time; the helper was killed and starts anew with the next request."""


class HelperDied(Exception):
    """The helper ended while it was asked; it starts anew with the next request."""


class Helper:
    """One process running `python -m module`, one request at a time; started when first needed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] | None = None
        self._turn = asyncio.Lock()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Raises RealError with the last lines it wrote if it does not come up."""
        async with self._turn:
            await self._start()

    async def ask(self, request: Any, timeout_s: float) -> Any:
        """JSON to JSON. Raises HelperTimeout or HelperDied. If the caller is cancelled, the helper is killed: an answer
        that nobody fetched would be taken for the next one's."""
        async with self._turn:
            await self._start()
            assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                async with asyncio.timeout(timeout_s):
                    line = await self._process.stdout.readline()
            except TimeoutError:
                await self._kill()
                raise HelperTimeout(f"no answer within {timeout_s:g} s") from None
            except asyncio.CancelledError:
                await self._kill()
                raise
            except ConnectionError:
                line = b""
            if not line.endswith(b"\n"):
                await self._kill()
                raise HelperDied(self._module)
            return json.loads(line)

    async def stop(self) -> None:
        """Kill it, whatever it does, and wait until it is gone. Requests that wait get HelperDied."""
        self._stopped = True
        await self._kill()

    async def _start(self) -> None:
        if self._stopped:
            raise HelperDied(f"{self._module} was stopped")
        if self.pid is not None:
            return
        await self._kill()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await self._process.stdout.readline()
        except BaseException:
            await self._kill()
            raise
        if not ready.endswith(b"\n"):
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, self._errors.tell() - _TAIL))
            said = self._errors.read().decode(errors="replace").strip()
            await self._kill()
            raise RealError(f"helper process {self._module} did not start:\n{said}")

    async def _kill(self) -> None:
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if errors is not None:
            errors.close()
