from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.policies.sources import plan_sources, spread_pieces


@pytest.mark.backend("CORE")
def test_ws_13_six_targets_on_four_sources() -> None:
    assert plan_sources(4, [1] * 6) == (0, 1, 2, 3, 0, 1)


@pytest.mark.backend("CORE")
def test_ws_13_after_the_first_round_the_least_loaded_serves() -> None:
    # Source 0 has 100 to serve, source 1 has 10: targets 2 and 3 go to 1 (10 -> 40 -> 70), target 4 too, then 0.
    assert plan_sources(2, [100, 10, 30, 30, 40, 5]) == (0, 1, 1, 1, 1, 0)


@pytest.mark.backend("CORE")
def test_ws_13_more_sources_than_targets_leaves_some_idle() -> None:
    assert plan_sources(4, [7, 7]) == (0, 1)


def test_a_plan_needs_a_source() -> None:
    with pytest.raises(ValueError, match="at least one source"):
        plan_sources(0, [1])


@given(st.integers(1, 6), st.lists(st.integers(1, 100), max_size=30))
def test_no_source_serves_more_than_the_fewest_and_one_target(sources: int, sizes: list[int]) -> None:
    plan = plan_sources(sources, sizes)
    load = [sum(size for size, s in zip(sizes, plan, strict=True) if s == source) for source in range(sources)]
    assert max(load) - min(load) <= max(sizes, default=0)


def test_pieces_rotate_from_the_planned_source() -> None:
    assert spread_pieces(2, 4, 6) == ((2,), (3,), (0, 4), (1, 5))


@given(st.integers(1, 6), st.integers(0, 50), st.data())
def test_every_piece_has_one_source(sources: int, pieces: int, data: st.DataObject) -> None:
    shares = spread_pieces(data.draw(st.integers(0, sources - 1)), sources, pieces)
    assert sorted(k for share in shares for k in share) == list(range(pieces))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
