"""The scheduler of one SGLang 0.5.23 engine, rule for rule: which requests form which batch, in which order, with what
memory.

It is a deterministic function of the arrivals of each iteration. It refuses to know durations: `form` chooses a batch,
`settle` handles the results that become visible at the end of the iteration, and whoever owns the clock says when that
is.

One iteration of the overlap loop: take in arrivals; publish the last chunk; choose a prefill batch or else one decode
step; launch it; handle the results of the *previous* batch. Without overlap the results handled are the same batch's.

Between two changes of the running batch the same decode step repeats. `plain_steps` says how many such steps are ahead
and `run` takes them all at once. Nothing here costs O(batch) or O(tokens) per iteration: contexts, remaining tokens and
pages needed are running sums against `steps`, the count of decode steps launched, and finishes wait in a heap keyed by
that count.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from msgspec import Struct

from sim.admission_budget import CLIP_MAX_NEW_TOKENS, FutureTokens, NewTokenRatio
from sim.engine_request import FOREVER, Request
from sim.radix_cache import RadixCache, normalised

NOTHING, DECODE, EXTEND = 0, 1, 2
"""Kinds of batch."""

RETRACT_DECODE_STEPS = 20
"""SGLANG_RETRACT_DECODE_STEPS: slots to free per remaining request after a retraction."""
IN_BATCH_PREFIX = 32
"""Tokens of a shared prefix from which lpm holds a request back
(IN_BATCH_PREFIX_CACHING_{CHECK,DEPRIORITIZE}_THRESHOLD)."""
LPM_QUEUE = 128
"""Longest queue that lpm sorts, and how many waiting requests fcfs touches."""
TOUCH_EVERY = 32
NO_REQUESTS: list[Request] = []
"""Shared; lists of requests are replaced, never changed."""
_TIE = 1e-3
"""A float comparison closer than this many tokens is decided by summing in the engine's own order."""
_LATE = float("inf")
REFUSED_CONTENT = -2
"""Content of the one-token prompt that stands in for a prompt that is too long."""


class PrefillOutOfMemory(RuntimeError):
    """The real engine would raise here: a prefill batch needs more slots than can be freed."""


class EngineModelOptions(Struct, frozen=True):
    """One engine's server arguments, under SGLang's names. `max_total_num_tokens` is the KV pool in tokens."""

    max_total_num_tokens: int
    max_running_requests: int = 256
    chunked_prefill_size: int = 8192
    """-1: off."""
    max_prefill_tokens: int = 16384
    page_size: int = 1
    schedule_policy: str = "fcfs"
    """`fcfs` or `lpm`."""
    schedule_conservativeness: float = 1.0
    context_length: int = 1 << 40
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    """Nothing is reused and nothing stays after a finish. The scheduling rules stay those of a cache that never
    hits."""
    new_token_ratio_decay_steps: int = 600
    """SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS."""
    forward: str = "device"
    """`device`: launching a batch takes no host time and the host waits for the previous one; `host`: the CPU engine,
    whose forward is synchronous."""
    exact_spans: bool = False
    """Count the token in flight at an in-place weight change to the old version, which made it. The real engine under
    overlap counts it to the new one, and so does the default."""
    passes: int = 0
    """Scheduling passes counted before the first request (a server that was health-probed has 1)."""


