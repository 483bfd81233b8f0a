"""One vLLM engine (V1 scheduler) in virtual time, for closed loops: what it does otherwise than SGLang's.

A step has a budget of tokens. Running requests come first, one token each (or the rest of their prompts), then waiting
requests in order of arrival get what is left of it, so one step computes prompts and replies. Under asynchronous
scheduling a step is put together when the one before it starts. No prefix is reused. It refuses to know clients and
what they measure; every call carries `now`, and `advance(wake_at)` has news.
"""

from __future__ import annotations

from collections import deque
from math import inf

from msgspec import Struct

from sim.serving.costs import StepCosts


class Prompt(Struct, eq=False):
    """A request: `prompt_tokens` in, `output_tokens` out."""

    rid: int
    prompt_tokens: int
    output_tokens: int
    computed: int = 0
    """Tokens whose KV is there."""
    out: int = 0
    first_t: float = -1.0

    @property
    def left(self) -> int:
        """Tokens to compute before the next one comes out; after a preemption the outputs too."""
        return self.prompt_tokens + self.out - self.computed


class VllmOptions(Struct, frozen=True):
    """vLLM's names. `kv_tokens`: its KV pool."""

    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True


class VllmEngine:
    """Runs of equal decode steps are taken at once."""

    def __init__(self, options: VllmOptions, costs: StepCosts) -> None:
        self.options = options
        self.costs = costs
        self.wake_at = inf
        self._inbox: deque[tuple[float, Prompt]] = deque()
        self._waiting: deque[Prompt] = deque()
        self._prompts: list[Prompt] = []
        """Running, prompt not yet whole."""
        self._decoding: list[Prompt] = []
        self._free = options.kv_tokens
        self._context = 0
        """Tokens of KV of those that decode."""
        self._t = self._before = 0.0
        """Start of the step (or run) in progress, and of the step before it."""
        self._steps = 0
        """Length of the run of decode steps in progress; 0: a step with prompts, or none."""
        self._chunks: list[tuple[Prompt, int]] = []
        """What the step in progress computes of prompts."""

    def submit(self, now: float, r: Prompt) -> None:
        """Raises ValueError if the request can't fit even alone."""
        if r.prompt_tokens + r.output_tokens > self.options.kv_tokens:
            raise ValueError(
                f"request {r.rid}: {r.prompt_tokens} + {r.output_tokens} tokens, a pool of {self.options.kv_tokens}"
            )
        self._inbox.append((now, r))
        if self.wake_at == inf:
            self._t = self.wake_at = now
        elif self._steps and len(self._inbox) == 1 and self._has_row():
            self._cut(now)

    def advance(self, now: float) -> list[Prompt]:
        """The requests that end with the step that ends at `now`, if one does."""
        if self.wake_at > now:
            return []
        ended = self._end_step()
        self._plan()
        return ended

    # --- the next step ------------------------------------------------------------------------------------------------

    def _has_row(self) -> bool:
        return len(self._decoding) + len(self._prompts) < self.options.max_num_seqs

    def _plan(self) -> None:
        """Put the step together that starts at `_t`, or the run of steps, if they are all alike."""
        inbox, waiting = self._inbox, self._waiting
        seen = self._before if self.options.async_scheduling else self._t
        while inbox and (inbox[0][0] <= seen or not (self._decoding or self._prompts or waiting)):
            self._t = max(self._t, inbox[0][0])
            waiting.append(inbox.popleft()[1])
        preempted = self._preempt()
        budget = self.options.max_num_batched_tokens - len(self._decoding)
        for r in self._prompts:
            budget -= self._chunk(r, budget)
        while waiting and budget > 0 and self._has_row() and not preempted:
            if min(budget, waiting[0].left) > self._spare():
                break
            self._prompts.append(waiting.popleft())
            budget -= self._chunk(self._prompts[-1], budget)
        count = len(self._decoding)
        context = self._context + count
        self._steps = 0
        if self._chunks:
            new = sum(n for _, n in self._chunks)
            pairs = sum(n * (r.computed + n / 2) for r, n in self._chunks)
            self.wake_at = self._t + self.costs.step_time(new, pairs, len(self._chunks), count, context)
        elif count:
            ends = min(r.output_tokens - r.out for r in self._decoding)
            self._steps = 1 if preempted else min(ends, self._free // count)
            self.wake_at = self._t + self.costs.run_time(count, context, self._steps)
            if inbox and self._has_row():
                self._cut(inbox[0][0])
        else:
            self.wake_at = inf

    def _spare(self) -> int:
        """Slots that no running request needs in this step."""
        return self._free - len(self._decoding)

    def _chunk(self, r: Prompt, budget: int) -> int:
        n = min(budget, r.left, self._spare())
        if n <= 0:
            return 0
        self._chunks.append((r, n))
        self._free -= n
        return n

    def _preempt(self) -> bool:
        """Send requests back, the last one first, until the step has slots. A preempted request starts again."""
        gone = False
        while self._spare() < (0 if self._decoding else 1) and (self._decoding or self._prompts):
            if self._prompts:
                r = self._prompts.pop()
            else:
                r = self._decoding.pop()
                self._context -= r.computed
            self._free += r.computed
            r.computed = 0
            self._waiting.appendleft(r)
            gone = True
        return gone

    def _cut(self, at: float) -> None:
        """End the run where a request that arrives at `at` can join: after the step in progress, or one later."""
        count = len(self._decoding)
        context = self._context + count
        whole = self.costs.steps_within(count, context, at - self._t) if at > self._t else 0
        inside = self._t + (self.costs.run_time(count, context, whole) if whole else 0.0) < at
        steps = max(whole + inside + self.options.async_scheduling, 1)
        if steps < self._steps:
            self._steps = steps
            self.wake_at = self._t + self.costs.run_time(count, context, steps)

    # --- its end ------------------------------------------------------------------------------------------------------

    def _end_step(self) -> list[Prompt]:
        end, count = self.wake_at, len(self._decoding)
        steps = self._steps or 1
        last = self.costs.decode_time(count, self._context + count * steps) if self._steps else end - self._t
        self._before, self._t = end - last, end
        for r in self._decoding:
            r.out += steps
            r.computed += steps
        self._context += count * steps
        self._free -= count * steps
        for r, n in self._chunks:
            r.computed += n
            if not r.left:
                self._prompts.remove(r)
                self._decoding.append(r)
                self._context += r.computed
                r.out += 1
                if r.first_t < 0:
                    r.first_t = end
        self._chunks = []
        ended = [r for r in self._decoding if r.out >= r.output_tokens]
        if ended:
            self._decoding = [r for r in self._decoding if r.out < r.output_tokens]
            for r in ended:
                self._free += r.computed
                self._context -= r.computed
        return ended
