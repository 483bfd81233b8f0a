"""The sampling bias of a tail rule and the figures of programs, in the table that every report walks."""

from __future__ import annotations

import msgspec
import pytest

from reports.metrics import EVERY, PROGRAMS, TAILS, metrics_for
from reports.tails import delay_steps, end_of, given_up
from testbed.metrics.summary import BiasBin, ProgramFigures, RunSummary
from tests.reports.invented import variant

BINS = [
    BiasBin("length", 64, 128, 30, 0, 10.0, 0.0),
    BiasBin("length", 128, 256, 40, 10, 20.0, 0.5),
    BiasBin("length", 256, 512, 10, 5, 30.0, 1.0),
    BiasBin("length", 512, 1024, 2, 8, 90.0, 4.0),
    BiasBin("difficulty", 0.0, 0.25, 20, 10, 0.0, 1.0),
    BiasBin("difficulty", 0.75, 1.0, 62, 13, 0.0, 0.5),
]
"""82 trained and 23 given up of 105: a quarter are 26.25."""


def plain_run() -> RunSummary:
    return variant(0).runs[0]


def biased() -> RunSummary:
    return msgspec.structs.replace(plain_run(), bias=BINS)


def test_the_ends_are_the_fewest_bins_that_hold_a_quarter() -> None:
    run = biased()
    assert given_up(run, "length", False) == 0.0  # 30 of the first bin are enough
    long = end_of(run, "length", True)  # 10 + 15 are too few: three bins, 75 trajectories
    assert (long.trained, long.given_up) == (52, 23)
    assert delay_steps(run, "length", True) == pytest.approx((2 * 4.0 + 10 * 1.0 + 40 * 0.5) / 52)
    assert given_up(run, "difficulty", False) == pytest.approx(1 / 3)


def test_only_runs_with_a_tail_rule_or_programs_have_those_rows() -> None:
    plain, tail = plain_run(), biased()
    assert not set(metrics_for([plain], False)) & {*TAILS, *PROGRAMS}
    assert set(TAILS) <= set(metrics_for([tail, tail], False)) and not set(TAILS) & set(
        metrics_for([tail, plain], False)
    )
    figures = ProgramFigures(600, 5, 1.5, 2.0, 40.0, 3.0, 12.5, {"time": 2, "space": 1})
    agents = msgspec.structs.replace(plain, programs=figures)
    rows = metrics_for([agents], False)
    assert set(PROGRAMS) <= set(rows) <= set(EVERY)
    assert [rows[n].read(agents) for n in ("turns_per_min", "program_pauses", "tool_faults")] == [12.5, 5.0, 3.0]
