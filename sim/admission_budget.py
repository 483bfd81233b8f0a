"""What the running batch is expected to still ask for: the two estimates behind SGLang's admission test.

Both are running sums with closed forms in the count of decode steps, so that a pass costs O(1), not O(batch).
They refuse to know queues, trees and time.
"""

from __future__ import annotations

from heapq import heappop, heappush

CLIP_MAX_NEW_TOKENS = 4096
"""SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION: no request is charged for more future tokens than this."""


class NewTokenRatio:
    """Share of `max_new_tokens` that running requests are expected to use.

    It starts at `min(0.7 x schedule_conservativeness, 1)`, falls linearly to 0.14 of that over `decay_steps` decode steps, and is
    set anew by a retraction. Values are tabulated by repeated subtraction, as the engine computes them, so they are equal to
    the last bit whether steps are taken one by one or many at once.
    """

    __slots__ = ("_fresh", "_table", "init", "minimum", "step", "taken")

    def __init__(self, conservativeness: float, decay_steps: int) -> None:
        self.init = min(0.7 * conservativeness, 1.0)
        self.minimum = self.init * 0.14
        self.step = (self.init - self.minimum) / decay_steps
        self._fresh = [self.init]
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

    A request enters with its `quota`: its remaining tokens plus the count of decode steps launched so far (`steps`), a constant
    while it runs. Below the clip it is linear in `steps`; above it is a constant, until it crosses.
    """

    __slots__ = ("_crossings", "_sum", "clipped", "linear")

    def __init__(self) -> None:
        self.linear = 0
        self.clipped = 0
        self._sum = 0
        self._crossings: list[tuple[int, int]] = []

    def add(self, quota: int, steps: int) -> None:
        if quota - steps < CLIP_MAX_NEW_TOKENS:
            self.linear += 1
            self._sum += quota
        else:
            self.clipped += 1
            heappush(self._crossings, (quota, 1))

    def remove(self, quota: int, steps: int) -> None:
        self._cross(steps)
        if quota - steps < CLIP_MAX_NEW_TOKENS:
            self.linear -= 1
            self._sum -= quota
        else:
            self.clipped -= 1
            heappush(self._crossings, (quota, -1))

    def _cross(self, steps: int) -> None:
        """Requests that fell below the clip become linear. Both marks of a request that left while clipped cancel."""
        heap = self._crossings
        while heap and heap[0][0] - steps < CLIP_MAX_NEW_TOKENS:
            quota, sign = heappop(heap)
            self.linear += sign
            self.clipped -= sign
            self._sum += sign * quota

    def total(self, steps: int) -> int:
        """Remaining tokens counted from what is generated, results in flight included."""
        if self._crossings:
            self._cross(steps)
        return self._sum - self.linear * steps + self.clipped * CLIP_MAX_NEW_TOKENS
