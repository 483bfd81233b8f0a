"""A distribution in a stream: count, sum and maximum exactly, small whole numbers exactly, quantiles within 1 %.

Logarithmic buckets as in DDSketch (Masson, Rim, Lee, VLDB 2019): with gamma = (1 + a) / (1 - a), a value x > 0 falls in
bucket ceil(log_gamma x) and is answered as 2 gamma^i / (gamma + 1), at most a x off. Whole numbers (int) from 0 to
`EXACT` - 1 have a bucket of their own and no error. Memory grows with log(max / min): about 1,500 buckets from a
microsecond to a year.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil, log
from typing import Any, Final

from testbed.metrics.summary import Distribution

RELATIVE_ERROR = 0.01
EXACT: Final = 1024
_GAMMA: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA: Final = log(_GAMMA)
_TINY: Final = 1e-9
"""Seconds below this are rounding: 0."""


class Sketch:
    """Values >= 0. `add` takes O(1); ValueError for a negative one."""

    __slots__ = ("_buckets", "_exact", "count", "max", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._exact: Counter[int] = Counter()
        self._buckets: Counter[int] = Counter()

    def add(self, value: Any, times: int = 1) -> None:
        """`value`: an int or a float, which is not the same here."""
        if value < 0:
            if value < -_TINY:
                raise ValueError(f"{value} is negative")
            value = 0
        self.count += times
        self.total += value * times
        if value > self.max:
            self.max = value
        if value < _TINY:
            self._exact[0] += times
        elif type(value) is int and value < EXACT:
            self._exact[value] += times
        else:
            self._buckets[ceil(log(value) / _LOG_GAMMA)] += times

    def extend(self, values: Iterable[Any]) -> None:
        """Add many; equal ones are put together first."""
        buckets = self._buckets
        for value, times in Counter(values).items():
            if value < EXACT:
                self.add(value, times)
                continue
            number: float = value
            self.count += times
            self.total += number * times
            if number > self.max:
                self.max = number
            buckets[ceil(log(number) / _LOG_GAMMA)] += times

    def merge(self, other: Sketch) -> None:
        """Add everything that the other holds."""
        self.count += other.count
        self.total += other.total
        self.max = max(self.max, other.max)
        self._exact.update(other._exact)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantiles(self, *shares: float) -> list[float]:
        """The values of rank floor(share (count - 1)) for each share in [0, 1]; 0 if there are none."""
        cells = sorted(
            [(float(v), n) for v, n in self._exact.items()]
            + [(2 * _GAMMA**i / (_GAMMA + 1), n) for i, n in self._buckets.items()]
        )
        answers = []
        for share in shares:
            rank = int(share * (self.count - 1))
            seen, answer = 0, 0.0
            for value, times in cells:
                answer = value
                seen += times
                if seen > rank:
                    break
            answers.append(min(answer, float(self.max)))
        return answers

    def distribution(self) -> Distribution:
        """As the summary states it. The histogram is given only if every value was a small whole number."""
        p50, p95, p99 = self.quantiles(0.5, 0.95, 0.99)
        whole = {} if self._buckets else dict(sorted(self._exact.items()))
        return Distribution(self.count, self.mean, p50, p95, p99, float(self.max), whole)
