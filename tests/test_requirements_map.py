"""The map itself: 166 ids, 58 of first priority, and names that are read as meant."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements_map import FIRST, IDS, backend_of, ids_in, shown, table

ROOT = Path(__file__).parents[1]


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


def test_one_failure_takes_a_backend_away_from_an_id() -> None:
    outcomes = [("BR-01", "SIM", True), ("BR-01", "CORE", True), ("BR-01", "SIM", False), ("WS-02", "REAL", False)]
    assert shown(outcomes) == {"BR-01": {"CORE"}}


SUITE = {
    "conftest.py": "from tests.conftest import *",
    "test_a.py": "def test_br_01_a(): pass\ndef test_br_04_a(): pass",
    "test_b.py": "import pytest\n@pytest.mark.backend('REAL')\ndef test_ws_02_b(): pass",
}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (["--requirements"], ("3/166", 1)),
        (["-m 'not real' --requirements-part first", "-m real --requirements-part last"], ("3/166", 1)),
        (["-m 'not real' --requirements-part first", "-m real --requirements"], ("1/166", 1)),
        (["-m 'not real' --requirements-part first"], None),
    ],
    ids=["one run", "two parts", "the second alone", "the first says nothing"],
)
def test_the_suite_in_two_parts_has_one_table(
    tmp_path: Path, runs: list[str], expected: tuple[str, int] | None
) -> None:
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for args in runs:
        command = [sys.executable, "-m", "pytest", "--rootdir", tmp_path, *shlex.split(args), tmp_path]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("all ")]
    assert [(row[1], int(row[4])) for row in rows] == ([expected] if expected else [])


def test_table_counts_ids_once_per_backend() -> None:
    lines = table({"BR-01": {"CORE", "SIM"}, "BR-02": {"SIM"}, "LM-01": set()})
    row = next(line for line in lines if line.startswith("BR "))
    assert row.split()[-5:] == ["2/15", "1", "2", "0", "0"]
    assert next(line for line in lines if line.startswith("all")).split() == ["all", "2/166", "1", "2", "0", "0"]
    assert "BR-04" in lines[-2] and "LM-01" in lines[-1]
