"""Runs inside an engine's scheduler process: carries out one command on the model it is handed.

SGLang calls `handle` for `update_weights_from_tensor(load_format="real.weights.engine_side.handle")` on every
tensor-parallel rank. An exception here would kill the scheduler, so `handle` never raises: it answers over TCP to the
address in the command. It refuses to know versions' meaning and SGLang's types; a model is anything with
`named_parameters`.

Commands (`do`): `checksum` (every parameter), `requantize` (in place, then as `checksum`), `pull` (fill the parameters
from several sources at once)."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import torch

from real.weights.partition import layout
from real.weights.quantize import requantize, stored_bytes
from real.weights.raw import checksum, part
from real.weights.wire import fetch, send_message
from testbed.policies.sources import spread_pieces

ENTRY = "real.weights.engine_side.handle"
Command = Mapping[str, Any]


def handle(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out the command in the one uint8 tensor and answer it: {"rank", "seconds", ...} or {"rank", "error"}."""
    try:
        command = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
        started = time.monotonic()
        try:
            with torch.no_grad():
                answer = COMMANDS[command["do"]](model, command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer |= {"rank": command["rank"], "seconds": time.monotonic() - started}
        host, port = command["reply"]
        with socket.create_connection((host, port), timeout=command["timeout_s"]) as connection:
            send_message(connection, answer)
    except Exception:
        logging.getLogger(__name__).exception("a weight command could not be answered")


def _checksum(model: torch.nn.Module, command: Command) -> dict[str, Any]:
    return {"checksums": {name: checksum(p) for name, p in model.named_parameters()}}


def _requantize(model: torch.nn.Module, command: Command) -> dict[str, Any]:
    started = time.monotonic()
    count = requantize(model.named_parameters(), command["rule"])
    seconds = time.monotonic() - started
    stored = stored_bytes(model.named_parameters(), command["rule"])
    return {"parameters": count, "requantize_s": seconds, "stored_bytes": stored} | _checksum(model, command)


def _pull(model: torch.nn.Module, command: Command) -> dict[str, Any]:
    """Parts of this rank from all `sources` at once: which source has which part is `spread_pieces`'."""
    sources, version = command["sources"], command["version"]
    pieces = layout(command["config"], command["shapes"], command["tp_size"], command["rank"]).pieces
    parameters = dict(model.named_parameters())
    deadline = time.monotonic() + command["timeout_s"]

    def from_source(source: int, share: Sequence[int]) -> int:
        def put(index: int, data: bytearray) -> None:
            piece = pieces[share[index]]
            target = parameters[piece.target].data
            values = torch.frombuffer(data, dtype=target.dtype).reshape(piece.shape)
            part(target, piece.put).copy_(values)

        wanted = [
            (p.source, p.take, prod(p.shape) * parameters[p.target].element_size()) for p in (pieces[k] for k in share)
        ]
        return fetch(tuple(sources[source]), version, wanted, put, deadline)

    shares = spread_pieces(command["planned"][command["rank"]], len(sources), len(pieces))
    with ThreadPoolExecutor(len(sources)) as pool:
        received = list(pool.map(from_source, range(len(sources)), shares))
    return {"bytes": sum(received), "bytes_by_source": received}


COMMANDS: dict[str, Callable[[torch.nn.Module, Command], dict[str, Any]]] = {
    "checksum": _checksum,
    "requantize": _requantize,
    "pull": _pull,
}
