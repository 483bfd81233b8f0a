"""Fits find the coefficients that the measurements were made with, and say how sure they are."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from testbed.calibration.design import EnginePoint, design
from testbed.calibration.fit import fit, fitted, value
from testbed.calibration.make import CalibrationError, make_profile, series_of


def seconds(batch: int, context: int, noise: float = 0.0) -> float:
    return (2e-3 + 1.5e-4 * batch + 3e-7 * context) * (1 + noise)


GRID = [(b, b * c) for b in (1, 2, 4, 8, 16, 32) for c in (16, 100, 400, 1000)]


def test_exact_measurements_give_the_exact_coefficients() -> None:
    q = fit(("base_s", "per_sequence_s", "per_context_token_s"), [((1, b, s), seconds(b, s)) for b, s in GRID])
    assert [c.value for c in q.coefficients.values()] == pytest.approx([2e-3, 1.5e-4, 3e-7])
    assert q.residual_max < 1e-9
    assert fitted(q, (1, 3, 50)) == pytest.approx(seconds(3, 50))


def test_the_interval_holds_the_truth_and_shrinks_with_measurements() -> None:
    """95 % intervals: of 100 fits to noise of 5 %, the base is inside in at least 85."""
    draw, inside, widths = random.Random(1), 0, []
    for repeats in (1, 8):
        width = 0.0
        for _ in range(100):
            points = [((1, b, s), seconds(b, s, draw.gauss(0, 0.05))) for b, s in GRID * repeats]
            base = fit(("base_s", "per_sequence_s", "per_context_token_s"), points).coefficients["base_s"]
            inside += base.low <= 2e-3 <= base.high
            width += base.high - base.low
        widths.append(width)
    assert inside >= 170
    assert widths[1] < widths[0] / 2  # sqrt(8) = 2.8


def test_a_term_without_effect_is_not_negative() -> None:
    q = fit(("base_s", "slope"), [((1, x), 0.01 - 1e-5 * x) for x in (1, 10, 100)])
    assert value(q, "slope") == 0.0


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="1 measurements are too few for 2 coefficients"):
        fit(("base_s", "slope"), [((1, 2), 0.1)])
    with pytest.raises(CalibrationError, match="decode: 0 measurements"):
        make_profile(series_of([], [], 8192), [], [])


def test_the_design_keeps_within_what_the_engine_holds() -> None:
    for e in design(max_requests=16, max_tokens=2000, max_context=256, repeats=1):
        assert not e.held or (e.requests <= 16 and e.requests * e.prompt <= 2000)
        assert e.prompt < 256 and e.cached < e.prompt
    cached = [e for e in design(16, 8192, 512, 1) if e.cached]
    assert cached and all(e.cached == e.prompt - 1 for e in cached)


def engine_points() -> list[EnginePoint]:
    """Of an engine with known coefficients: prefill 5 ms + 10 us a token + 0.1 ms a request, a request's way 1 ms + 0.2
    ms each."""
    points = []
    for b, s in GRID:
        new = 20 * b
        prefill = 5e-3 + 1e-5 * new + 1e-4 * b
        points.append(EnginePoint(b, new, 0.0, prefill, 10, 10 * seconds(b, s), s, 1.0, True))
        points.append(EnginePoint(b, new, 0.0, prefill, 0, 0.0, s, prefill + 1e-3 + 2e-4 * b, False))
    return points


def test_a_pause_in_one_of_three_measurements_does_not_count() -> None:
    points = engine_points()
    paused = [structs.replace(p, prefill_s=10 * p.prefill_s, decode_s=10 * p.decode_s) for p in points]
    alone, disturbed = (series_of(p, [], 8192) for p in (points, [*points, *paused, *points]))
    for name in ("decode", "prefill"):
        assert disturbed[name].points == alone[name].points


def test_a_profile_says_coefficients_ranges_and_what_it_is_of() -> None:
    points = engine_points()
    series = series_of(points, [], one_batch_tokens=200)
    p = make_profile(series, points, [], machine={"cpu": "x"}, versions={"sglang": "1"}, model="tiny")
    assert (p.decode.base_s, p.decode.per_sequence_s) == pytest.approx((2e-3, 1.5e-4))
    assert p.prefill.base_s == pytest.approx(5e-3)
    assert p.prefill.per_token_s * 20 + p.prefill.per_request_s == pytest.approx(3e-4)  # the design keeps 20 each
    assert p.arrival is not None and (p.arrival.base_s, p.arrival.per_request_s) == pytest.approx((1e-3, 2e-4))
    assert p.ranges.batch == (1, 32) and p.ranges.context_per_sequence == (16, 1000)
    assert p.ranges.new_tokens == (20, 160)  # 16 x 20 > 200: more than one prefill batch
    assert p.trainer is None and p.updates == {}
