"""Means with their intervals, of held-out tasks and of the ends of a series. Refuses to know how tasks are answered."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct


def fifth(n: int) -> int:
    """How many of `n` batches are a fifth; one at least."""
    return max(n // 5, 1)


class Mean(Struct, frozen=True):
    """A mean of `n` values and its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int


class Score(Struct, frozen=True):
    """What a model gets on held-out tasks of one kind (empty: of all kinds)."""

    kind: str
    reward: Mean
    kl: float | None = None
    """Mean over its sampled tokens of log p(model) - log p(teacher), nats; None: no teacher was read."""


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and 95 % interval: Wilson's where all values are 0 or 1, else Student's t (as wide as a single value: none
    is known, so the interval is the value).

    E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209. Raises ValueError without values."""
    from scipy import stats  # slow to import, and most of what reads scores makes none

    n = len(values)
    if n == 0:
        raise ValueError("no values")
    mean = math.fsum(values) / n
    if all(v in (0.0, 1.0) for v in values):
        z = float(stats.norm.ppf(0.975))
        centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        return Mean(mean, max(centre - half, 0.0), min(centre + half, 1.0), n)
    if n == 1:
        return Mean(mean, mean, mean, n)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)
    return Mean(mean, mean - half, mean + half, n)