class Scheduler:
    """State and rules of one engine; all lengths in tokens."""

    def __init__(self, options: EngineModelOptions) -> None:
        o = options
        page = o.page_size
        if o.schedule_policy not in ("fcfs", "lpm"):
            raise ValueError(f"schedule_policy {o.schedule_policy!r}: fcfs and lpm are modelled")
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
        self.cache = RadixCache(page, self.slots)
        self.ratio = NewTokenRatio(o.schedule_conservativeness, o.new_token_ratio_decay_steps)
        self.version = 0

        self.queue: deque[Request] = deque()
        """Waiting, in order."""
        self.batch: dict[int, Request] = {}
        """Running, in the order of joining."""
        self.chunked: Request | None = None
        """The request whose prompt is unfinished, if any."""
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
        self.finishes: list[tuple[int, int, Request]] = []
        """(finish_key, entry, request); an entry is valid while the request says so."""
        self.finish_key = 0
        """Count of steps at which the next last token is in flight, as of the latest `steps_ahead`."""
        self.formed: list[Request] = []
        """The prefill batch of the iteration being formed."""
        self._ending: list[Request] = []
        self._seq = 0

        self.ended: list[Request] = []
        """Requests that ended since the caller last looked, in order."""
        self.trace: list[Any] | None = None
        """If a list: the batches as (mode, [[rid, prefix, new]] or [[rid, kv, outputs]])."""
        self.prefill_new = 0
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
            limit = r.max_new_tokens
            page = self.page
            limit = min(limit, self.max_len - n - 1, self.pool - (n if page == 1 else -(-n // page) * page) - page - 1)
            r.limit = limit = limit if limit > 0 else 0
            r.final = r.output_tokens if r.output_tokens < limit else limit or 1
        self.queue.append(r)

    def abort_request(self, r: Request, reason: str = "aborted") -> bool:
        """Abort at the start of an iteration. Returns True if it was waiting and is gone; else it ends with its next
        result."""
        if r.done or r.abort:
            return False
        r.abort = reason
        if r.entry:
            self._finish_after(r, self._out(r) + 1)
        elif r is not self.chunked:
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
        return (
            made - 1 if self.overlap and (self.last == DECODE or (self.last == EXTEND and r in self.flight)) else made
        )

    def record_version(self, version: int) -> None:
        """New weights: note for every request with outputs which version made them."""
        old, self.version = self.version, version
        exact = self.options.exact_spans
        chunked = () if self.chunked is None else (self.chunked,)
        for group in (self.batch.values(), chunked, self.queue):
            for r in group:
                outputs = self._out(r)
                if exact and r.entry:
                    outputs = r.base + self.steps - r.prompt_tokens + 1
                if outputs > 0:
                    if r.events is None:
                        r.events = []
                    r.events.append((old, outputs))

    # --- membership of the running batch
    # -------------------------------------------------------------------------------

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
        heappush(self.finishes, (key, seq, r))

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
            heappush(self.finishes, (r.finish_key, r.entry, r))

    def _pop_ending(self, key: int) -> list[Request]:
        """Running requests whose last token is in flight at `key` steps, in batch order."""
        heap = self.finishes
        ending: list[Request] = []
        while heap and heap[0][0] <= key:
            _, entry, r = heappop(heap)
            if entry == r.entry:
                ending.append(r)
        if len(ending) > 1:
            ending.sort(key=_seq)
        return ending

    # --- the tree -----------------------------------------------------------------------------------------------------

    def _publish(self, r: Request, upto: int) -> None:
        """Put the first `upto` tokens of `r` in the tree and lock them; slots someone else published first are
        freed."""
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
                if 0 < p < upto:
                    cache.separate(node, p, () if apart else r.tokens())  # type: ignore[arg-type]
                cache.free += have
                owned = upto
        cache.free += (kv if page == 1 else -(-kv // page) * page) - owned
        cache.unpin(lock)  # type: ignore[arg-type]
        r.lock = None
        self.rows += 1

    # --- queue order --------------------------------------------------------------------------------------------------

    def _order(self) -> None:
        """Sort the queue (lpm), or every 32nd pass refresh the recency of what its head will hit (fcfs)."""
        queue, cache = self.queue, self.cache
        if self.lpm and len(queue) <= LPM_QUEUE:
            seen = RadixCache(1, 0)
            rank: dict[Request, float] = {}
            for r in queue:
                runs, n = (r.tokens() if r.out else r.content), r.prompt_tokens + r.out
                _, hit = cache.match(cache.root(r.namespace), runs, n)
                rank[r] = -min(hit, self._cap(r))
                if hit <= IN_BATCH_PREFIX:
                    root = seen.root(r.namespace)
                    if seen.match(root, runs, n)[1] >= IN_BATCH_PREFIX:
                        rank[r] = _LATE
                    else:
                        seen.extend(root, runs, n, 0, False)
            self.queue = deque(sorted(queue, key=rank.__getitem__))
        elif queue:
            if self.passes % TOUCH_EVERY == 0:
                before = None
                for r in reversed(tuple(islice(queue, LPM_QUEUE))):
                    if r.out:
                        cache.match(cache.root(r.namespace), r.tokens(), r.prompt_tokens + r.out)
                        before = None
                    elif (
                        r.content,
                        r.namespace,
                    ) != before:  # equal prompts in a row: only the last touch leaves a trace
                        cache.match(cache.root(r.namespace), r.content, r.prompt_tokens)
                        before = (r.content, r.namespace)
            self.passes += 1

    def _cap(self, r: Request) -> int:
        """Most tokens of `r` that may come from the cache: one token must be computed."""
        n = r.prompt_tokens + r.out - 1
        return n if r.logprob_start < 0 or n < r.logprob_start else r.logprob_start

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _running_offset(self, ratio: float) -> tuple[float, bool]:
        """Tokens the running batch is expected to ask for, and whether the float is exactly the engine's."""
        steps, total = self.steps, self.future.total(self.steps)
        whole = self.future_ignore_eos.total(steps)
        if self.overlap:
            if self.last == DECODE:
                total += self.future.linear
                whole += self.future_ignore_eos.linear
            elif self.last == EXTEND:
                for r in self.flight:
                    if r.entry and r.linear:
                        if r.ignore_eos:
                            whole += 1
                        else:
                            total += 1
        return whole + total * ratio, not total or ratio == 1.0

    def _running_offset_in_order(self, ratio: float) -> float:
        """The same sum as the engine adds it up, request by request."""
        acc = 0.0
        for r in self.batch.values():
            acc += min(r.limit - self._out(r), CLIP_MAX_NEW_TOKENS) * (1.0 if r.ignore_eos else ratio)
        return acc

    def _prefill(self, t: float) -> list[Request]:
        """One admission pass: the prefill batch it formed, with its slots; empty if none."""
        running = len(self.batch)
        pending = self.chunked
        if pending is None and (self.rows <= 0 or running >= self.max_run):
            self.full = True
            return []
        self._order()

        page, cache, chunk = self.page, self.cache, self.chunk
        ratio = self.ratio.value()
        total, exact = self._running_offset(ratio)
        charges: list[int] = []
        now_offset = 0
        rem_input = self.max_prefill
        rem_chunk = chunk if chunk is not None else FOREVER
        batch: list[Request] = []
        cut: Request | None = None
        taken = continued = 0

        if pending is not None:  # the unfinished prompt always goes first
            want = pending.prompt_tokens + pending.out - pending.prefix
            room = cache.free + cache.evictable - total
            if not exact and abs(room - round(room)) < _TIE:
                total, exact = self._running_offset_in_order(ratio), True
                room = cache.free + cache.evictable - total
            limit = min(rem_chunk, int(room))
            if limit <= 0:
                limit = rem_chunk
            if want > limit:
                n, future = limit, 0
            else:
                n, future = want, min(pending.limit, CLIP_MAX_NEW_TOKENS)
                self.chunked = None
            pending.end = pending.prefix + n
            batch.append(pending)
            continued = 1
            e = n if page == 1 else -(-n // page) * page
            total += e + page + future
            charges.append(e + page + future)
            now_offset += e + page
            rem_input -= e
            rem_chunk -= e

        for r in self.queue:
            if rem_input <= 0 or rem_chunk <= 0:
                left = cache.free + cache.evictable
                if not exact and abs(left - total) < _TIE:
                    total, exact = self._total_in_order(ratio, charges), True
                if left - total > 0 and left - now_offset > 0:
                    break
            size = len(batch)
            if self.full or size >= self.max_run - running or size - continued >= self.rows:
                self.full = True
                break
            outputs = r.out
            length = r.prompt_tokens + outputs
            cap = length - 1
            if 0 <= r.logprob_start < cap:
                cap = r.logprob_start
            node, hit = cache.match(
                cache.root(r.namespace), r.tokens() if outputs else r.content, cap if self.caching else 0
            )
            cache.pin(node)
            n = length - hit
            future = r.limit - outputs
            if future > CLIP_MAX_NEW_TOKENS:
                future = CLIP_MAX_NEW_TOKENS
            elif future < 0:
                future = 0
            need = n + future + page
            left = cache.free + cache.evictable
            if not exact and abs(left - total - need) < _TIE:
                total, exact = self._total_in_order(ratio, charges), True
            if need >= left - total:
                cache.unpin(node)
                self.full = bool(batch or running)
                break
            future = r.limit if r.limit < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS
            e = n if page == 1 else -(-n // page) * page
            if chunk is None:
                if batch and e >= rem_input:
                    cache.unpin(node)
                    break
            elif e > rem_chunk:
                n = (hit + rem_chunk // page * page) // page * page - hit
                future = 0
                if n <= 0:
                    cache.unpin(node)
                    break
                cut = r
                e = n if page == 1 else -(-n // page) * page
            r.prefix = r.owned = hit
            r.end = hit + n
            r.lock = node
            batch.append(r)
            taken += 1
            total += e + page + future
            charges.append(e + page + future)
            now_offset += e + page
            rem_input -= e
            rem_chunk -= e
            if not exact and abs(left - total) < _TIE:
                total, exact = self._total_in_order(ratio, charges), True
            if left - total <= 0 or left - now_offset <= 0:
                self.full = True
                break
            if rem_input <= 0 or rem_chunk <= 0:
                break

        if not batch:
            return batch
        queue = self.queue
        for _ in range(taken):
            queue.popleft()
        if cut is not None:
            self.chunked = cut
        self._launch_prefill(batch, t)
        return batch

    def _total_in_order(self, ratio: float, charges: list[int]) -> float:
        acc = self._running_offset_in_order(ratio)
        for c in charges:
            acc += c
        return acc

    def _launch_prefill(self, batch: list[Request], t: float) -> None:
        """Give the batch its slots and note what it computes."""
        page, cache, version = self.page, self.cache, self.version
        new = again = 0
        attention = 0.0
        for r in batch:
            new += r.end - r.prefix
        wanted = new + len(batch) * page if page > 1 else new
        if cache.free < wanted:
            cache.evict(wanted)
        for r in batch:
            prefix, end = r.prefix, r.end
            n = end - prefix
            if page == 1:
                cache.free -= n
            else:
                cache.free -= -(-end // page) * page + -prefix // page * page
            if not r.kv:
                self.rows -= 1
                r.dropped = False
                if not r.stain:
                    r.started_t = t
                    r.cached = prefix
                    self.cached_tokens += prefix
                    if prefix:
                        r.kv_version = r.lock.version  # type: ignore[union-attr]
            r.kv = end
            r.version = version
            attention += n * (prefix + 0.5 * n)
            known = r.known_tokens
            if known > prefix:
                known = (known if known < end else end) - prefix
                again += known
                r.recomputed += known
        if cache.free < 0:
            raise PrefillOutOfMemory(f"a prefill of {new} tokens lacks {-cache.free} slots")
        self.prefill_new = new
        self.prefill_attention = attention
        self.prefill_again = again
        self.prefill_tokens += new
        self.recomputed_tokens += again

    # --- decode -------------------------------------------------------------------------------------------------------

    def _fits(self) -> bool:
        """Whether the next step of the running batch has slots, after eviction if need be."""
        page, cache = self.page, self.cache
        need = len(self.batch) if page == 1 else page * self.residues[-self.steps % page]
        if cache.free < need:
            cache.evict(need)
        return cache.free >= need

    def _decode(self) -> bool:
        """One decode step of the running batch. False if there is none (nothing left to run, or it must wait for
        memory)."""
        before = len(self.batch)
        ending = 0
        for r in self._ending:
            if r.final >= r.limit:  # its last token is in flight: no row for it
                self._leave(r)
                ending += 1
        if not self.batch:
            self.full = False
            return False
        if self._fits():
            self.ratio.taken += 1
        elif ending:  # their slots come free with this iteration's results
            self.full = False
            return False
        else:
            self._retract()
        count = len(self.batch)
        if count < before:
            self.full = False
            if not count:
                return False
        page, cache = self.page, self.cache
        if cache.free < count * page:
            cache.evict(count * page)
        cache.free -= count if page == 1 else page * self.residues[-self.steps % page]
        self.steps += 1
        self.context += count
        return True

    def _retract(self) -> None:
        """Not even eviction makes room: send requests back to the queue, those with the fewest outputs first."""
        keep = sorted(self.batch.values(), key=lambda r: (self._out(r), -r.prompt_tokens), reverse=True)
        gone: list[Request] = []
        while len(keep) > 1 and (not gone or not self._fits()):
            r = keep.pop()
            self._put_back(r, len(keep))
            gone.append(r)
        self.retractions += len(gone)
        if len(keep) == 1 and not self._fits():  # even alone it cannot go on
            r = keep.pop()
            r.abort = "out_of_memory"
            r.out = self._out(r)
            self._leave(r)
            self._release(r, False)
            r.done = r.dropped = True
            self.ended.append(r)
            if self.cache.free < 0:
                raise AssertionError("slots do not add up")
        if len(gone) > 1 or keep != list(self.batch.values()):
            self.batch = {}
            for r in keep:
                self._seq = r.seq = self._seq + 1
                self.batch[r.seq] = r
        self.queue.extend(gone)
        outputs = sum(self._out(r) for r in keep) + RETRACT_DECODE_STEPS * len(keep)
        self.ratio.set(min(1.0, outputs / (sum(r.limit for r in keep) + 1)))

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

    # --- one iteration ------------------------------------------------------------------------------------------------

    def form(self, t: float) -> int:
        """Choose and launch the next batch; returns its kind. `settle` must follow. `t`: its launch time, for the
        requests."""
        r = self.chunked
        if r is not None:
            if r.abort:
                self.chunked = None
                self._release(r, False)
                r.done = True
                self.ended.append(r)
            else:
                if r.end > r.prefix:
                    self._publish(r, r.end)
                r.prefix = r.end
        finishes = self.finishes
        ends = finishes and finishes[0][0] <= self.steps and self.overlap
        self._ending = self._pop_ending(self.steps) if ends else NO_REQUESTS
        if not self.batch:
            self.full = False
        self.formed = NO_REQUESTS if self.chunked is None and (self.full or not self.queue) else self._prefill(t)
        kind = NOTHING
        if self.formed:
            kind = EXTEND
        elif self.batch and self._decode():
            kind = DECODE
        if kind:
            self.iterations += 1
            if self.trace is not None:
                self._note(kind)
        elif self.last == NOTHING and not self.queue:
            self.ratio.reset()
        return kind

    def settle(self, kind: int, t: float) -> None:
        """Handle the results visible at the end of the iteration (time `t`) that launched a batch of `kind`; then merge
        a prefill."""
        formed = self.formed
        if not self.overlap:
            if kind == EXTEND:
                self._settle_prefill(formed, self.chunked, t)
            elif kind == DECODE:
                for r in self._pop_ending(self.steps):
                    self._end(r)
        elif self.last == EXTEND:
            self._settle_prefill(self.flight, self.flight_chunk, t)
        else:
            for r in self._ending:
                if not r.dropped:
                    self._end(r)
        self.last = kind
        self.flight = formed
        if kind == EXTEND:
            self.flight_chunk = chunk = self.chunked
            alone = not self.batch
            for r in formed:
                if r.done or r is chunk:
                    self.full = False
                else:
                    self._join(r)
                    if alone:
                        self.full = False

    def _settle_prefill(self, batch: list[Request], chunk: Request | None, t: float) -> None:
        for r in batch:
            if (
                r is chunk or r.dropped or r.done
            ):  # a middle chunk yields no token; a retracted request's token is thrown away
                continue
            r.out += 1
            if r.first_t < 0.0:
                r.first_t = t
            if r.out >= r.final or r.abort:
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

    def put_all_back(self, t: float) -> None:
        """Pause with `retract`: handle the results in flight, then send everything to the tail of the queue."""
        if self.overlap:
            self._ending = self._pop_ending(self.steps)
            self.formed = []
            self.settle(NOTHING, t)
        self.last = NOTHING
        batch = list(self.batch.values())
        for i, r in enumerate(batch):
            self._put_back(r, len(batch) - i)
        self.queue.extend(batch)
        chunk = self.chunked
        if chunk is not None:
            self.chunked = None
            if chunk.abort:
                self._release(chunk, False)
                chunk.done = True
                self.ended.append(chunk)
            else:
                self._put_back(chunk, 0)
                self.queue.append(chunk)

    # --- many iterations at once --------------------------------------------------------------------------------------

    def admits(self) -> bool:
        """Whether a request in the queue would be looked at now (rows free, latch not set)."""
        running = len(self.batch)
        return self.rows > 0 and running < self.max_run and not (self.full and running)

    def plain_steps(self) -> int:
        """How many decode steps of the present running batch are ahead in which nothing happens but the steps.

        With overlap the next finish is handled in the iteration after them, else in the last of them. 0: form an
        iteration.
        """
        if not self.batch or self.chunked is not None or (self.queue and self.admits()):
            return 0
        return self.steps_ahead()

    def steps_ahead(self) -> int:
        """The same where something runs and no prefill can be formed."""
        heap = self.finishes
        while heap[0][1] != heap[0][2].entry:
            heappop(heap)
        self.finish_key = key = heap[0][0]
        steps = key - self.steps
        cache, page, count = self.cache, self.page, len(self.batch)
        slots = cache.free + cache.evictable
        if steps * count > slots if page == 1 else (steps + page) * count > slots - page:
            steps = min(steps, self._steps_with_memory(slots))
        return steps

    def _steps_with_memory(self, slots: int) -> int:
        """Decode steps for which `slots` last: the largest k with pages(k) <= slots / page."""
        page, count = self.page, len(self.batch)
        if page == 1:
            return slots // count
        pages = slots // page
        cycles, left = divmod(pages, count)
        k, at = cycles * page, -self.steps
        while (left := left - self.residues[(at - k) % page]) >= 0:
            k += 1
        return k

    def run(self, k: int) -> None:
        """Take `k` plain steps. Evictions happen at the steps, and with the sizes, at which single steps would have
        them."""
        page, cache, count = self.page, self.cache, len(self.batch)
        steps = self.steps
        if self.trace is not None:
            self._note_run(k)
        if page == 1:
            left = k
            while cache.free < left * count:
                ahead = cache.free // count  # steps that need no eviction
                cache.free -= ahead * count
                left -= ahead
                cache.tag = steps + k - left
                cache.evict(count)
            cache.free -= left * count
        else:
            self._run_pages(k)
        cache.tag = 0
        self.steps = steps + k
        self.context += k * count
        self.ratio.taken += k
        self.iterations += k
        self.last = DECODE
        self.flight = NO_REQUESTS
        if not self.overlap:
            for r in self._pop_ending(self.steps):
                self._end(r)

    def run_after_prefill(self, k: int, t: float) -> None:
        """The same with the results of a prefill in flight: they come at the end of the first step, at time `t`."""
        flight, chunk = self.flight, self.flight_chunk
        self.run(1)
        self._settle_prefill(flight, chunk, t)
        if k > 1:
            self.run(k - 1)

    def _run_pages(self, k: int) -> None:
        page, cache, residues, steps = self.page, self.cache, self.residues, self.steps
        per_cycle = page * len(self.batch)
        i = 0
        while i < k:
            if cache.free >= per_cycle or not cache.evictable:
                cycles = min((k - i) // page, cache.free // per_cycle - 1 if cache.evictable else FOREVER)
                if cycles > 0 and (cache.evictable or cache.log is None):  # whole cycles take a page a request
                    cache.free -= cycles * per_cycle
                    i += cycles * page
                    continue
            need = page * residues[-(steps + i) % page]
            cache.tag = steps + i
            if cache.free < need:
                cache.evict(need)
            if cache.free < per_cycle and (cache.evictable or cache.log is not None):
                cache.evict(per_cycle)
            cache.free -= need
            i += 1

    # --- tracing ------------------------------------------------------------------------------------------------------

    def _note(self, kind: int) -> None:
        """Write down the batch just formed."""
        if kind == EXTEND:
            self.trace.append((EXTEND, [[r.rid, r.prefix, r.end - r.prefix] for r in self.formed]))  # type: ignore[union-attr]
            return
        rows = []
        for r in self.batch.values():
            kv = r.base + self.steps
            lag = self.overlap and (self.last == DECODE or (self.last == EXTEND and r in self.flight))
            rows.append([r.rid, kv, kv - r.prompt_tokens - (1 if lag else 0)])
        self.trace.append((DECODE, rows))  # type: ignore[union-attr]

    def _note_run(self, k: int) -> None:
        """Write down the `k` batches of a run."""
        rows = list(self.batch.values())
        for i in range(1, k + 1):
            at = self.steps + i
            new = set(self.flight) if i == 1 and self.overlap and self.last == EXTEND else ()
            lag = self.overlap and (i > 1 or self.last == DECODE)
            self.trace.append(  # type: ignore[union-attr]
                (DECODE, [[r.rid, r.base + at, r.base + at - r.prompt_tokens - (lag or r in new)] for r in rows])
            )


def _seq(r: Request) -> int:
    return r.seq
