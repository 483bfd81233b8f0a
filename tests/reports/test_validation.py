"""The pages of a validation and of a calibration stand alone and say what came out."""

from __future__ import annotations

import re
from pathlib import Path

from reports.calibration import write_calibration
from reports.validation import write_validation
from reports.validation_suite import write_suite
from testbed.calibration.make import make_profile, series_of
from testbed.metrics.turns import Turn
from testbed.validation.matched import Matched
from testbed.validation.quantities import Quantity
from testbed.validation.result import Decisions, Histogram, Row, Validation, WorstTurn
from testbed.validation.suite import Suite
from tests.calibration.test_fit import engine_points


def turn(latency: float) -> Turn:
    return Turn(3, 1, 0, 0, 10.0, 10.25, 10.5, 10.0 + latency, 24, 40, 8, 0)


def validation() -> Validation:
    """Step time 10 ± s really, 11 s with the run's own work, 9 s in full."""
    return Validation(
        name="a & b",
        question="",
        runs=["one", "two"],
        measure="oldest_token",
        steps=8,
        engines=1,
        decisions=[Decisions("one", 10, 20), Decisions("two", 10, 22)],
        rows=[
            Row(Quantity("step_time", "steps", "step time", "s", 0.03), [9.8, 10.2], [11.0, 11.0], [9.0, 9.0]),
            Row(Quantity("split/trainer/train", "split", "trainer: train", "s"), [6.0, 6.0], [6.5, 6.5], [5.0, 5.0]),
            Row(Quantity("split/trainer/idle_data", "split", "trainer: idle data", "s"), [4, 4], [4.5, 4.5], [4, 4]),
        ],
        staleness=[Histogram("dequeue", {0: 3, 1: 1}, {0: 1, 1: 1}, {0: 1}, 0.125)],
        turns=Matched(100, 90, 1.0, 0.5, 1.0, -0.02, 0.1, 0.4),
        repeated=Matched(50, 50, 1.0, 0.25, 1.0, 0.01, 0.02, 0.3),
        worst=[WorstTurn("one", turn(4.0), turn(1.0))],
        running={"real": [(0.0, 1), (5.0, 0)], "timing": [(0.0, 2), (4.0, 0)]},
        kinds={"engine_step": "calibrated"},
        marks={"decode": 0.25},
        real_versions={"sglang": "0.5.23"},
        versions={"python": "3"},
        scenario="abc",
        command="testbed validate x.yaml",
        speeds=[1.02, 1.08],
        trainer_speeds=[0.97, 1.01],
        remarks=["a remark"],
    )


def test_the_answer_and_where_the_error_comes_from(tmp_path: Path) -> None:
    paths = write_validation(validation(), tmp_path)
    said = paths["report"].read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "step time is off by +10 % with the run's own work and by −10 % in full" in said
    assert "42 actions of 2 journals are repeated exactly" in said
    assert "Times: +10 % of the step time. Work (lengths, turns, rewards): −20 %. Together −10 %." in said
    assert "trainer: train +5.0 pt; trainer: idle data +5.0 pt" in said
    assert (
        "its times around the real runs were 1.02 and 1.08 times those of the calibration, those of optimizer" in said
    )
    assert "90 of 100 turns have their counterpart" in said and "equal in 50.0 % (limit 99 %)" in said
    assert "Total variation 0.250 with the run's own work (limit 0.02)" in said
    assert "outside their range in decode 25 %" in said and "- a remark" in said
    assert "task 3, member 1, turn 0: real" in said and "4,000 ms" in said


def suite() -> Suite:
    command = "testbed validate x.yaml y.yaml"
    return Suite(validations=[validation()], failed={"b": "no engine left"}, repeats=2, seconds=90.0, command=command)


def test_a_suite_says_what_is_missed_and_why(tmp_path: Path) -> None:
    """Step time is 10 % off for a limit of 3 %; half the cached tokens are right, in real runs among themselves a
    quarter, so that this is within the spread; staleness is 0.25 apart, and 0.125 among real runs."""
    said = write_suite(suite(), {}, tmp_path)["report"].read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "equal in 50.00 % of 90 turns; 1 of 4 limits are kept, 1 more within the real side's own spread" in said
    assert (
        "| a & b | 10.0 s ± 3 % | × 1.05 | +10 % (MISSED) | – | – | – | 0.250 (MISSED) | "
        "50.0 % (within the spread) | same |" in said
    )
    assert "| a & b | step time | trainer: train: +5.0 % of a step |" in said
    assert "b: the real run did not come to its end: no engine left" in said


def test_the_pages_stand_alone(tmp_path: Path) -> None:
    points = engine_points()
    series = series_of(points, [], 8192)
    pages = [
        write_validation(validation(), tmp_path / "v")["index"],
        write_suite(suite(), {}, tmp_path / "s")["index"],
        write_calibration(make_profile(series, points, []), series, "a & b", "testbed calibrate", tmp_path / "c")[
            "index"
        ],
    ]
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert "a &amp; b" in html and "a & b" not in html
        assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", html)
        assert html.count("<svg") == html.count("</svg>") > 0


def test_a_calibration_says_its_coefficients(tmp_path: Path) -> None:
    points = engine_points()
    series = series_of(points, [], 8192)
    paths = write_calibration(make_profile(series, points, [], model="tiny"), series, "x", "c", tmp_path)
    said = paths["report"].read_text(encoding="utf-8")
    assert "| per_sequence_s | 0.00015 |" in said and "- model: tiny" in said
