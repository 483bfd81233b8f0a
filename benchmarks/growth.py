"""How CPU time and memory grow with GPUs, rollouts, tokens and turns: the points, and the exponents fitted to them.

It refuses to know how a point is measured and drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Series(NamedTuple):
    """`points`: (x, arguments of `benchmarks.cases`). `per`: what the time is divided by. `target`: of the exponent."""

    name: str
    x: str
    per: str
    target: float | None
    points: list[tuple[int, list[str]]]


def _case(case: str, rollouts: int, **options: int) -> list[str]:
    return [case, str(rollouts), *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def series(long: bool) -> list[Series]:
    """`long`: up to 10^7 rollouts, else up to 10^5."""
    most = 7 if long else 5
    return [
        Series("rollouts", "rollouts", "run", 1.05, [(10**k, _case("single_turn", 10**k)) for k in range(3, most + 1)]),
        Series(
            "tokens",
            "mean tokens per rollout",
            "rollout",
            0.1,
            [(n, _case("single_turn", 20_000, tokens=n)) for n in (100, 1_000, 4_000, 10_000, 100_000)],
        ),
        Series(
            "gpus",
            "GPUs (4 an engine, as many for the trainer), the same rollouts",
            "rollout",
            0.2,
            [(8 * n, _case("single_turn", 20_000, engines=n)) for n in (1, 4, 16, 64, 128)],
        ),
        Series(
            "turns",
            "turns per rollout (500 tokens each)",
            "turn",
            None,
            [(n, _case("multi_turn", max(32_000 // n, 1024), turns=n, tokens=500 * n)) for n in (1, 4, 16, 64)],
        ),
    ]


def y_of(per: str, result: dict[str, Any]) -> float:
    """CPU seconds of the run, or a rollout, or a turn."""
    by: dict[str, int] = {"run": 1, "rollout": result["rollouts"], "turn": result["turns"]}
    return float(result["cpu_s"]) / by[per]


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """b of the least-squares fit ln y = a + b ln x. Raises ValueError if all x are equal."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x = math.fsum(x for x, _ in logs) / len(logs)
    mean_y = math.fsum(y for _, y in logs) / len(logs)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in logs)
    if not spread:
        raise ValueError("an exponent needs two different x")
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
