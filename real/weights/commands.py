"""Commands to the code that runs inside an engine (`engine_side`): sent as a tensor update, answered over TCP.

Refuses to know what a command means."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import torch

from real.weights.engine_side import ENTRY
from real.weights.handle import EngineHandle
from real.weights.raw import by_value
from real.weights.steps import host_and_port, session
from real.weights.wire import address_towards


class CommandFailed(Exception):
    """At least one rank of the engine answered with an error."""


async def command(engine: EngineHandle, do: str, timeout_s: float, **arguments: Any) -> list[dict[str, Any]]:
    """Have every rank of a paused or idle engine carry out `do`; the ranks' answers in order.

    Raises CommandFailed, TimeoutError, EngineRefused, EngineGone."""
    answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("<Q", await reader.readexactly(8))
        answers.put_nowait(json.loads(await reader.readexactly(length)))
        writer.close()

    host = address_towards(*host_and_port([engine]))
    async with asyncio.timeout(timeout_s), await asyncio.start_server(take, host, 0) as mailbox:
        reply = (host, mailbox.sockets[0].getsockname()[1])
        common = {"do": do, "reply": reply, "timeout_s": timeout_s, "tp_size": engine.tp_size, **arguments}
        payload = [_payload(common | {"rank": rank}) for rank in range(engine.tp_size)]
        async with session(engine):
            await engine.client.update_from_tensor(payload, load_format=ENTRY, weight_version=None, flush_cache=False)
        by_rank = {a["rank"]: a for a in [await answers.get() for _ in range(engine.tp_size)]}
    errors = [f"rank {rank}: {answer['error']}" for rank, answer in sorted(by_rank.items()) if "error" in answer]
    if errors:
        raise CommandFailed("; ".join(errors))
    return [by_rank[rank] for rank in range(engine.tp_size)]


def _payload(message: dict[str, Any]) -> str:
    text = bytearray(json.dumps(message).encode())
    return by_value([("command", torch.frombuffer(text, dtype=torch.uint8))])
