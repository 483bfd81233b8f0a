"""What comes out of an engine: how a request ended, or that the engine stands still. It refuses to know requests.

Messages are msgspec structs, which stay interpreted (`setup.py`); requests are not, so they live elsewhere.
"""

from __future__ import annotations

from msgspec import Struct

Span = tuple[int, int, int]
"""(version, start, end): output tokens start..end-1 were made by this weight version."""


class Finished(Struct, frozen=True, gc=False):
    """A request ended by itself; its results are visible at `t`."""

    rid: int
    t: float
    output_tokens: int
    spans: tuple[Span, ...]
    cached_tokens: int
    """Prompt tokens that came from the cache at the first admission."""
    started_t: float
    """When the batch that first computed tokens of it was launched."""
    first_token_t: float
    finish_reason: str
    """`stop` or `length`."""
    recomputed_tokens: int
    """Tokens prefilled although this trajectory had them computed before (evicted, flushed, retracted)."""
    kv_version: int
    """Oldest weight version among the KV reused at the first admission; -1: none was reused."""
    retractions: int


class Aborted(Struct, frozen=True, gc=False):
    """A request ended before its time. `reason`: `aborted`, `refused` (prompt too long) or `out_of_memory`."""

    rid: int
    t: float
    output_tokens: int
    spans: tuple[Span, ...]
    cached_tokens: int
    started_t: float
    first_token_t: float
    reason: str
    recomputed_tokens: int
    kv_version: int
    retractions: int


class Paused(Struct, frozen=True, gc=False):
    """The engine stands still from `t` on: no batch is launched, and nothing is computed any more."""

    t: float
    mode: str


Notice = Finished | Aborted | Paused
