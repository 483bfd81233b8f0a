"""The stored coefficients are the least-squares fit of the rows that their file names, and of no others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from sim.coefficients import coefficients, provenance
from sim.quantities import values
from testbed.commands.published.fitting import fit, only_fitted
from testbed.commands.published.results import compare_table, median_error, wrong_orders
from testbed.commands.published.tables import Table, cases, load_tables

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios" / "published"
FITTED = [t for t in load_tables() if any(p.coefficient for p in t.fit)]


def simulated(table: Table, point: Mapping[str, float]) -> dict[tuple[str, str], float]:
    fitted = msgspec.structs.replace(coefficients(), **point)
    return {
        (case.variant.name, q): v
        for case in cases(table, SCENARIOS)
        for q, v in values(case.variant.scenario, case.base_dir, case.quantities, fitted).items()
    }


@pytest.mark.parametrize("table", FITTED, ids=[t.table for t in FITTED])
def test_stored_values_are_the_fit_of_their_rows(table: Table) -> None:
    """Started 30 % off, the fit ends at the stored four digits; residuals of the other rows play no part."""
    rows = only_fitted(table)
    start = {
        p.coefficient: min(1.3 * getattr(coefficients(), p.coefficient), 0.95 if p.share else 1e30) for p in rows.fit
    }
    for found in fit(rows, start, lambda point: simulated(rows, point)):
        entry = provenance()[found.name]
        assert entry.value == pytest.approx(found.value, rel=2e-3), found.name
        assert entry.table == rows.table
        assert set(entry.rows) == {n.name for n in rows.numbers}


def test_every_coefficient_has_a_source() -> None:
    fields = {f.name for f in msgspec.structs.fields(coefficients())}
    assert provenance().keys() == fields
    assert all(entry.rows and entry.table for entry in provenance().values())


@pytest.mark.parametrize(
    ("name", "median", "worst"),
    [("miles_weight_transfer", 0.16, 0.80), ("checkpoint_engine", 0.12, 0.25), ("prime_rl_trainer", 0.06, 0.12)],
)
def test_predicted_rows_of_the_fitted_tables(name: str, median: float, worst: float) -> None:
    """Published values as they stand in the tables; the bounds are what the documentation claims."""
    (table,) = [t for t in FITTED if t.table == name]
    result = compare_table(table, simulated(table, {}))
    middle = median_error([result])
    assert middle is not None and middle <= median
    assert max(abs(c.error) for c in result.numbers if c.number.role == "predicted") <= worst
    assert wrong_orders([result]) == []


def test_flops_per_token_are_megatrons() -> None:
    (table,) = load_tables(only=["megatron_flops"])
    result = compare_table(table, simulated(table, {}))
    assert all(abs(c.error) < 0.004 for c in result.numbers)
