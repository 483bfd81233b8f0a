"""Simulated against published: the error of every number, every sign and ranking, and the headline.

It refuses to know where the simulated values come from and how the result is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from testbed.commands.published.tables import Number, Order, Table

Values = Mapping[tuple[str, str], float]
"""(variant, quantity) -> value."""


@dataclass(frozen=True)
class Compared:
    """One number."""

    number: Number
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over published, less 1."""
        return self.simulated / self.number.published - 1.0


@dataclass(frozen=True)
class Checked:
    """One sign or ranking."""

    order: Order
    holds: bool


@dataclass(frozen=True)
class Result:
    """One table; without numbers where it is pending."""

    table: Table
    numbers: tuple[Compared, ...]
    orders: tuple[Checked, ...]


def compare_table(table: Table, values: Values) -> Result:
    numbers = tuple(Compared(n, _simulated(n, values)) for n in table.numbers)
    by_name = {c.number.name: c.simulated for c in numbers}
    orders = tuple(Checked(o, all(by_name[a] < by_name[b] for a, b in pairwise(o.rising))) for o in table.orders)
    return Result(table, numbers, orders)


def _simulated(n: Number, values: Values) -> float:
    value = values[n.variant, n.quantity]
    return n.scale * (value / values[n.over, n.quantity] if n.over else value)


def predicted_errors(results: Sequence[Result], *, exact: bool = True) -> list[float]:
    """Absolute relative errors of all predicted numbers; without `exact`, those of formulas and rules that hold exactly
    (kind `analytic`) are left out, for they flatter a median."""
    return [
        abs(c.error)
        for r in results
        for c in r.numbers
        if c.number.role == "predicted" and (exact or r.table.kind != "analytic")
    ]


def wrong_orders(results: Sequence[Result]) -> list[tuple[str, str]]:
    """(table, what it says) of signs and rankings that do not hold."""
    return [(r.table.table, o.order.says) for r in results for o in r.orders if not o.holds]


def median_error(results: Sequence[Result], *, exact: bool = True) -> float | None:
    """Of `predicted_errors`; None if there are none."""
    errors = predicted_errors(results, exact=exact)
    return median(errors) if errors else None


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Everything as plain data, for `--json`."""
    errors = predicted_errors(results)
    return {
        "predicted": len(errors),
        "median_error": median_error(results),
        "measured": len(predicted_errors(results, exact=False)),
        "median_error_of_measured": median_error(results, exact=False),
        "worst_error": max(errors, default=None),
        "orders": sum(len(r.orders) for r in results),
        "wrong_orders": [{"table": table, "says": says} for table, says in wrong_orders(results)],
        "tables": [
            {
                "table": r.table.table,
                "title": r.table.title,
                "source": r.table.source,
                "conditions": r.table.conditions,
                "kind": r.table.kind,
                "pending": r.table.pending,
                "misses": list(r.table.misses),
                "median_error": median_error([r]),
                "numbers": [
                    {
                        "name": c.number.name,
                        "unit": c.number.unit,
                        "published": c.number.published,
                        "simulated": c.simulated,
                        "error": c.error,
                        "role": c.number.role,
                    }
                    for c in r.numbers
                ],
                "orders": [{"says": o.order.says, "holds": o.holds} for o in r.orders],
            }
            for r in results
        ],
    }
