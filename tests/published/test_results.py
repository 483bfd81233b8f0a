"""Errors, orders and the headline, on numbers worked out by hand; fits that must find what made the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from reports.published import headline, line_of, markdown, render
from testbed.commands.published.fitting import fit
from testbed.commands.published.results import compare_table, figures, median_error, wrong_orders
from testbed.commands.published.tables import Table


def number(name: str, published: float, role: str = "predicted", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "variant": name,
        "quantity": "step_time_s",
        "published": published,
        "unit": "s",
        "role": role,
        **more,
    }


def table(*numbers: dict[str, Any], **more: Any) -> Table:
    about = {"table": "t", "title": "T", "source": "s", "conditions": "c", "scenario": "s.yaml"}
    return Table.model_validate({**about, "numbers": numbers, **more})


def by_name(**values: float) -> dict[tuple[str, str], float]:
    return {(name, "step_time_s"): value for name, value in values.items()}


def test_errors_ratios_and_scales() -> None:
    t = table(number("a", 10.0), number("b", 4.0, scale=0.5), number("c", 2.0, variant="a", over="b"))
    result = compare_table(t, by_name(a=12.0, b=6.0))
    assert [c.simulated for c in result.numbers] == [12.0, 3.0, 2.0]
    assert [c.error for c in result.numbers] == pytest.approx([0.2, -0.25, 0.0])


def test_only_predicted_numbers_count_and_exact_rules_can_be_left_out() -> None:
    counted = table(number("a", 10.0), number("b", 10.0, role="given"), number("c", 10.0))
    exact = table(number("d", 10.0), kind="analytic")
    values = by_name(a=11.0, b=20.0, c=7.0, d=10.0)
    results = [compare_table(counted, values), compare_table(exact, values)]
    assert median_error(results, exact=False) == pytest.approx(0.2)  # of 10 % and 30 %
    assert median_error(results) == pytest.approx(0.1)  # of 0, 10 % and 30 %
    said = figures(results)
    assert (said["predicted"], said["measured"]) == (3, 2)
    assert median_error(results[1:], exact=False) is None
    assert "Median error 10.0\u00a0% over 3 predicted numbers (20.0\u00a0% over the 2 that" in headline(results)


def test_an_order_holds_or_is_named() -> None:
    orders = [{"says": "b after a", "rising": ["a", "b"]}]
    t = table(number("a", 1.0), number("b", 2.0), orders=orders)
    assert wrong_orders([compare_table(t, by_name(a=1.0, b=1.5))]) == []
    assert wrong_orders([compare_table(t, by_name(a=1.0, b=1.0))]) == [("t", "b after a")]


def test_report_says_what_is_wrong_and_what_is_pending() -> None:
    orders = [{"says": "b after a", "rising": ["a", "b"]}]
    t = table(number("a", 1.0), number("b", 2.0), orders=orders, misses=["because"])
    about = {"table": "p", "title": "Later", "source": "s", "conditions": "c"}
    later = Table.model_validate({**about, "pending": "no policy yet"})
    results = [compare_table(t, by_name(a=2.0, b=1.0)), compare_table(later, {})]
    assert headline(results) == "Median error 75.0\u00a0% over 2 predicted numbers; 0 of 1 signs and rankings are right"
    assert line_of(results[1]) == "p: pending: no policy yet"
    text, page = markdown(results, {}, "testbed published"), render(results, {}, "testbed published")
    for needle in ("b after a", "because", "Later", "no policy yet"):
        assert needle in text and needle in page
    assert "**WRONG**: b after a" in text and "WRONG: b after a" in page


def test_a_fit_finds_the_line_that_made_its_rows_and_looks_at_no_other() -> None:
    """step = fixed + x / rate for x = 1, 2, 4 with fixed 3 and rate 0.5; the predicted row is nonsense on purpose."""
    rows = [number(str(x), 3.0 + x / 0.5, role="fitted") for x in (1, 2, 4)]
    t = table(*rows, number("8", 1e6), fit=[{"key": "fixed.s"}, {"key": "rate.s"}])

    def simulate(point: Mapping[str, float]) -> dict[tuple[str, str], float]:
        return {(str(x), "step_time_s"): point["fixed.s"] + x / point["rate.s"] for x in (1, 2, 4)}

    fixed, rate = fit(t, {"fixed.s": 1.0, "rate.s": 1.0}, simulate)
    assert fixed.value == pytest.approx(3.0, rel=1e-4) and rate.value == pytest.approx(0.5, rel=1e-4)
    assert fixed.low is not None and fixed.high is not None and fixed.low <= 3.0 <= fixed.high * (1 + 1e-6)


def test_a_fit_with_as_many_rows_as_parameters_has_no_interval() -> None:
    t = table(number("1", 4.0, role="fitted"), fit=[{"key": "a.b"}])
    (only,) = fit(t, {"a.b": 1.0}, lambda point: {("1", "step_time_s"): 2 * point["a.b"]})
    assert only.value == pytest.approx(2.0, rel=1e-6) and only.low is None


def test_a_fit_on_too_few_rows_is_refused() -> None:
    t = table(number("1", 4.0, role="fitted"), fit=[{"key": "a.b"}, {"key": "c.d"}])
    with pytest.raises(ValueError, match="2 parameters on 1 fitted rows"):
        fit(t, {"a.b": 1.0, "c.d": 1.0}, lambda point: {})
