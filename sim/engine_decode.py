"""Decode steps: one at a time with the memory check and retraction, or many at once in closed form.

Between two changes of the running batch the same step repeats. Steps need a slot (or, at a page's end, a page) per
request; what is free falls linearly, leaves are evicted at the very steps at which single steps would evict them, and
the run ends before the first step that not even eviction makes room for. It refuses to know queues, admission and time.
"""

from __future__ import annotations

from heapq import heappop, heappush

from sim.engine_options import DECODE, EXTEND, RETRACT_DECODE_STEPS
from sim.engine_request import Request
from sim.engine_state import ENTRY_BITS, ENTRY_MASK, NO_REQUESTS, State


class Decoding(State):
    """`_decode` is one step of the rules; `run` takes many plain ones."""

    __slots__ = ()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _fits(self) -> bool:
        """Whether the next step of the running batch has slots, after eviction if need be."""
        page, cache = self.page, self.cache
        need = len(self.batch) if page == 1 else page * self.residues[-self.steps % page]
        if cache.free < need:
            cache.evict(need)
        return cache.free >= need

    def _decode(self) -> bool:
        """One decode step of the running batch.

        False if there is none: nothing is left to run, or it must wait for memory that comes free with this iteration.
        """
        before = len(self.batch)
        ending = 0
        if len(self._ending) == before and not any([r.limit for r in self._ending]):
            return False  # all are prefills alone (`max_new_tokens` 0), which stay until their result is there
        for r in self._ending:
            if r.entry and r.final >= r.limit:  # its last token is in flight: no row for it
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
        if self.options.retraction_policy == "priority":
            sign = self.sign
            keep = sorted(
                self.batch.values(),
                key=lambda r: (-sign * r.priority, self._out(r), -r.prompt_tokens),  # type: ignore[operator]
                reverse=True,
            )
        else:
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
            r.retracted += 1  # SGLang counts it as a retraction too
            self.ended.append(r)
        if keep != list(self.batch.values()):  # the batch stays in the order of the victims' search
            self.batch = {}
            for r in keep:
                self._seq = r.seq = r.entry = self._seq + 1
                self.batch[r.seq] = r
                heappush(self.finishes, r.finish_key << ENTRY_BITS | r.entry)
        self._requeue(gone)
        outputs = sum(self._out(r) for r in keep) + RETRACT_DECODE_STEPS * len(keep)
        self.ratio.set(min(1.0, outputs / (sum(r.limit for r in keep) + 1)))

    # --- many steps ---------------------------------------------------------------------------------------------------

    def steps_ahead(self) -> int:
        """Steps to the next finish or to the first without memory; where something runs and nothing is admitted."""
        heap = self.finishes
        while self._ends(heap[0] & ENTRY_MASK) is None:
            heappop(heap)
        self.finish_key = key = heap[0] >> ENTRY_BITS
        steps = key - self.steps
        cache, page, count = self.cache, self.page, len(self.batch)
        slots = cache.free + cache.evictable
        if page == 1:
            return steps if steps * count <= slots else slots // count
        if (steps + page) * count > slots:
            steps = min(steps, self._steps_on(0, slots // page))
        return steps

    def _pages(self, first: int, steps: int) -> int:
        """Pages that `steps` steps take, from the `first`-th step ahead on. Every cycle of `page` steps takes one a
        request."""
        page, residues = self.page, self.residues
        cycles, part = divmod(steps, page)
        top = -(self.steps + first) % page + 1
        if part <= top:
            rest = sum(residues[top - part : top])
        else:
            rest = sum(residues[:top]) + sum(residues[top - part + page :])
        return cycles * len(self.batch) + rest

    def _steps_on(self, first: int, pages: int) -> int:
        """The most steps that take no more than `pages`, from the `first`-th step ahead on. O(log page) sums."""
        page = self.page
        cycles, left = divmod(pages, len(self.batch))
        low, high = 0, page - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if self._pages(first, middle) <= left:
                low = middle
            else:
                high = middle - 1
        return cycles * page + low

    def run(self, k: int) -> None:
        """Take `k` plain steps. Evictions have the steps and the sizes that they have step by step."""
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
        if self.queue and k > self.defer:  # a pass finds no row
            self.full = True
        if self.defer:
            self.defer = max(self.defer - k, 0) if count >= self.options.prefill_decode_interval_min_bs else 0
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
        """The slots of `k` steps. A step asks for what it needs, then for a page for every request, whoever needs
        one."""
        page, cache, steps = self.page, self.cache, self.steps
        ask = page * len(self.batch)
        i = 0
        while cache.evictable or cache.log is not None:
            if cache.free - 2 * ask >= (k - i) * len(self.batch):
                break
            spare = (cache.free - ask) // page
            ahead = self._steps_on(i, spare) + 1 if spare >= 0 else 0  # steps that need no eviction
            if ahead >= k - i:
                break
            cache.free -= page * self._pages(i, ahead)
            i += ahead
            cache.tag = steps + i
            need = page * self.residues[-(steps + i) % page]
            if cache.free < need:
                cache.evict(need)
            if cache.free < ask:
                cache.evict(ask)
            cache.free -= need
            i += 1
            if i == k:
                return
        cache.free -= page * self._pages(i, k - i)

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
