"""Histograms of probability ratios in fixed bins: what is counted, and what can be read from the counts.

A ratio r is binned by |ln r|, eight bins to a factor of ten, from 1e-4 on, below 1 and above it alike; so 0.01 % and a
factor of ten are both resolved. Bin 0 holds what is 1 to within 1e-4, the outermost all that lies beyond. Counts of
updates, batches and seeds add up. It refuses to know whose probabilities they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

LEAST = 1e-4
"""|ln r| below it is in bin 0."""
PER_DECADE = 8
FARTHEST = 40
"""Bins run from -FARTHEST (r below exp(-7.5)) to FARTHEST."""
BINS = 2 * FARTHEST + 1

Counts = Mapping[int, int]
"""Bin -> tokens; bins without tokens are left out."""


def bin_of(ratio: float) -> int:
    """The bin of one ratio above 0."""
    distance = math.log(ratio)
    if abs(distance) < LEAST:
        return 0
    n = min(math.floor(PER_DECADE * math.log10(abs(distance) / LEAST)) + 1, FARTHEST)
    return n if distance > 0 else -n


def edges(index: int) -> tuple[float, float]:
    """Lowest and highest ratio of a bin; 0 and infinity are the ends of the outermost."""
    if index < 0:
        low, high = edges(-index)
        return 1 / high, 1 / low
    if index == 0:
        return math.exp(-LEAST), math.exp(LEAST)
    first = math.exp(LEAST * 10 ** ((index - 1) / PER_DECADE))
    return first, math.inf if index == FARTHEST else math.exp(LEAST * 10 ** (index / PER_DECADE))


def added(several: Iterable[Counts]) -> dict[int, int]:
    """The sum, in the order of the bins."""
    found: dict[int, int] = {}
    for counts in several:
        for index, n in counts.items():
            if n:
                found[index] = found.get(index, 0) + n
    return dict(sorted(found.items()))


def middle(counts: Counts, share: float) -> tuple[float, float]:
    """Edges of bins between which at least this share of the tokens lies, no more than half of the rest on either
    side. Raises ValueError without tokens."""
    order, total = sorted(counts), sum(counts.values())
    if not total:
        raise ValueError("no tokens")
    spare = (1 - share) / 2 * total
    return edges(_reached(counts, order, spare))[0], edges(_reached(counts, order[::-1], spare))[1]


def _reached(counts: Counts, order: Iterable[int], spare: float) -> int:
    """The first bin with which more than `spare` tokens have been passed."""
    passed = 0
    for index in order:
        passed += counts[index]
        if passed > spare:
            return index
    raise ValueError("no tokens")
