"""What one engine's scheduler knows, and the ways requests come into it, hold memory and leave.

Nothing here costs O(batch) or O(tokens) per iteration: contexts, remaining tokens and pages needed are running sums
against `steps`, the count of decode steps launched, and finishes wait in a heap keyed by that count. A running request
has no counters of its own that move: its slots are `base + steps`, its outputs follow from them.

It refuses to know which batch comes next (`engine_admission`, `engine_decode`), the order of an iteration
(`engine_scheduler`) and time (`engine`).
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Any, Final

from sim.admission_budget import FutureTokens, NewTokenRatio
from sim.engine_options import DECODE, EXTEND, NOTHING, RETRACT_DECODE_STEPS, EngineModelOptions
from sim.engine_request import Request
from sim.radix_cache import RadixCache, normalised
from sim.tiered_cache import TieredCache

ENTRY_BITS: Final = 32
ENTRY_MASK: Final = (1 << 32) - 1
_push: Final = heappush
_pop: Final = heappop
_LOWEST = 1 << 63
"""Beyond every priority."""
NO_REQUESTS: Final[list[Request]] = []
"""Shared; lists of requests are replaced, never changed."""
REFUSED_CONTENT = -2
"""Content of the one-token prompt that stands in for a prompt that is too long."""


class State:
    """The state of one scheduler; all lengths in tokens. Raises ValueError for options that are not modelled."""

    __slots__ = [
        "_ending",
        "_seq",
        "_shortened",
        "_turn",
        "_unsorted",
        "batch",
        "cache",
        "cached_tokens",
        "caching",
        "chunk",
        "chunk_abort",
        "chunked",
        "context",
        "defer",
        "ended",
        "finish_key",
        "finishes",
        "flight",
        "flight_chunk",
        "formed",
        "full",
        "future",
        "future_ignore_eos",
        "iterations",
        "last",
        "loaded_tokens",
        "lpm",
        "max_len",
        "max_prefill",
        "max_run",
        "options",
        "overlap",
        "padded_attention",
        "page",
        "passes",
        "pool",
        "preempts",
        "prefill_again",
        "prefill_attention",
        "prefill_new",
        "prefill_tokens",
        "prioritized",
        "queue",
        "ratio",
        "recomputed_tokens",
        "residues",
        "retractions",
        "rows",
        "sign",
        "slots",
        "steps",
        "takes_in",
        "trace",
        "version",
    ]

    def __init__(self, options: EngineModelOptions) -> None:
        o = options
        page = o.page_size
        if o.schedule_policy not in ("fcfs", "lpm"):
            raise ValueError(f"schedule_policy {o.schedule_policy!r}: fcfs and lpm are modelled")
        if o.enable_priority_scheduling and o.schedule_policy != "fcfs":
            raise ValueError(f"enable_priority_scheduling with schedule_policy {o.schedule_policy!r}: fcfs is modelled")
        if o.retraction_policy != "length" and not (o.retraction_policy == "priority" and o.enable_priority_scheduling):
            raise ValueError(
                f"retraction_policy {o.retraction_policy!r} is length, or priority with enable_priority_scheduling"
            )
        if o.chunked_prefill_size != -1 and o.chunked_prefill_size < page:
            raise ValueError("chunked_prefill_size is -1 (off) or at least page_size")
        self.options = o
        self.page = page
        self.pool = o.max_total_num_tokens
        self.slots = self.pool // page * page
        self.max_run = self.rows = o.max_running_requests
        self.chunk = None if o.chunked_prefill_size == -1 else o.chunked_prefill_size
        self.max_prefill = o.max_prefill_tokens
        self.lpm = o.schedule_policy == "lpm" and not o.disable_radix_cache
        self.overlap = not o.disable_overlap_schedule
        self.caching = not o.disable_radix_cache
        self.max_len = min(o.context_length, self.pool) - 1
        self.passes = o.passes
        self.prioritized = o.enable_priority_scheduling
        self.preempts = o.enable_priority_scheduling and not o.disable_priority_preemption
        self.sign = 1 if o.schedule_low_priority_values_first else -1
        """Times a priority: the lower comes first."""
        self.cache = TieredCache(page, self.slots, o.host_tokens) if o.host_tokens else RadixCache(page, self.slots)
        self.takes_in = o.takes_in or o.host_tokens > 0
        """Whether KV may come from elsewhere (`sim.brought`)."""
        self.loaded_tokens = 0
        """Tokens that the prefill batch formed last takes from host memory."""
        self.ratio = NewTokenRatio(o.schedule_conservativeness, o.new_token_ratio_decay_steps)
        self.version = 0

        self.queue: deque[Request] = deque()
        """Waiting, in order."""
        self.batch: dict[int, Request] = {}
        """Running, in the order of joining."""
        self.chunked: Request | None = None
        """The request whose prompt is unfinished, if any."""
        self.chunk_abort: Request | None = None
        """It, if it is to be aborted at the next iteration."""
        self.full = False
        """SGLang's `batch_is_full` latch."""
        self.last = NOTHING
        """The batch launched last; with overlap its results are still in flight."""
        self.flight: list[Request] = []
        """The requests of a prefill in flight."""
        self.flight_chunk: Request | None = None
        """The one of them whose chunk yields no token."""

        self.steps = 0
        """Decode steps launched."""
        self.context = 0
        """Sum of `kv` over the running batch."""
        self.future = FutureTokens()
        self.future_ignore_eos = FutureTokens()
        self.residues = [0] * page
        """How many running requests have base % page == i."""
        self.finishes: list[int] = []
        """finish_key << 32 | entry, in one number because numbers compare fast. Entry: the request's place in the
        batch; void if nobody is there."""
        self._shortened: dict[int, Request] = {}
        """Entry -> request that is to end sooner than was said when it joined."""
        self.finish_key = 0
        """Count of steps at which the next last token is in flight, as of the latest `steps_ahead`."""
        self.formed: list[Request] = []
        """The prefill batch of the iteration being formed."""
        self._ending: list[Request] = []
        self._seq = 0
        self._turn = 0
        self._unsorted = False
        """Whether the queue is not in the order of priorities."""
        self.defer = 0
        """Iterations that `prefill_decode_interval` still keeps free of prefills."""

        self.ended: list[Request] = []
        """Requests that ended since the caller last looked, in order."""
        self.trace: list[Any] | None = None
        """If a list: the batches as (mode, [[rid, prefix, new]] or [[rid, kv, outputs]])."""
        self.prefill_new = 0
        self.padded_attention = False
        """Whether a prefill's attention computes squares of whole contexts."""
        self.prefill_attention = 0.0
        self.prefill_again = 0
        """Of the prefill batch formed last: computed tokens, query-key pairs, tokens computed again."""
        self.prefill_tokens = self.cached_tokens = self.recomputed_tokens = self.retractions = self.iterations = 0

    # --- in and out ---------------------------------------------------------------------------------------------------

    def enqueue(self, r: Request) -> None:
        """A request reaches the scheduler: clip what it may ask for, and put it at the end of the queue."""
        n = r.prompt_tokens
        if n >= self.max_len - 5:
            r.content, r.prompt_tokens, r.limit, r.final, r.abort = ((REFUSED_CONTENT, 0, 1),), 1, 1, 1, "refused"
        else:
            if len(r.content) > 1:
                r.content = normalised(r.content)
            limit, page = r.max_new_tokens, self.page
            context = self.max_len - n - 1
            if limit > context:
                limit = context
            pool = self.pool - (n if page == 1 else -(-n // page) * page) - page - 1
            if limit > pool:
                limit = pool
            r.limit = limit = limit if limit > 0 else 0
            r.final = r.output_tokens if r.output_tokens < limit else limit or 1
        self.queue.append(r)
        if self.prioritized:
            if r.priority is None:
                r.priority = self.sign * _LOWEST
            r.fill = r.prefix = 0
            self._take_turn(r)

    def _requeue(self, requests: list[Request]) -> None:
        """Requests that ran go to the tail of the queue."""
        self.queue.extend(requests)
        if self.prioritized:
            for r in requests:
                self._take_turn(r)

    def _take_turn(self, r: Request) -> None:
        self._turn = r.turn = self._turn + 1
        self._unsorted = True

    def abort_request(self, r: Request, reason: str = "aborted") -> bool:
        """Abort at the start of an iteration.

        Returns True if it was waiting and is gone; else it ends with its next result.
        """
        waits = not r.entry and r is not self.chunked
        if r.done or (r.abort and not waits):
            return False
        r.abort = reason
        if r.entry:
            self._finish_after(r, self._out(r) + 1)
        elif r is self.chunked:
            self.chunk_abort = r
        else:
            self.queue.remove(r)
            r.done = True
            return True
        return False

    def clear(self) -> None:
        """Forget the cache. Waiting requests stay; nothing may run."""
        self.cache.reset(self.slots)

    @property
    def busy(self) -> bool:
        """Whether a batch exists: running, in flight or half prefilled."""
        return bool(self.batch) or self.last != NOTHING or self.chunked is not None

    def _out(self, r: Request) -> int:
        """Outputs handed out so far (a token in flight is not)."""
        if not r.entry:
            return r.out
        made = r.base + self.steps - r.prompt_tokens + 1
        in_flight = self.overlap and (self.last == DECODE or (self.last == EXTEND and r in self.flight))
        return made - 1 if in_flight else made

    def record_version(self, version: int) -> None:
        """New weights: note for every request with outputs which version made them."""
        old, self.version = self.version, version
        exact = self.options.exact_spans
        made = self.steps + 1
        if not exact and self.overlap and self.last == DECODE:
            made -= 1  # a token of everybody is in flight
        for r in self.batch.values():
            if exact or self.last != EXTEND:
                outputs = r.base + made - r.prompt_tokens
            else:
                outputs = self._out(r)
            if outputs > 0:
                if r.events is None:
                    r.events = [(old, outputs)]
                else:
                    r.events.append((old, outputs))
        for r in self.queue if self.chunked is None else (self.chunked, *self.queue):
            if r.out > 0:
                if r.events is None:
                    r.events = []
                r.events.append((old, r.out))

    # --- the running batch --------------------------------------------------------------------------------------------

    def _join(self, r: Request) -> None:
        steps, kv = self.steps, r.kv
        self._seq = seq = self._seq + 1
        r.seq = r.entry = seq
        r.base = base = kv - steps
        self.batch[seq] = r
        self.context += kv
        if self.page > 1:
            self.residues[base % self.page] += 1
        (self.future_ignore_eos if r.ignore_eos else self.future).add(r, r.limit + r.prompt_tokens - 1 - base, steps)
        r.finish_key = key = r.final - 1 + r.prompt_tokens - base
        _push(self.finishes, key << ENTRY_BITS | seq)

    def _leave(self, r: Request) -> None:
        base, steps = r.base, self.steps
        r.kv = kv = base + steps
        r.entry = 0
        del self.batch[r.seq]
        self.context -= kv
        if self.page > 1:
            self.residues[base % self.page] -= 1
        (self.future_ignore_eos if r.ignore_eos else self.future).remove(r)

    def _finish_after(self, r: Request, outputs: int) -> None:
        """Let a running request end with its `outputs`-th token, if not sooner."""
        if outputs < r.final:
            r.final = outputs
            self._seq = r.entry = self._seq + 1
            r.finish_key = outputs - 1 + r.prompt_tokens - r.base
            self._shortened[r.entry] = r
            _push(self.finishes, r.finish_key << ENTRY_BITS | r.entry)

    def _ends(self, entry: int) -> Request | None:
        """The running request whose valid entry this is."""
        r = self.batch.get(entry)
        if r is None and self._shortened:
            r = self._shortened.get(entry)
        return r if r is not None and r.entry == entry else None

    def _pop_ending(self, key: int) -> list[Request]:
        """Running requests whose last token is in flight at `key` steps, in batch order."""
        heap = self.finishes
        ending: list[Request] = []
        while heap and heap[0] >> ENTRY_BITS <= key:
            entry = _pop(heap) & ENTRY_MASK
            r = self._ends(entry)
            if r is not None:
                ending.append(r)
            if self._shortened:
                self._shortened.pop(entry, None)
        if len(ending) > 1:
            ending.sort(key=_seq)
        return ending

    # --- the tree -----------------------------------------------------------------------------------------------------

    def _publish(self, r: Request, upto: int) -> None:
        """Put the first `upto` tokens of `r` in the tree and lock them.

        Slots of tokens that someone else has published first are freed.
        """
        page, cache = self.page, self.cache
        p = r.prompt_tokens
        if page > 1:
            upto -= upto % page
            p -= p % page
        if not upto or not self.caching:
            return
        node, owned = r.lock, r.owned
        cache.touch(node)  # type: ignore[arg-type]
        have = 0
        if upto > owned:
            node, have = cache.extend(node, r.tail(owned, upto), upto - owned, r.version, True)  # type: ignore[arg-type]
        if 0 < p < upto:
            cache.separate(node, p, r.tokens())  # type: ignore[arg-type]
        cache.free += have
        r.lock = node
        r.owned = upto

    def _release(self, r: Request, publish: bool) -> None:
        """Give back everything `r` holds; with `publish` its tokens stay in the tree, unlocked."""
        page, cache = self.page, self.cache
        kv, owned, lock = r.kv, r.owned, r.lock
        if publish and self.caching:
            p = r.prompt_tokens
            upto = p + r.out
            if kv < upto:
                upto = kv
            if page > 1:
                upto -= upto % page
                p -= p % page
            if upto:
                have, node = 0, lock
                apart = lock.end == p  # type: ignore[union-attr]  # the prompt ends at a node already
                if not apart or upto == p:
                    cache.touch(lock)  # type: ignore[arg-type]
                if upto > owned:
                    node, have = cache.extend(lock, r.tail(owned, upto), upto - owned, r.version, False)  # type: ignore[arg-type]
                if apart:
                    if p < upto:
                        cache.touch(lock)  # type: ignore[arg-type]
                elif 0 < p < upto:
                    cache.separate(node, p, r.tokens())  # type: ignore[arg-type]
                cache.free += have
                owned = upto
        cache.free += (kv if page == 1 else -(-kv // page) * page) - owned
        cache.unpin(lock)  # type: ignore[arg-type]
        r.lock = None
        self.rows += 1

    def _put_back(self, r: Request, remaining: int) -> None:
        """Retract one request: its slots go, nothing is published, its outputs stay with it."""
        if r.entry:
            r.out = self._out(r)
            self._leave(r)
        self._release(r, False)
        wanted = remaining * RETRACT_DECODE_STEPS
        if self.cache.free < wanted:
            self.cache.evict(wanted)
        if r.kv > r.known_tokens:
            r.known_tokens = r.kv
        r.dropped = r.stain = True
        r.prefix = r.owned = r.kv = r.end = 0
        r.retracted += 1

    # --- results ------------------------------------------------------------------------------------------------------

    def _settle_prefill(self, batch: list[Request], chunk: Request | None, t: float) -> None:
        """First tokens, at time `t`. A middle chunk yields none; a retracted request's is thrown away."""
        for r in batch:
            if r is chunk or r.dropped or r.done:
                continue
            r.out += 1
            if r.first_t < 0.0:
                r.first_t = t
            if r.out >= r.final:
                self._end(r)
            elif r.abort:
                r.final = r.out
                self._end(r)
            else:
                self._publish(r, r.end)
                r.prefix = r.end

    def _end(self, r: Request) -> None:
        """The last token of `r` is handed out: publish and give back what it holds."""
        if r.entry:
            self._leave(r)
            self.full = False
        r.out = r.final
        self._release(r, True)
        r.done = True
        self.ended.append(r)


def _seq(r: Request) -> int:
    return r.seq
