"""The map itself: 166 ids, 58 of first priority, and names that are read as meant."""

from __future__ import annotations

import pytest

from tests.requirements_map import FIRST, IDS, backend_of, ids_in, table


def test_counts_of_the_checklist() -> None:
    assert len(IDS) == len(set(IDS)) == 166 and len(FIRST) == 58 and set(IDS) >= FIRST


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_br_01_slot_is_freed", ["BR-01"]),
        ("test_ws_02_and_07_steps", ["WS-02", "WS-07"]),
        ("test_pl_01_and_pl_03_pools", ["PL-01", "PL-03"]),
        ("test_as_13", ["AS-13"]),
        ("test_something_else_20", []),
    ],
)
def test_ids_are_read_from_names(name: str, ids: list[str]) -> None:
    assert ids_in(name) == ids


def test_an_unknown_id_is_an_error() -> None:
    with pytest.raises(ValueError, match="BR-16"):
        ids_in("test_br_16_no_such_requirement")


def test_backend_follows_from_the_folder() -> None:
    paths = (
        "tests/core/test_a.py",
        "tests/sim/deep/test_a.py",
        "tests/real/test_a.py",
        "tests/metrics/test_a.py",
        "tests/test_a.py",
    )
    assert [backend_of(p) for p in paths] == ["CORE", "SIM", "REAL", "OTHER", "OTHER"]


def test_table_counts_ids_once_per_backend() -> None:
    lines = table({"BR-01": {"CORE", "SIM"}, "BR-02": {"SIM"}, "LM-01": set()})
    row = next(line for line in lines if line.startswith("BR "))
    assert row.split()[-5:] == ["2/15", "1", "2", "0", "0"]
    assert next(line for line in lines if line.startswith("all")).split() == ["all", "2/166", "1", "2", "0", "0"]
    assert "BR-04" in lines[-2] and "LM-01" in lines[-1]
