"""Several validations together: which limits are kept everywhere, and turns of all of them counted in one.

It refuses to compute errors of one scenario: they come with its result.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec import Struct, field

from testbed.validation.result import CACHED_LIMIT, Validation, causes, figures_of, judged


class Suite(Struct, kw_only=True):
    """Validations in the order in which they were asked for, and what came to nothing."""

    validations: list[Validation]
    failed: dict[str, str] = field(default_factory=dict)
    """Name -> why its real runs did not come to their end."""
    pooled: dict[int, dict[str, float]] = field(default_factory=dict)
    """Engines -> quantity -> standard deviation / mean of repeated real runs."""
    repeats: int
    seconds: float
    """Wall time of everything."""
    command: str = ""
    remarks: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """Matched, over all."""
        return sum(v.turns.pairs for v in self.validations)

    @property
    def same_cached(self) -> float:
        """Share of all matched turns whose cached tokens are equal."""
        return sum(v.turns.same_cached * v.turns.pairs for v in self.validations) / max(self.turns, 1)

    @property
    def decided_alike(self) -> bool:
        return all(v.decided_alike for v in self.validations)


def misses(s: Suite) -> list[tuple[Validation, str]]:
    """(scenario's result, what)."""
    return [(v, what) for v in s.validations for what, verdict in judged(v) if verdict == "missed"]


def kept(s: Suite) -> Counter[str]:
    """How often each verdict was given."""
    return Counter(verdict for v in s.validations for _, verdict in judged(v))


def why(v: Validation, what: str) -> str:
    """Where a missed limit's error comes from, as far as the figures say: the cause that adds most to a step, or the
    part that adds most to a turn."""
    if what in ("latency_p50", "latency_p95"):
        parts = {"on the way and queued": v.turns.queue_s, "prefill": v.turns.prefill_s, "decode": v.turns.decode_s}
        part = max(parts, key=lambda p: abs(parts[p]))
        return f"{part}: {1000 * parts[part]:+.0f} ms a turn"
    if what == "cached_tokens_equal":
        if v.repeated is None:
            return "arrival in another iteration than the real run's"
        between = 100 * v.repeated.same_cached
        return f"arrival in another iteration than the real run's; two real runs agree in {between:.1f} %"
    if what == "decisions":
        return "see its page"
    found = causes(v)
    return f"{found[0][0]}: {100 * found[0][1]:+.1f} % of a step" if found else ""


def figures(s: Suite) -> dict[str, Any]:
    """As plain data, for `--json`."""
    return {
        "scenarios": {v.name: figures_of(v) for v in s.validations},
        "failed": s.failed,
        "repeats": s.repeats,
        "pooled_spread": {str(engines): spreads for engines, spreads in s.pooled.items()},
        "turns": s.turns,
        "cached_tokens_equal": s.same_cached,
        "cached_tokens_limit": CACHED_LIMIT,
        "verdicts": dict(kept(s)),
        "missed": [{"scenario": v.name, "limit": what, "cause": why(v, what)} for v, what in misses(s)],
        "seconds": s.seconds,
        "remarks": s.remarks,
    }
