"""How numbers are written: the formats of the report's style guide."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import numbers

NB = "\u00a0"


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (247.7, 4.0, f"248{NB}s"),
        (247.7, 0.0, f"248{NB}s"),
        (293.2, 13.0, f"293{NB}s"),
        (9.02, 0.2, f"9.0{NB}s"),
        (12.41, 0.0, f"12.4{NB}s"),
        (0.314, 0.0, f"0.31{NB}s"),
        (0.0, 0.0, f"0{NB}s"),
        (1234.5, 0.0, f"1,234{NB}s"),
    ],
)
def test_seconds_have_the_digits_that_the_spread_allows(value, spread, text):
    assert numbers.seconds(value, spread) == text


@pytest.mark.parametrize(
    ("share", "decimals", "text"),
    [
        (0.24, None, "24"),
        (0.074, None, "7.4"),
        (0.0, None, "0"),
        (0.0, 1, "0.0"),
        (0.5171, 1, "51.7"),
        (0.0999, None, "10"),
    ],
)
def test_percent(share, decimals, text):
    assert numbers.percent(share, decimals) == f"{text}{NB}%"


@pytest.mark.parametrize(
    ("ratio", "text"), [(-0.244, "−24"), (0.57, "+57"), (0.0, "0"), (-0.0001, "0"), (0.0111, "+1.1"), (-0.021, "−2.1")]
)
def test_relative_differences_have_a_sign_and_a_true_minus(ratio, text):
    assert numbers.signed_percent(ratio) == f"{text}{NB}%"


@pytest.mark.parametrize(
    ("difference", "text"), [(0.074, "+7.4"), (-0.088, "−8.8"), (0.0, "0"), (0.00001, "0"), (0.404, "+40.4")]
)
def test_points(difference, text):
    assert numbers.points(difference) == f"{text}{NB}pt"


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (11450.785, 0.0, "$11,450"),
        (11450.785, 180.0, "$11,450"),
        (15144.45, 0.0, "$15,140"),
        (11450.785, 2300.0, "$11,500"),
        (950.4, 0.0, "$950"),
        (3.416, 0.0, "$3.42"),
        (1234567.0, 0.0, "$1,235,000"),
    ],
)
def test_dollars(value, spread, text):
    assert numbers.dollars(value, spread) == text


@pytest.mark.parametrize(("ratio", "text"), [(1.3225, "1.32"), (2.0, "2.00"), (12.34, "12.3"), (0.756, "0.756")])
def test_times(ratio, text):
    assert numbers.times(ratio) == f"{text}{NB}×"


@pytest.mark.parametrize(("spread", "text"), [(6.3, "6"), (13.2, "13"), (0.84, "0.8"), (0.0, "0"), (0.023, "0.02")])
def test_plus_minus(spread, text):
    assert numbers.plus_minus(spread) == f"±{NB}{text}"


def test_lists_and_counts():
    assert numbers.listed(["A"]) == "A"
    assert numbers.listed(["A", "B"]) == "A and B"
    assert numbers.listed(["A", "B", "C"]) == "A, B and C"
    assert numbers.counted(5) == "five"
    assert numbers.counted(13) == "13"


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(0, 1e6))
def test_no_format_breaks_a_line_or_uses_a_hyphen_as_minus(value, spread):
    for text in (
        numbers.seconds(value, spread),
        numbers.percent(value),
        numbers.signed_percent(value),
        numbers.points(value),
        numbers.dollars(value, spread),
        numbers.times(value),
    ):
        assert " " not in text and "-" not in text


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-2, 1e7), st.floats(1e-3, 1e3))
def test_printed_seconds_are_within_half_a_spread_or_half_a_percent(value, spread):
    printed = float(numbers.seconds(value, spread).removesuffix(f"{NB}s").replace(",", ""))
    assert math.isclose(printed, value, rel_tol=0.0051, abs_tol=max(0.51 * spread, 0.0051))
