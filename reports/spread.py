"""One figure over the seeds of a variant, and the rule that says when two of them differ.

Two variants differ when their intervals of ± one standard deviation do not overlap. With one seed there is no spread:
then only a difference above 5 % counts. Differences below 0.5 % are never claimed. It refuses to know what the figure
is.
"""

from __future__ import annotations

import math

from msgspec import Struct

ONE_SEED_SHARE = 0.05
SMALLEST_SHARE = 0.005


class Stat(Struct, frozen=True):
    """`values`: one per seed, in the order of the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def sd(self) -> float:
        """Sample standard deviation over seeds (n − 1); 0 with one seed."""
        n = len(self.values)
        if n < 2:
            return 0.0
        m = self.mean
        return math.sqrt(math.fsum((v - m) ** 2 for v in self.values) / (n - 1))


def separated(a: Stat, b: Stat) -> bool:
    """Whether a difference between the two may be claimed."""
    gap = abs(a.mean - b.mean)
    scale = max(abs(a.mean), abs(b.mean))
    if min(len(a.values), len(b.values)) < 2:
        return gap > ONE_SEED_SHARE * scale
    return gap > a.sd + b.sd and gap > SMALLEST_SHARE * scale


def best_of(stats: list[Stat], better: int) -> list[int]:
    """Indices of the best (`better` = −1: the smallest) and of everything that is not separated from it."""
    top = min(range(len(stats)), key=lambda i: -better * stats[i].mean)
    return [i for i, s in enumerate(stats) if i == top or not separated(s, stats[top])]
