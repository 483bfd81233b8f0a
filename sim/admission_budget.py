"""What the running batch is expected to still ask for: the two estimates behind SGLang's admission test.

Both are running sums with closed forms in the count of decode steps, so that a pass costs O(1), not O(batch).
They refuse to know queues, trees and time.
"""

from __future__ import annotations

from bisect import insort
from functools import lru_cache
from typing import Final

from sim.engine_request import Request

CLIP_MAX_NEW_TOKENS: Final = 4096
"""SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION: no request is charged for more future tokens than this."""


@lru_cache(maxsize=64)
def falling_ratios(init: float, minimum: float, step: float) -> list[float]:
    """`init` and what repeated subtraction of `step` makes of it, down to `minimum`; shared, never changed."""
    ratios = [init]
    while ratios[-1] != minimum:
        ratios.append(max(ratios[-1] - step, minimum))
    return ratios


class NewTokenRatio:
    """Share of `max_new_tokens` that running requests are expected to use.

    It starts at `min(0.7 x schedule_conservativeness, 1)`, falls linearly to 0.14 of that over `decay_steps` decode
    steps, and is set anew by a retraction. Values are tabulated by repeated subtraction, as the engine computes them,
    so they are equal to the last bit whether steps are taken one by one or many at once.
    """

    __slots__ = ("_fresh", "_table", "init", "minimum", "step", "taken")

    def __init__(self, conservativeness: float, decay_steps: int) -> None:
        self.init = min(0.7 * conservativeness, 1.0)
        self.minimum = self.init * 0.14
        self.step = (self.init - self.minimum) / decay_steps
        self._fresh = falling_ratios(self.init, self.minimum, self.step)
        self._table = self._fresh
        self.taken = 0
        """Decode steps since the anchor (start, reset or retraction)."""

    def value(self) -> float:
        table, taken = self._table, self.taken
        if taken < len(table):
            return table[taken]
        while len(table) <= taken and table[-1] != self.minimum:
            table.append(max(table[-1] - self.step, self.minimum))
        return table[min(taken, len(table) - 1)]

    def reset(self) -> None:
        self._table, self.taken = self._fresh, 0

    def set(self, ratio: float) -> None:
        self._table, self.taken = [ratio], 0


class FutureTokens:
    """Sum over the running batch of min(max_new_tokens - generated, 4096), in O(1) and amortised O(log n).

    A request enters with its `quota`: its remaining tokens plus the count of decode steps launched so far (`steps`),
    a constant while it runs. Below the clip (`r.linear`) it falls with `steps`; above it counts 4096 until it crosses.
    """

    __slots__ = ("_crossings", "_sum", "clipped", "linear")

    def __init__(self) -> None:
        self.linear = 0
        self.clipped = 0
        self._sum = 0
        self._crossings: list[tuple[int, int, Request]] = []
        """(quota, place in the batch, request) by quota, smallest first; nearly all come in that order. About as long
        as the batch, so that taking the first from a list costs no more than from a deque."""

    def add(self, r: Request, quota: int, steps: int) -> None:
        r.quota = quota
        if quota - steps < CLIP_MAX_NEW_TOKENS:
            r.linear = True
            self.linear += 1
            self._sum += quota
        else:
            r.linear = False
            self.clipped += 1
            crossings = self._crossings
            if not crossings or crossings[-1][0] <= quota:
                crossings.append((quota, r.seq, r))
            else:
                insort(crossings, (quota, r.seq, r))

    def remove(self, r: Request) -> None:
        """A request leaves; its mark, if any, is void from then on (and goes once it is the first)."""
        if r.linear:
            self.linear -= 1
            self._sum -= r.quota
        else:
            self.clipped -= 1
            r.linear = True
            crossings = self._crossings
            while crossings and crossings[0][2].linear:
                crossings.pop(0)

    def _cross(self, steps: int) -> None:
        """Requests that fell below the clip become linear; marks of requests that left are dropped."""
        crossings = self._crossings
        while crossings and crossings[0][0] - steps < CLIP_MAX_NEW_TOKENS:
            quota, _, r = crossings.pop(0)
            if not r.linear and r.quota == quota:
                r.linear = True
                self.clipped -= 1
                self.linear += 1
                self._sum += quota

    def total(self, steps: int) -> int:
        """Remaining tokens counted from what is generated, results in flight included."""
        if self._crossings:
            self._cross(steps)
        return self._sum - self.linear * steps + self.clipped * CLIP_MAX_NEW_TOKENS
