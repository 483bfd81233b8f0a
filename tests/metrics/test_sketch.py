"""The sketch against numpy, within its stated error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.metrics.sketch import EXACT, RELATIVE_ERROR, Sketch

SHARES = (0.0, 0.01, 0.25, 0.5, 0.9, 0.95, 0.99, 1.0)


def exact(values: list[float], share: float) -> float:
    return float(np.quantile(np.asarray(values, dtype=float), share, method="lower"))


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(1).lognormal(8.0, 1.2, 20_000),
        np.random.default_rng(2).exponential(0.003, 20_000),
        np.random.default_rng(3).pareto(1.1, 20_000) * 1e4,
        np.linspace(1e-6, 1e6, 5_000),
    ],
    ids=["lognormal", "exponential", "pareto", "linear"],
)
def test_quantiles_of_real_numbers_are_within_one_percent(values: np.ndarray) -> None:
    sketch = Sketch()
    sketch.extend(values.tolist())
    for share, answer in zip(SHARES, sketch.quantiles(*SHARES), strict=True):
        # rank floor(share (n - 1)), on which numpy and the sketch agree up to rounding of the product
        assert answer == pytest.approx(exact(values.tolist(), share), rel=RELATIVE_ERROR * 1.0001)
    assert sketch.mean == pytest.approx(values.mean(), rel=1e-12)
    assert sketch.max == values.max()
    assert sketch.count == len(values)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60))
def test_whole_numbers(values: list[int]) -> None:
    one, many = Sketch(), Sketch()
    for v in values:
        one.add(v)
    many.extend(values)
    assert one.distribution() == many.distribution()
    for share, answer in zip(SHARES, one.quantiles(*SHARES), strict=True):
        want = sorted(values)[int(share * (len(values) - 1))]
        assert answer == (want if want < EXACT else pytest.approx(want, rel=RELATIVE_ERROR))


def test_small_whole_numbers_keep_their_histogram() -> None:
    sketch = Sketch()
    sketch.add(2, times=3)
    sketch.extend([0, 0, 1, 7])
    d = sketch.distribution()
    assert d.histogram == {0: 2, 1: 1, 2: 3, 7: 1}
    assert (d.count, d.mean, d.max, d.p50) == (7, 2.0, 7.0, 2.0)


def test_durations_have_no_histogram() -> None:
    sketch = Sketch()
    sketch.extend([1.5, 2.5])
    assert sketch.distribution().histogram == {}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0, 1e7), max_size=40),
    st.lists(st.integers(0, 10_000), max_size=40),
)
def test_merging_is_adding(a: list[float], b: list[int]) -> None:
    left, right, whole = Sketch(), Sketch(), Sketch()
    left.extend(a)
    right.extend(b)
    whole.extend(a)
    whole.extend(b)
    left.merge(right)
    assert left.quantiles(*SHARES) == whole.quantiles(*SHARES)
    assert (left.count, left.max) == (whole.count, whole.max)
    assert left.mean == pytest.approx(whole.mean)


def test_memory_is_bounded_over_a_wide_range() -> None:
    sketch = Sketch()
    for v in np.exp(np.random.default_rng(0).uniform(np.log(1e-6), np.log(3e7), 50_000)):
        sketch.add(float(v))
    assert len(sketch._buckets) <= np.log(3e7 / 1e-6) / np.log(1.01 / 0.99) + 1 < 1600


def test_an_empty_sketch_is_all_zeros() -> None:
    d = Sketch().distribution()
    assert (d.count, d.mean, d.p50, d.p99, d.max) == (0, 0, 0, 0, 0)


def test_negative_values_are_refused_and_rounding_is_not() -> None:
    with pytest.raises(ValueError, match="negative"):
        Sketch().add(-1)
    sketch = Sketch()
    sketch.add(-1e-15)
    assert sketch.distribution().histogram == {0: 1}
