"""Bins of probability ratios: where they lie, and what can be read back from counts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.metrics.ratios import BINS, FARTHEST, added, bin_of, edges, middle


@pytest.mark.parametrize(
    ("ratio", "index"),
    [
        (1.0, 0),
        (1.00009, 0),
        (1 / 1.00009, 0),
        (1.00011, 1),
        # ln 1.2 = 0.1823 = 1e-4 x 10^3.2608, and eight bins to a factor of ten: 26.09, counted from 1
        (1.2, 27),
        # ln 2 = 0.6931 = 1e-4 x 10^3.8408: 30.73
        (2.0, 31),
        (0.5, -31),
        (1e9, FARTHEST),
        (1e-9, -FARTHEST),
    ],
)
def test_rp_11_a_ratio_is_binned_by_its_logarithm(ratio: float, index: int) -> None:
    assert bin_of(ratio) == index


@given(st.floats(1e-12, 1e12))
def test_every_ratio_lies_between_the_edges_of_its_bin(ratio: float) -> None:
    low, high = edges(bin_of(ratio))
    assert low * (1 - 1e-9) <= ratio <= high * (1 + 1e-9)


def test_bins_meet_and_hold_everything() -> None:
    every = [edges(k) for k in range(-FARTHEST, FARTHEST + 1)]
    assert len(every) == BINS and every[0][0] == 0 and every[-1][1] == math.inf
    for (_, end), (start, _) in pairwise(every):
        assert end == pytest.approx(start, rel=1e-12)


def test_counts_add_up() -> None:
    assert added([{0: 3, 5: 1}, {}, {-2: 2, 0: 1}]) == {-2: 2, 0: 4, 5: 1}
    assert added([]) == {}


def test_the_middle_leaves_no_more_than_half_of_the_rest_on_either_side() -> None:
    counts = {-31: 1, 0: 98, 27: 1}
    assert middle(counts, 0.98) == (edges(0)[0], edges(0)[1])
    assert middle(counts, 0.99) == (edges(-31)[0], edges(27)[1])
    low, high = middle(counts, 1.0)
    assert low < 0.5 < 1.2 < high
    with pytest.raises(ValueError, match="no tokens"):
        middle({}, 0.99)
