"""What goes into an engine and what comes out: requests and notices.

A request says which tokens it brings and how many it will emit; it refuses to know engines, queues of other requests
and time models. The scheduling state of a request lives in the same object (one allocation a request), below the line
that says so.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from sim.radix_cache import Node, Run, Runs, cut, normalised

Span = tuple[int, int, int]
"""(version, start, end): output tokens start..end-1 were made by this weight version."""

FOREVER = 1 << 60
"""Length of the run that stands for a request's outputs, however many it will make."""


class Request(Struct, eq=False, gc=False):
    """One generation request. An object is submitted once; a retry is a new object (it may carry the same `rid`)."""

    rid: int
    content: Runs
    """The prompt as runs (content id, start, length), lengths summing to `prompt_tokens`."""
    prompt_tokens: int
    output_tokens: int
    """Tokens it will emit, at least 1; the last one ends it. More than the (clipped) `max_new_tokens`: it ends there by
    length."""
    max_new_tokens: int
    stops: bool = True
    """Ends by a stop token; else by length, and then `output_tokens` is `max_new_tokens`."""
    ignore_eos: bool = False
    output_content: int = -1
    """Content id of the outputs, which are its tokens from 0 on. Each request's outputs need an id of their own."""
    output_runs: Runs | None = None
    """Outputs given as runs instead (`output_tokens` of them), where they are tokens of other contents."""
    namespace: Any = 0
    """SGLang's `extra_key`: requests of different namespaces share no prefix."""
    known_tokens: int = 0
    """Prompt tokens this trajectory had computed before: computing them again is recomputation."""
    logprob_start: int = -1
    """At most this many prompt tokens may come from the cache; -1: all but the last."""

    # --- scheduling state; written by the engine alone
    limit: int = 0
    """`max_new_tokens` after clipping to the pool and the context."""
    final: int = 0
    """Outputs after which it ends."""
    out: int = 0
    """Outputs handed out; kept while it is not in the running batch, derived from `base` while it is."""
    prefix: int = 0
    end: int = 0
    kv: int = 0
    """Slots written; kept while it is not in the running batch."""
    owned: int = 0
    """Tokens of its row that belong to the tree."""
    lock: Node | None = None
    base: int = 0
    """In the running batch: `kv` minus the decode steps the engine has launched, constant between two steps."""
    seq: int = 0
    """Place in the running batch."""
    entry: int = 0
    """Its valid entry in the heap of finishes; 0: none."""
    finish_key: int = 0
    """Count of launched decode steps at which its last token is in flight."""
    quota: int = 0
    linear: bool = True
    """See `admission_budget.FutureTokens`."""
    stain: bool = False
    dropped: bool = False
    """Retracted while a result was in flight, which is thrown away."""
    done: bool = False
    abort: str = ""
    """Reason, once it is to be aborted."""
    cached: int = 0
    version: int = 0
    """Weight version at its latest prefill."""
    kv_version: int = -1
    retracted: int = 0
    recomputed: int = 0
    events: list[tuple[int, int]] | None = None
    """(old version, outputs made by it or before) at each weight change."""
    submitted_t: float = 0.0
    started_t: float = -1.0
    first_t: float = -1.0

    def tokens(self) -> Runs:
        """Prompt and outputs as runs; longer than what exists, so it is always used with a length."""
        outputs: Runs = self.output_runs if self.output_runs is not None else ((self.output_content, 0, FOREVER),)
        return normalised(self.content + outputs)

    def tail(self, lo: int, hi: int) -> Runs:
        """Tokens lo..hi-1 of prompt and outputs."""
        n = self.prompt_tokens
        if lo == n and self.output_runs is None:
            return ((self.output_content, 0, hi - n),)
        if hi <= n:
            return self.content if not lo and hi == n else cut(self.content, lo, hi)
        return cut(self.tokens(), lo, hi)

    def spans(self, outputs: int, version: int) -> tuple[Span, ...]:
        """Which version made which outputs: the recorded changes, then `version` to the end. They partition the
        outputs."""
        if self.events is None:
            return ((version, 0, outputs),) if outputs else ()
        spans: list[Span] = []
        start = 0
        for old, count in self.events:
            if count > start:
                spans.append((old, start, count))
                start = count
        if outputs > start:
            spans.append((version, start, outputs))
        return tuple(spans)


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

__all__ = ["FOREVER", "Aborted", "Finished", "Notice", "Paused", "Request", "Run", "Runs", "Span"]
