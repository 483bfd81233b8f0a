"""What a weight update knows of an engine, and what its steps report. No torch here: the driver imports it early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from real.engines.client import EngineClient

Checksums = list[dict[str, str]]
"""By TP rank: engine parameter -> checksum of its bytes."""


class Host(Protocol):
    """Something on an engine's node that calls methods of a `NodeCopy` there."""

    async def call(self, method: str, *args: Any) -> Any: ...


@dataclass
class EngineHandle:
    """`host` None: the engine's node shares the driver's file system, and the driver keeps the node's copy there."""

    index: int
    client: EngineClient
    tp_size: int = 1
    host: Host | None = None
    node: int = 0
    routed_experts: bool = False
    """Whether the server returns them."""


@dataclass(frozen=True)
class Prepared:
    """`bytes`: one copy of what is sent. `full_bytes`: parameters x bytes of the dtype. They differ for deltas, where
    `changed_words` / `words` is the share of elements that differ from the base (in the engine's dtype)."""

    bytes: int
    seconds: float
    full_bytes: int
    words: int
    changed_words: int
    expected: dict[int, Checksums]
    """By TP size of the participants: what their parameters have to be."""


@dataclass(frozen=True)
class Digest:
    """Of one engine's parameters after requantisation, and what finding it cost. `changed`: parameters requantised;
    `stored_bytes`: all of the engine's as the format would store them, 0 without one."""

    version: int
    value: str
    tp_size: int
    changed: int
    check_s: float
    requantize_s: float
    stored_bytes: int = 0
