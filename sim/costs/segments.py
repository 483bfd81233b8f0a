"""Decode runs in closed form: a step's time is piecewise linear in the context per sequence, for each batch size.

Every source of step times (linear, analytic, measured, calibrated) becomes such a row of segments per batch size, made
once. While a batch runs, the context per sequence grows by exactly one token a step, so k steps are a few arithmetic
series and their inverse is a quadratic equation. It refuses to know where the numbers of a row come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf, sqrt

from sim.costs.base import CostModel


class Row:
    """Segment j covers contexts per sequence [starts[j], starts[j + 1]), with time = values[j] + slopes[j]
    (c - starts[j]) seconds; starts ends with infinity. `low`, `high`: what the source covers."""

    __slots__ = ("high", "low", "slopes", "starts", "values")

    def __init__(
        self, starts: list[float], values: list[float], slopes: list[float], low: float = -inf, high: float = inf
    ) -> None:
        self.starts = starts
        self.values = values
        self.slopes = slopes
        self.low = low
        self.high = high


def row_through(points: Sequence[tuple[float, float]], low: float = -inf, high: float = inf) -> Row:
    """Row of the continuous piecewise linear function through (context per sequence, seconds) points, at least two.

    It goes on with the first and the last slope beyond the ends; the last one not below zero, so that no run becomes
    free.
    """
    starts, values, slopes = [], [], []
    for (x0, y0), (x1, y1) in pairwise(points):
        slope = (y1 - y0) / (x1 - x0)
        starts.append(x0)
        values.append(y0)
        slopes.append(slope)
    x_last, y_last = points[-1]
    starts.append(x_last)
    values.append(y_last)
    slopes.append(max(slopes[-1], 0.0))
    first = starts[0]
    if first > 0:
        at_zero = values[0] - slopes[0] * first
        values[0], starts[0] = max(at_zero, 0.0), 0.0
        slopes[0] = (values[1] - values[0]) / starts[1]
    return Row([*starts, inf], values, slopes, low, high)


class SegmentCosts(CostModel, ABC):
    """The decode side of `CostModel`. Subclasses give `_row(batch)` and `_prefill(...)`."""

    kind: str = ""
    arrival_base_s: float = 0.0
    arrival_per_request_s: float = 0.0
    padded_attention: bool = False

    def __init__(self) -> None:
        self._rows: list[Row | None] = []
        """By batch size."""
        self._found = 0
        """The segment that was found last."""
        self._decode_asked = 0
        self._decode_outside = 0
        self._prefill_asked = 0
        self._prefill_outside = 0

    @abstractmethod
    def _row(self, batch: int) -> Row:
        """Segments of this batch size. All values positive."""

    @abstractmethod
    def _prefill(self, new_tokens: int, attention: float, requests: int) -> tuple[float, bool]:
        """(seconds, whether the question lies outside the source's range)."""

    def _row_of(self, batch: int) -> Row:
        rows = self._rows
        row = rows[batch] if 0 <= batch < len(rows) else None
        return row if row is not None else self._make(batch)

    def _make(self, batch: int) -> Row:
        if batch < 1:
            raise ValueError(f"a decode step needs at least one sequence, not {batch}")
        row, rows = self._row(batch), self._rows
        rows.extend([None] * (batch + 1 - len(rows)))
        rows[batch] = row
        return row

    def _segment(self, starts: list[float], c: float) -> int:
        """The segment of a row that `c` is in: nearly always the last answer, where the search starts."""
        j, last = self._found, len(starts) - 2
        if j > last:
            j = last
        while j > 0 and starts[j] > c:
            j -= 1
        while j < last and starts[j + 1] <= c:
            j += 1
        self._found = j
        return j

    def decode_time(self, batch: int, context: int) -> float:
        row = self._row_of(batch)
        starts = row.starts
        c = context / batch
        j = self._segment(starts, c)
        self._decode_asked += 1
        if c < row.low or c > row.high:
            self._decode_outside += 1
        return row.values[j] + row.slopes[j] * (c - starts[j])

    def run_time(self, batch: int, context: int, steps: int) -> float:
        row = self._row_of(batch)
        starts, values, slopes = row.starts, row.values, row.slopes
        c = context / batch
        self._decode_asked += 1
        if c < row.low or c + steps - 1 > row.high:
            self._decode_outside += 1
        j = self._segment(starts, c)
        total = 0.0
        while True:
            end, slope = starts[j + 1], slopes[j]
            value = values[j] + slope * (c - starts[j])
            if c + steps <= end:
                return total + (steps * value + slope * (steps * (steps - 1) * 0.5))
            m = ceil(end - c)
            if m >= steps:
                return total + (steps * value + slope * (steps * (steps - 1) * 0.5))
            total += m * value + slope * (m * (m - 1) * 0.5)
            steps -= m
            c += m
            j += 1
            while starts[j + 1] <= c:
                j += 1

    def steps_within(self, batch: int, context: int, seconds: float) -> int:
        row = self._row_of(batch)
        starts, values, slopes = row.starts, row.values, row.slopes
        c = context / batch
        j = self._segment(starts, c)
        total = 0.0
        done = 0
        while True:
            end, slope = starts[j + 1], slopes[j]
            value = values[j] + slope * (c - starts[j])
            if end < inf:
                m = ceil(end - c)
                whole = total + (m * value + slope * (m * (m - 1) * 0.5))
                if whole <= seconds:
                    total = whole
                    done += m
                    c += m
                    j += 1
                    while starts[j + 1] <= c:
                        j += 1
                    continue
                most = m - 1
            else:
                most = 1 << 62
            # a k^2 + b k = seconds - total with a = slope / 2; the rounded root is corrected by the very sums of
            # run_time
            b = value - 0.5 * slope
            left = seconds - total
            root = b * b + 2.0 * slope * left
            k = int(2.0 * left / (b + sqrt(root))) if left > 0.0 and root > 0.0 else 0
            if k > most:
                k = most
            while k < most and total + ((k + 1) * value + slope * ((k + 1) * k * 0.5)) <= seconds:
                k += 1
            while k > 0 and total + (k * value + slope * (k * (k - 1) * 0.5)) > seconds:
                k -= 1
            return done + k

    def prefill_time(self, new_tokens: int, attention: float, requests: int) -> float:
        seconds, outside = self._prefill(new_tokens, attention, requests)
        self._prefill_asked += 1
        if outside:
            self._prefill_outside += 1
        return seconds

    def mixed_time(self, new_tokens: int, attention: float, requests: int, batch: int, context: int) -> float:
        """One step that computes prompts (as `prefill_time`) and a token for each of `batch` sequences, whose contexts
        sum to `context`. One product of weights and all tokens, so the weights are read once:

            prefill(new + batch) + decode(batch, context) - decode(batch, batch)

        The difference is what the sequences' KV takes; a decode step of empty contexts is the rest of it, which the
        prompts' step does for all tokens together. Not shorter than either step alone.
        """
        decode = self.decode_time(batch, context)
        kv = max(decode - self.decode_time(batch, batch), 0.0)
        return max(self.prefill_time(new_tokens + batch, attention, requests) + kv, decode)

    @property
    def outside_share(self) -> dict[str, float]:
        return {
            "decode": self._decode_outside / self._decode_asked if self._decode_asked else 0.0,
            "prefill": self._prefill_outside / self._prefill_asked if self._prefill_asked else 0.0,
        }
