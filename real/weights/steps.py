"""What every path does with an engine: an update session that is always closed, and errors with a stage.

Refuses to know what is copied and how."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from real.errors import EngineGone, EngineRefused, RealError, UpdateFailed
from real.weights.handle import EngineHandle

CLOSE_S = 5.0
"""Seconds a failed update waits for the engine to close its session."""


@contextlib.asynccontextmanager
async def stage(name: str, who: str, timeout_s: float) -> AsyncIterator[None]:
    """Bounds a block in time and turns whatever goes wrong in it into `UpdateFailed(name, ...)`. `EngineGone` passes:
    the engine is lost, not only the update."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (UpdateFailed, EngineGone):
        raise
    except TimeoutError:
        raise UpdateFailed(name, f"{who}: not done within {timeout_s:g} s") from None
    except EngineRefused as refused:
        raise UpdateFailed(name, f"{who}: {refused.message}") from None
    except RealError as error:
        raise UpdateFailed(name, f"{who}: {error}") from None
    except Exception as error:  # the trainer's side may fail in any way
        raise UpdateFailed(name, f"{who}: {type(error).__name__}: {error}") from error


@contextlib.asynccontextmanager
async def session(engine: EngineHandle) -> AsyncIterator[None]:
    """SGLang takes tensors only between begin and end. A session that an earlier, broken update left open is closed
    first. An engine too stuck to close this one keeps it for that next attempt."""
    client = engine.client
    try:
        await client.begin_update()
    except EngineRefused:
        await client.end_update()
        await client.begin_update()
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineRefused, EngineGone, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await client.end_update()
        raise
    await client.end_update()


async def each(
    engines: Sequence[EngineHandle],
    copy: Callable[[EngineHandle], Awaitable[None]],
    copied: Callable[[EngineHandle], None],
    timeout_s: float,
) -> None:
    """`copy` to all engines at once, `copied` as each is done; the first failure is raised when all have ended."""

    async def one(engine: EngineHandle) -> None:
        async with stage("copy", f"engine {engine.index}", timeout_s):
            await copy(engine)
        copied(engine)

    for result in await asyncio.gather(*map(one, engines), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def host_and_port(engines: Sequence[EngineHandle]) -> tuple[str, int]:
    """Of an engine elsewhere, if there is one: an address that it can reach can be reached by engines here too."""
    places = [(url.hostname or "127.0.0.1", url.port or 80) for url in (urlsplit(e.client.url) for e in engines)]
    return min(places, key=lambda place: _is_loopback(place[0]))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
