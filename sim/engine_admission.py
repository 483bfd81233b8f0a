"""Admission: the order of the queue and the prefill batch that a scheduling pass forms (SGLang 0.5.23 `PrefillAdder`).

A candidate, its matched prefix locked, must satisfy `extend + min(max_new - outputs, 4096) + page < available +
evictable - expected future tokens`; the first that does not ends the pass. On admission it is charged in full; as a
running request by `new_token_ratio`. It refuses to know decode steps and time.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from sim.admission_budget import CLIP_MAX_NEW_TOKENS
from sim.brought import take_in
from sim.engine_decode import Decoding
from sim.engine_options import DECODE, EXTEND, IN_BATCH_PREFIX, LPM_QUEUE, TOUCH_EVERY
from sim.engine_request import FOREVER, Request
from sim.engine_state import NO_REQUESTS
from sim.errors import PrefillOutOfMemory
from sim.radix_cache import RadixCache

_TIE: Final = 1e-3
"""A float comparison closer than this many tokens is decided by summing in the engine's own order."""
_LATE = float("inf")


class Admission(Decoding):
    """`_prefill` is one pass."""

    __slots__ = ()

    # --- queue order --------------------------------------------------------------------------------------------------

    def _order(self) -> None:
        """Sort the queue (lpm), or every 32nd pass refresh the recency of what its head will hit (fcfs)."""
        if self._unsorted:
            sign = self.sign
            self.queue = deque(sorted(self.queue, key=lambda r: (sign * r.priority, r.turn)))  # type: ignore[operator]
            self._unsorted = False
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
                before = None  # equal prompts in a row: only the last touch leaves a trace
                for r in reversed(tuple(islice(queue, LPM_QUEUE))):
                    if r.out:
                        cache.match(cache.root(r.namespace), r.tokens(), r.prompt_tokens + r.out)
                        before = None
                    elif (key := (r.content, r.namespace)) != before:
                        cache.match(cache.root(r.namespace), r.content, r.prompt_tokens)
                        before = key
            self.passes += 1

    def _cap(self, r: Request) -> int:
        """Most tokens of `r` that may come from the cache: one token must be computed."""
        n = r.prompt_tokens + r.out - 1
        return n if r.logprob_start < 0 or n < r.logprob_start else r.logprob_start

    # --- one pass -----------------------------------------------------------------------------------------------------

    def _defers(self) -> bool:
        """Whether `prefill_decode_interval` keeps this iteration free of prefills."""
        if len(self.batch) < self.options.prefill_decode_interval_min_bs:
            self.defer = 0
            return False
        self.defer -= 1
        return True

    def _running_offset(self, ratio: float) -> tuple[float, bool]:
        """Tokens the running batch is expected to ask for, and whether the float is exactly the engine's."""
        future, ignoring = self.future, self.future_ignore_eos
        total = future.total(self.steps)
        whole = ignoring.total(self.steps) if ignoring.linear or ignoring.clipped else 0
        if self.overlap:
            if self.last == DECODE:
                total += future.linear
                whole += ignoring.linear
            elif self.last == EXTEND:
                for r in self.flight:
                    if r.entry and r.linear:
                        if r.ignore_eos:
                            whole += 1
                        else:
                            total += 1
        return whole + total * ratio, not total or ratio == 1.0

    def _offset(self, r: Request, ratio: float) -> float:
        """What one of them is expected to ask for, as the engine computes it."""
        return min(r.limit - self._out(r), CLIP_MAX_NEW_TOKENS) * (1.0 if r.ignore_eos else ratio)

    def _running_offset_in_order(self, ratio: float) -> float:
        """The same sum as the engine adds it up, request by request."""
        acc = 0.0
        for r in self.batch.values():
            acc += self._offset(r, ratio)
        return acc

    def _prefill(self, t: float) -> list[Request]:
        """One admission pass: the prefill batch it formed, with its slots; empty if none."""
        running = len(self.batch)
        pending = self.chunked
        if pending is None and (self.rows <= 0 or running >= self.max_run) and not self.preempts:
            self.full = True
            return []
        self._order()

        page, cache, chunk = self.page, self.cache, self.chunk
        ratio = self.ratio.value()
        if self.preempts:
            total, exact = self._running_offset_in_order(ratio), True
        else:
            total, exact = self._running_offset(ratio)
        charges: list[int] = []
        now_offset = 0
        rem_input = self.max_prefill
        rem_chunk = chunk if chunk is not None else FOREVER
        batch: list[Request] = []
        cut: Request | None = None
        taken = continued = 0
        preempted: list[Request] = []
        before: Request | None = None  # the candidate that was matched last
        takes_in = self.takes_in
        if takes_in:
            self.loaded_tokens = 0

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
                victims = self._victims(r, total, ratio) if self.preempts else NO_REQUESTS
                if not victims:
                    break
                total = self._preempt(victims, total, ratio)
                running = len(self.batch)
                preempted += victims
                before = None  # eviction may have taken what it hit
            outputs = r.out
            length = r.prompt_tokens + outputs
            cap = length - 1
            if 0 <= r.logprob_start < cap:
                cap = r.logprob_start
            # Admitting changes no prefix: the members of a group, which come one after the other, hit the same one.
            if (
                before is None
                or outputs
                or before.out
                or r.content is not before.content
                or r.namespace != before.namespace
                or r.logprob_start != before.logprob_start
            ):
                node, hit = cache.match(
                    cache.root(r.namespace), r.tokens() if outputs else r.content, cap if self.caching else 0
                )
            before = r
            future = r.limit - outputs
            if future > CLIP_MAX_NEW_TOKENS:
                future = CLIP_MAX_NEW_TOKENS
            elif future < 0:
                future = 0
            if takes_in:
                node, hit = take_in(self, r, node, hit, cap, total + future + page)
            cache.pin(node)
            if self.prioritized:
                r.fill, r.prefix = length, hit
            n = length - hit
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
            if preempted:
                self._requeue(preempted)
            return batch
        queue = self.queue
        for _ in range(taken):
            queue.popleft()
        if preempted:
            self._requeue(preempted)
        if cut is not None:
            self.chunked = cut
        self._launch_prefill(batch, t)
        return batch

    # --- priority -----------------------------------------------------------------------------------------------------

    def _victims(self, r: Request, total: float, ratio: float) -> list[Request]:
        """Running requests to send back for candidate `r`: lowest priority first, of equal ones the latest in the
        queue, until their expected tokens cover what `r` lacks. Empty if they do not, or if none is lower enough.

        What `r` lacks is counted with the tokens and the prefix of the last time it was looked at: a request that is
        new has none (SGLang's `preempt_to_schedule` comes before the match). Returned in batch order.
        """
        sign, threshold = self.sign, self.options.priority_scheduling_preemption_threshold
        lacks = r.fill - r.prefix + min(r.limit, CLIP_MAX_NEW_TOKENS) - (self.cache.free + self.cache.evictable - total)
        victims = set()
        for v in sorted(self.batch.values(), key=lambda v: (-sign * v.priority, -v.turn)):  # type: ignore[operator]
            if (r.priority - v.priority) * -sign <= threshold:  # type: ignore[operator]
                break
            victims.add(v)
            lacks -= self._offset(v, ratio)
            if lacks <= 0:
                return [v for v in self.batch.values() if v in victims]
        return NO_REQUESTS

    def _preempt(self, victims: list[Request], total: float, ratio: float) -> float:
        """Send them back as a retraction would; returns the offset `total` without theirs."""
        for v in victims:
            total -= self._offset(v, ratio)
            self._put_back(v, len(self.batch) - 1)
        return total

    def _total_in_order(self, ratio: float, charges: list[int]) -> float:
        acc = self._running_offset_in_order(ratio)
        for c in charges:
            acc += c
        return acc

    def _launch_prefill(self, batch: list[Request], t: float) -> None:
        """Give the batch its slots and note what it computes."""
        page, cache, version = self.page, self.cache, self.version
        padded = self.padded_attention
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
            attention += end * end if padded else n * (prefix + 0.5 * n)
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
