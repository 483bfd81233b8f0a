"""Rows, and who gets which record: pure functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.errors import RealError
from real.trainer.assignment import updates_of
from real.trainer.packing import pack
from testbed.packing import bins, ranks_of
from tests.real.trainer.conftest import make_record, random_records

pytestmark = pytest.mark.backend("CORE")


def test_a_row_by_hand() -> None:
    a = make_record(0, [10, 11, 12, 13], 2, [True, True])
    b = make_record(1, [20, 21, 22], 1, [True, True])
    (row,) = pack([b, a], 7)
    assert row.records == (1, 0)  # longest first
    assert row.token_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert row.predictors.tolist() == [1, 2, 4, 5]
    assert row.chosen.tolist() == [12, 13, 21, 22]


@given(st.lists(st.integers(1, 40)), st.integers(1, 50))
def test_bins_hold_everything_once_and_keep_to_the_capacity(sizes: list[int], capacity: int) -> None:
    found = bins(sizes, capacity)
    assert sorted(i for b in found for i in b) == list(range(len(sizes)))
    assert all(len(b) == 1 or sum(sizes[i] for i in b) <= capacity for b in found)


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 5))
def test_ranks_are_balanced(sizes: list[int], ranks: int) -> None:
    shares = ranks_of(sizes, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert shares == ranks_of(sizes, ranks)


def test_updates_take_whole_groups_in_the_batch_order() -> None:
    records = [make_record(i, [1, 2], 1, [True], group=group) for i, group in enumerate([7, 3, 7, 5, 3, 5])]
    assert updates_of(records, 3) == [[0, 2], [1, 4], [3, 5]]
    assert updates_of(records, 2) == [[0, 2], [1, 4, 3, 5]]
    assert updates_of(records, 1) == [[0, 2, 1, 4, 3, 5]]


def test_more_updates_than_groups_are_refused() -> None:
    with pytest.raises(RealError, match="3 updates of a batch of 2 groups"):
        updates_of(random_records(4), 3)


def test_er_01_a_row_is_made_of_ids_alone() -> None:
    # A record holds no text at all: nothing could be tokenised again.
    rows = pack(random_records(5), 32)
    assert all(np.issubdtype(row.token_ids.dtype, np.integer) for row in rows)
    assert not any(isinstance(v, str) for r in random_records(1) for v in (r.token_ids, r.loss_mask, r.turns))
