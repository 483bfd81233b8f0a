"""How much real runs of one machine differ from repeat to repeat, over all scenarios of a suite.

Two repeats of one scenario say little of it: their standard deviation has one degree of freedom, and is small by chance
as often as it is large. The scenarios of a suite run on one machine and are repeated in turn, so their relative
deviations are pooled, by number of engines. It refuses to know what is done with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, variance

from testbed.validation.result import Row, Validation

FEWEST = 4
"""Scenarios with repeats, for a pooled spread to be one."""


def pool_spread(validations: Sequence[Validation]) -> dict[int, dict[str, float]]:
    """Sets `Row.pooled` of all rows that have enough like them; engines -> quantity -> standard deviation / mean:
    sqrt(sum of (n - 1) s^2 / sum of (n - 1)), s relative to its scenario's mean."""
    alike: dict[tuple[int, str], list[Row]] = {}
    for v in validations:
        for row in v.rows:
            if len(row.real) > 1 and fmean(row.real):
                alike.setdefault((v.engines, row.quantity.name), []).append(row)
    found: dict[int, dict[str, float]] = {}
    for (engines, name), rows in alike.items():
        if len(rows) < FEWEST:
            continue
        squares = sum((len(r.real) - 1) * variance(r.real) / fmean(r.real) ** 2 for r in rows)
        pooled = sqrt(squares / sum(len(r.real) - 1 for r in rows))
        found.setdefault(engines, {})[name] = pooled
        for row in rows:
            row.pooled = pooled
    return found
