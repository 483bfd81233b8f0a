"""Which turn of a simulation is which turn of the real run, and how far apart they are.

A turn is the same if it is the same turn of the same member of the same task, the tasks counted in their order of
arrival (a replayed workload hands them out in that order). It refuses to know why they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from testbed.metrics.turns import Turn
from testbed.validation.observed import Observed
from testbed.validation.quantities import quantile

Pair = tuple[Turn, Turn]
"""(real, simulated)."""


class Matched(Struct):
    """Turns of the real run's measured steps against the same turns of a simulation."""

    turns: int
    """Of the real run, in its measured steps."""
    pairs: int
    same_engine: float
    """Share of pairs that went to the same engine."""
    same_cached: float
    """Share of pairs whose number of cached prompt tokens is equal."""
    same_output: float
    """Share of pairs with equally many output tokens."""
    latency_error_median: float
    """Median over pairs of (simulated - real) / real latency."""
    latency_error_p50: float
    """Quantiles over pairs of the same without its sign."""
    latency_error_p95: float
    queue_s: float = 0.0
    """Mean over pairs of simulated - real: seconds on the way and queued, then in prefill, then in decode. Their sum is
    the mean difference of latencies."""
    prefill_s: float = 0.0
    decode_s: float = 0.0


def pairs(real: Observed, simulated: Observed) -> list[Pair]:
    """In the order of the real turns' ends, measured steps only."""
    return _pairs(real, _with_turns(real), simulated)


def repeated(one: Observed, other: Observed) -> list[Pair]:
    """The same of two real runs of one scenario: (one's turn, the other's)."""
    return _pairs(one, one.tasks, other)


def _pairs(one: Observed, tasks: Sequence[int], other: Observed) -> list[Pair]:
    """`tasks`: those of `one` that the other has, in its order."""
    known = dict(_keyed(other, other.tasks))
    start, end = one.window
    return [(t, known[key]) for key, t in _keyed(one, tasks) if key in known and start < t.finished_t <= end]


def _with_turns(run: Observed) -> list[int]:
    """Tasks that a replayed workload has: those with a first turn that was finished."""
    finished = {t.task for t in run.turns if t.turn == 0}
    return [task for task in run.tasks if task in finished]


def _keyed(run: Observed, tasks: Sequence[int]) -> list[tuple[tuple[int, int, int, int], Turn]]:
    """Key of each turn of these tasks: place of its task among them, member, turn, and the how-manieth time (a task may
    be tried again)."""
    place = {task: i for i, task in enumerate(tasks)}
    seen: Counter[tuple[int, int, int]] = Counter()
    keyed = []
    for turn in run.turns:
        if turn.task not in place:
            continue
        what = (place[turn.task], turn.member, turn.turn)
        keyed.append(((*what, seen[what]), turn))
        seen[what] += 1
    return keyed


def matched(turns: int, found: list[Pair]) -> Matched:
    """Of the pairs of one run, or of several put together, whose measured steps have so many `turns`."""
    n = max(len(found), 1)
    errors = [(s.latency_s - r.latency_s) / r.latency_s for r, s in found if r.latency_s > 0] or [0.0]
    sizes = sorted(map(abs, errors))
    return Matched(
        turns=turns,
        pairs=len(found),
        same_engine=sum(r.engine == s.engine for r, s in found) / n,
        same_cached=sum(r.cached_tokens == s.cached_tokens for r, s in found) / n,
        same_output=sum(r.output_tokens == s.output_tokens for r, s in found) / n,
        latency_error_median=median(errors),
        latency_error_p50=quantile(sizes, 0.5),
        latency_error_p95=quantile(sizes, 0.95),
        queue_s=sum(s.queue_s - r.queue_s for r, s in found) / n,
        prefill_s=sum(s.prefill_s - r.prefill_s for r, s in found) / n,
        decode_s=sum(s.decode_s - r.decode_s for r, s in found) / n,
    )


def worst(found: list[Pair], n: int) -> list[Pair]:
    """The pairs whose latencies are furthest apart, in seconds."""
    return sorted(found, key=lambda p: -abs(p[1].latency_s - p[0].latency_s))[:n]
