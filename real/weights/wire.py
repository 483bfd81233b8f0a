"""Point-to-point transfer over TCP: a server of tensor parts on the source, a client that fills buffers on the target.

A request is one JSON message (8-byte length first): {"version": v, "parts": [[name, [[start, stop], ...]], ...]}. The
answer is one JSON message ({} or {"error": text}), then the bytes of each part in the order asked. Every socket has a
deadline. Refuses to know layouts and engines."""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from real.weights.raw import Box, part, raw

Address = tuple[str, int]
IDLE_S = 600.0
"""A client that says nothing for so long is dropped."""


class TransferFailed(Exception):
    """A source refused, vanished or did not answer in time."""


def send_message(connection: socket.socket, message: object) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("<Q", len(data)) + data)


def receive_message(connection: socket.socket, deadline: float) -> Any:
    (length,) = struct.unpack("<Q", receive(connection, 8, deadline))
    return json.loads(receive(connection, length, deadline))


def receive(connection: socket.socket, count: int, deadline: float) -> bytearray:
    """Exactly `count` bytes before `deadline` (time.monotonic). Raises TransferFailed."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferFailed("the source did not answer in time")
        connection.settimeout(left)
        got = connection.recv_into(view)
        if not got:
            raise TransferFailed("the source closed the connection")
        view = view[got:]
    return buffer


class PartServer:
    """Serves parts of tensors from a background thread per connection, until closed. `find(version, name)` raises
    KeyError for what is not held."""

    def __init__(self, host: str, find: Callable[[int, str], torch.Tensor]) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    _answer(self.request, find)
                except (OSError, TransferFailed):
                    return  # the target went away; it reports for itself

        self._server = socketserver.ThreadingTCPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address: Address = (host, self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(connection: socket.socket, find: Callable[[int, str], torch.Tensor]) -> None:
    request = receive_message(connection, time.monotonic() + IDLE_S)
    try:
        parts = [part(find(request["version"], name), box) for name, box in request["parts"]]
    except KeyError as missing:
        send_message(connection, {"error": f"version {request['version']} of {missing.args[0]} is not held"})
        return
    send_message(connection, {})
    connection.settimeout(IDLE_S)
    for view in parts:
        connection.sendall(raw(view))


def fetch(
    address: Address,
    version: int,
    parts: Sequence[tuple[str, Box, int]],
    put: Callable[[int, bytearray], None],
    deadline: float,
) -> int:
    """Ask one source for (name, box, bytes) parts; `put(index, bytes)` takes each as it comes. Returns the bytes
    received. Raises TransferFailed."""
    try:
        with socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic())) as connection:
            send_message(connection, {"version": version, "parts": [(name, box) for name, box, _ in parts]})
            refusal = receive_message(connection, deadline).get("error")
            if refusal:
                raise TransferFailed(refusal)
            for index, (_, _, count) in enumerate(parts):
                put(index, receive(connection, count, deadline))
    except OSError as error:
        raise TransferFailed(f"source {address[0]}:{address[1]}: {error}") from None
    return sum(count for _, _, count in parts)


def address_towards(host: str, port: int) -> str:
    """The address of this machine that `host` can reach: the one a packet to it would leave from (none is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
