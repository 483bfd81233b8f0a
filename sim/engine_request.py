"""What goes into an engine: requests. What comes out is in `engine_notices`.

A request says which tokens it brings and how many it will emit; it refuses to know engines, queues of other requests
and time models. The scheduling state of a request lives in the same object (one allocation a request), below the line
that says so.
"""

from __future__ import annotations

from typing import Any

from sim.engine_notices import Span
from sim.radix_cache import Node, Runs, cut, normalised

FOREVER = 1 << 60
"""Length of the run that stands for a request's outputs, however many it will make."""


class Request:
    """One generation request. An object is submitted once; a retry is a new object (it may carry the same `rid`)."""

    __slots__ = (
        "abort",
        "base",
        "brought",
        "cached",
        "content",
        "done",
        "dropped",
        "end",
        "entry",
        "events",
        "fill",
        "final",
        "finish_key",
        "first_t",
        "ignore_eos",
        "known_tokens",
        "kv",
        "kv_version",
        "limit",
        "linear",
        "lock",
        "logprob_start",
        "max_new_tokens",
        "namespace",
        "out",
        "output_content",
        "output_runs",
        "output_tokens",
        "owned",
        "prefix",
        "priority",
        "prompt_tokens",
        "quota",
        "recomputed",
        "retracted",
        "rid",
        "seq",
        "stain",
        "started_t",
        "stops",
        "turn",
        "version",
    )

    def __init__(
        self,
        rid: Any,
        content: Runs,
        prompt_tokens: int,
        output_tokens: int,
        max_new_tokens: int,
        stops: bool = True,
        ignore_eos: bool = False,
        output_content: int = -1,
        output_runs: Runs | None = None,
        namespace: Any = 0,
        known_tokens: int = 0,
        logprob_start: int = -1,
        priority: int | None = None,
    ) -> None:
        self.rid = rid
        """Any hashable name."""
        self.content = content
        """The prompt as runs (content id, start, length), lengths summing to `prompt_tokens`."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Tokens it will emit, at least 1; the last one ends it. More than the (clipped) `max_new_tokens`: it ends
        there by length."""
        self.max_new_tokens = max_new_tokens
        self.stops = stops
        """Ends by a stop token; else by length, and then `output_tokens` is `max_new_tokens`."""
        self.ignore_eos = ignore_eos
        self.output_content = output_content
        """Content id of the outputs, which are its tokens from 0 on. Each request's outputs need an id of their
        own."""
        self.output_runs = output_runs
        """Outputs given as runs instead (`output_tokens` of them), where they are tokens of other contents."""
        self.namespace = namespace
        """SGLang's `extra_key`: requests of different namespaces share no prefix."""
        self.known_tokens = known_tokens
        """Prompt tokens this trajectory had computed before: computing them again is recomputation."""
        self.logprob_start = logprob_start
        """At most this many prompt tokens may come from the cache; -1: all but the last."""
        self.priority = priority
        """Looked at under priority scheduling alone; None: the lowest."""

        self.brought: tuple[int, int] | None = None
        """(tokens, weight version): the leading tokens whose KV has come from another engine, if its options let it in.
        Gone with the next flush."""

        # --- scheduling state; written by the engine alone
        self.limit = 0
        self.final = 0
        self.out = 0
        self.kv = 0
        self.entry = 0
        self.stain = False
        self.dropped = False
        self.done = False
        self.abort = ""
        self.cached = 0
        self.kv_version = -1
        self.retracted = 0
        self.recomputed = 0
        self.events: list[tuple[int, int]] | None = None
        self.started_t = -1.0
        self.first_t = -1.0

    limit: int
    """`max_new_tokens` after clipping to the pool and the context."""
    final: int
    """Outputs after which it ends."""
    out: int
    """Outputs handed out; kept while it is not in the running batch, derived from `base` while it is."""
    kv: int
    """Slots written; kept while it is not in the running batch."""
    entry: int
    """Its valid entry in the heap of finishes; 0: none."""
    dropped: bool
    """Retracted while a result was in flight, which is thrown away."""
    abort: str
    """Reason, once it is to be aborted."""
    events: list[tuple[int, int]] | None
    """(old version, outputs made by it or before) at each weight change."""

    # from the first admission on
    prefix: int
    end: int
    owned: int
    """Tokens of its row that belong to the tree."""
    lock: Node | None
    version: int
    """Weight version at its latest prefill."""

    # under priority scheduling alone
    turn: int
    """Count of entries into the queue at its latest one."""
    fill: int
    """Tokens of prompt and outputs when it was last looked at for admission."""

    # from the first time in the running batch on
    base: int
    """In the running batch: `kv` minus the decode steps the engine has launched, constant between two steps."""
    seq: int
    """Place in the running batch."""
    finish_key: int
    """Count of launched decode steps at which its last token is in flight."""
    quota: int
    linear: bool
    """See `admission_budget.FutureTokens`."""

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
            content = self.content
            if not lo and hi == n:
                return content
            c, start, last = content[-1]
            before = n - last
            return ((c, start + lo - before, hi - lo),) if lo >= before else cut(content, lo, hi)
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
