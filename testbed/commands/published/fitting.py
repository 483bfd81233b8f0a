"""Least squares of a table's parameters on its fitted rows, and on no others.

Residuals are log(simulated / published), so that a row of seconds and one of minutes count alike. It refuses to know
how a row is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

from testbed.commands.errors import UserError
from testbed.commands.published.results import compare_table
from testbed.commands.published.tables import Case, Table


@dataclass(frozen=True)
class Fitted:
    """One parameter: its value with a 95 % interval (none where there are as many rows as parameters)."""

    name: str
    value: float
    low: float | None
    high: float | None


Simulate = Callable[[Mapping[str, float]], Mapping[tuple[str, str], float]]
"""Parameters by name -> (variant, quantity) -> value."""


def only_fitted(table: Table) -> Table:
    """The table with its fitted rows alone."""
    rows = tuple(n for n in table.numbers if n.role == "fitted")
    return table.model_copy(update={"numbers": rows, "orders": ()})


def key_of(cases: Sequence[Case], key: str) -> float:
    """The value that a dotted key of the scenario has in the first of these cases that has it."""
    for case in cases:
        at: Any = case.variant.scenario
        for part in key.split("."):
            at = getattr(at, part, None)
        if at is not None:
            return float(at)
    raise UserError(f"no fitted row of the table has a scenario with `{key}`")


def fit(table: Table, start: Mapping[str, float], simulate: Simulate, step: float = 1e-3) -> list[Fitted]:
    """Fit `table.fit` from `start`. `step`: relative difference of the Jacobian (wider where a run has noise).

    Raises `ValueError` for fewer fitted rows than parameters.
    """
    rows = only_fitted(table)
    names = [p.name for p in table.fit]
    if len(rows.numbers) < len(names):
        raise ValueError(f"{table.table}: {len(names)} parameters on {len(rows.numbers)} fitted rows")

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = simulate(dict(zip(names, np.exp(logs), strict=True)))
        return np.array([np.log1p(c.error) for c in compare_table(rows, values).numbers])

    upper = [0.0 if p.share else np.inf for p in table.fit]
    found = least_squares(
        residuals, np.log([start[n] for n in names]), bounds=(-np.inf, upper), diff_step=step, x_scale=1.0
    )
    spare = len(found.fun) - len(names)
    if spare < 1:
        return [Fitted(n, float(np.exp(x)), None, None) for n, x in zip(names, found.x, strict=True)]
    variance = float(found.fun @ found.fun) / spare
    spread = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac) * variance)) * student.ppf(0.975, spare)
    return [
        Fitted(n, float(np.exp(x)), float(np.exp(x - d)), float(np.exp(x + d)))
        for n, x, d in zip(names, found.x, spread, strict=True)
    ]
