"""The scheduler of one SGLang 0.5.23 engine, rule for rule: which requests form which batch, in which order, with what
memory.

It is a deterministic function of the arrivals of each iteration. It refuses to know durations: `form` chooses a batch,
`settle` handles the results that become visible at the end of the iteration, and whoever owns the clock says when that
is.

One iteration of the overlap loop: take in arrivals; publish the last chunk; choose a prefill batch or else one decode
step; launch it; handle the results of the *previous* batch. Without overlap the results handled are the same batch's.
`plain_steps` says how many iterations ahead are nothing but the same decode step, and `run` takes them at once.
"""

from __future__ import annotations

from sim.engine_admission import Admission
from sim.engine_options import DECODE, EXTEND, NOTHING, EngineModelOptions
from sim.engine_request import Request
from sim.engine_state import ENTRY_BITS, NO_REQUESTS

__all__ = ["DECODE", "EXTEND", "NOTHING", "EngineModelOptions", "Request", "Scheduler"]


class Scheduler(Admission):
    """Everything but time."""

    __slots__ = ()

    def form(self, t: float) -> int:
        """Choose and launch the next batch at time `t`; returns its kind. `settle` must follow."""
        r = self.chunked
        if r is not None:
            if r is self.chunk_abort:
                self.chunked = None
                self._release(r, False)
                r.done = True
                self.ended.append(r)
            else:
                if r.end > r.prefix:
                    self._publish(r, r.end)
                r.prefix = r.end
        self.chunk_abort = None
        finishes, steps = self.finishes, self.steps
        ends = self.overlap and finishes and finishes[0] >> ENTRY_BITS <= steps
        self._ending = self._pop_ending(steps) if ends else NO_REQUESTS
        if self.defer and self._defers():
            self.formed = formed = NO_REQUESTS
        else:
            if not self.batch or self.preempts:
                self.full = False
            idle = self.chunked is None and (self.full or not self.queue)
            self.formed = formed = NO_REQUESTS if idle else self._prefill(t)
        kind = NOTHING
        if formed:
            kind = EXTEND
            self.defer = self.options.prefill_decode_interval
        elif self.batch and self._decode():
            kind = DECODE
        if kind:
            self.iterations += 1
            if self.trace is not None:
                self._note(kind)
        return kind

    def settle(self, kind: int, t: float) -> None:
        """Handle the results visible at the end of the iteration, at time `t`; then let a prefill join the batch.

        `kind`: the batch this iteration has launched.
        """
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
        if kind == NOTHING and not (self.queue or self.batch or self.chunked or (self.overlap and self.last)):
            self.ratio.reset()  # idle, and no results were in flight
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

    def put_all_back(self, t: float) -> None:
        """Pause with `retract`: handle the results in flight, then send everything to the tail of the queue."""
        if self.overlap:
            self._ending = self._pop_ending(self.steps)
            self.formed = []
            self.settle(NOTHING, t)
        self.last = NOTHING
        batch = list(self.batch.values())
        chunk = self.chunked
        if chunk is not None:
            self.chunked = None  # if it is to be aborted, it ends with its first result
            batch.append(chunk)
        for i, r in enumerate(batch):
            self._put_back(r, len(batch) - i)
        self._requeue(batch)

    def admits(self) -> bool:
        """Whether a request in the queue would be looked at now (rows free, latch not set; or it may preempt)."""
        running = len(self.batch)
        return self.preempts or (self.rows > 0 and running < self.max_run and not (self.full and running))

    def plain_steps(self) -> int:
        """How many decode steps of the present running batch are ahead in which nothing happens but the steps.

        With overlap the next finish is handled in the iteration after them, else in the last of them. 0: form an
        iteration.
        """
        if not self.batch or self.chunked is not None or (self.queue and self.admits()):
            return 0
        return self.steps_ahead()

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
