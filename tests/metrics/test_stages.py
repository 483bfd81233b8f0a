"""Means with intervals, and what stages leave behind, read back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from testbed.metrics.scores import Mean, Score, mean_of
from testbed.metrics.stages import STAGE, StageResult, fifths, read_stage, write_result


def test_the_interval_of_a_share_is_wilsons() -> None:
    """For each end p: |p^ - p| = z sqrt(p (1 - p) / n), the equation whose solutions Wilson's ends are."""
    m = mean_of([1.0] * 30 + [0.0] * 70)
    assert (m.mean, m.n) == (0.3, 100)
    for end in (m.low, m.high):
        assert abs(0.3 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 100), rel=1e-5)
    assert m.low < 0.3 < m.high
    certain = mean_of([1.0] * 20)
    assert (certain.mean, certain.high) == (1.0, 1.0) and certain.low == pytest.approx(
        20 / (20 + 1.959964**2), rel=1e-5
    )


def test_the_interval_of_other_means_is_students() -> None:
    """t(0.975; 4) = 2.776445 (tables); the sample deviation of 1..5 is sqrt(2.5)."""
    m = mean_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert m.mean == 3.0
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert (m.low, m.high) == (pytest.approx(3.0 - half, rel=1e-6), pytest.approx(3.0 + half, rel=1e-6))
    assert mean_of([0.5]) == Mean(0.5, 0.5, 0.5, 1)
    with pytest.raises(ValueError, match="no values"):
        mean_of([])


def test_fifths_of_a_series() -> None:
    ends = fifths([0.1, 0.3] + [0.5] * 6 + [0.7, 0.9])
    assert ends is not None
    assert (ends[0].mean, ends[1].mean, ends[0].n) == (pytest.approx(0.2), pytest.approx(0.8), 2)
    assert fifths([]) is None
    single = fifths([0.25])
    assert single is not None and single[0] == single[1] == Mean(0.25, 0.25, 0.25, 1)


def test_a_stage_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    result = StageResult("s", "evaluate", "k", "m", ["t"], scores=[Score("", Mean(0.5, 0.4, 0.6, 9), 0.25)])
    write_result(tmp_path / STAGE, result)
    assert read_stage(tmp_path) == result
    assert read_stage(tmp_path / "nowhere") is None
    (tmp_path / STAGE).write_text('{"name": 3}')
    assert read_stage(tmp_path) is None
