"""Fits find the coefficients that the measurements were made with, and say how sure they are."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from testbed.calibration.design import (
    OUTPUTS,
    BesidePoint,
    ControlPoint,
    EnginePoint,
    PrefillBatch,
    beside,
    controls,
    design,
    in_parts,
    short_run,
    traffic,
    update_sizes,
)
from testbed.calibration.fit import fit, fitted, value
from testbed.calibration.make import CalibrationError, make_profile, series_of
from testbed.calibration.phases import Phases, TrainPoint
from testbed.calibration.profile import BesideFit, ControlTimes
from testbed.packing import rows_of
from tests.support.scenarios import scenario


def seconds(batch: int, context: int, noise: float = 0.0) -> float:
    return (2e-3 + 1.5e-4 * batch + 3e-7 * context) * (1 + noise)


GRID = [(b, b * c) for b in (1, 2, 4, 8, 16, 32) for c in (16, 100, 400, 1000)]


def test_exact_measurements_give_the_exact_coefficients() -> None:
    q = fit(("base_s", "per_sequence_s", "per_context_token_s"), [((1, b, s), seconds(b, s)) for b, s in GRID])
    assert [c.value for c in q.coefficients.values()] == pytest.approx([2e-3, 1.5e-4, 3e-7])
    assert q.residual_max < 1e-9
    assert fitted(q, (1, 3, 50)) == pytest.approx(seconds(3, 50))


def test_a_step_that_further_sequences_cost_ever_less_is_fitted_at_every_batch_size() -> None:
    """10 ms + 4 ms x log2(batch) + 2 us a token, which a straight line misses by more than 10 % at 1 and 4; between two
    sizes the fit is linear, and beyond the last it goes on."""

    def step(batch: int, context: float) -> float:
        return 10e-3 + 4e-3 * math.log2(batch) + 2e-6 * context

    points = [EnginePoint(b, (), 0.0, 10, 10 * step(b, s), s, 1.0, True) for b, s in GRID]
    series = {
        "decode": series_of(points, [], 8192)["decode"],
        "prefill": series_of(engine_points(), [], 8192)["prefill"],
    }
    made = make_profile(series, points, [])
    fit = made.decode
    assert [s.sequences for s in fit.above] == [2, 4, 8, 16]
    assert fit.per_context_token_s == pytest.approx(2e-6)
    for batch in (1, 2, 4, 8, 16, 32):
        assert fit.fixed_s(batch) == pytest.approx(step(batch, 0))
    assert fit.fixed_s(12) == pytest.approx((step(8, 0) + step(16, 0)) / 2)
    assert fit.fixed_s(48) == pytest.approx(step(32, 0) + (step(32, 0) - step(16, 0)))
    assert made.quality["decode"].residual_max < 1e-9


def test_batch_sizes_with_one_context_each_are_fitted_with_a_line() -> None:
    """Four points do not say four sizes and what a context costs."""
    points = [EnginePoint(b, (), 0.0, 10, 10 * seconds(b, 16 * b), 16 * b, 1.0, True) for b in (1, 2, 4, 8)]
    assert series_of(points, [], 8192)["decode"].names == ("base_s", "per_sequence_s", "per_context_token_s")


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


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 8))
def test_parts_are_everything_in_order_and_begin_where_they_may(begins: list[bool], parts: int) -> None:
    things = list(enumerate(begins))
    found = in_parts(things, parts, lambda one: one[1])
    assert [one for part in found for one in part] == things
    assert len(found) <= parts and all(part for part in found)
    assert all(part[0][1] for part in found[1:])
    if all(begins) and things:
        assert {len(part) for part in found[:-1]} <= {len(found[0])} and len(found[-1]) <= len(found[0])


def engine_points() -> list[EnginePoint]:
    """Of an engine with known coefficients: prefill 5 ms + 10 us a token + 0.1 ms a request, a request's way 1 ms + 0.2
    ms each."""
    points = []
    for b, s in GRID:
        new = 20 * b
        prefill = 5e-3 + 1e-5 * new + 1e-4 * b
        batch = PrefillBatch(b, new, 0.0, 0.0, prefill)
        points.append(EnginePoint(b, (batch,), prefill, 10, 10 * seconds(b, s), s, 1.0, True))
        points.append(EnginePoint(b, (), prefill, 0, 0.0, s, prefill + 1e-3 + 2e-4 * b, False))
    return points


def slower(p: EnginePoint, prefill_s: float, decode_s: float = 0.0) -> EnginePoint:
    """By so many seconds of the last prefill batch, and of all decode steps."""
    *others, last = p.batches or (PrefillBatch(0, 0, 0.0, 0.0, 0.0),)
    batches = (*others, structs.replace(last, seconds=last.seconds + prefill_s)) if p.batches else ()
    return structs.replace(p, batches=batches, prefill_s=p.prefill_s + prefill_s, decode_s=p.decode_s + decode_s)


def test_a_pause_in_one_of_three_measurements_does_not_count() -> None:
    points = engine_points()
    paused = [slower(p, 9 * p.prefill_s, 9 * p.decode_s) for p in points]
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


def test_a_prefill_that_is_seen_late_is_counted_without_the_decode_step_behind_it() -> None:
    """The same engine, whose counters add the first decode step of the batch to each prefill."""
    points = engine_points()
    late = []
    for p in points:
        first = p.context - p.requests * (OUTPUTS - 1) / 2  # contexts have grown by half the outputs in the mean
        late.append(slower(p, seconds(p.requests, first)) if p.held else p)
    alone, corrected = series_of(points, [], 8192), series_of(late, [], 8192, seen_late=True)
    for (terms, there), (same_terms, here) in zip(alone["prefill"].points, corrected["prefill"].points, strict=True):
        assert terms == same_terms and here == pytest.approx(there, rel=1e-6)


def test_attention_is_fitted_to_the_pairs_that_the_engine_computes() -> None:
    """5 ms + 20 ns for every pair of the padded square: other pairs do not explain it, these do exactly."""
    points = []
    for b in (1, 4, 8):
        for n, c in ((1, 31), (1, 511), (64, 0), (512, 0), (256, 256)):
            square = b * (c + n) ** 2.0
            batch = PrefillBatch(b, b * n, b * n * (c + n / 2), square, 5e-3 + 2e-8 * square)
            points.append(EnginePoint(b, (batch,), batch.seconds, 10, 0.1, 99.0, 1.0, True))
    for padded, exact in ((True, True), (False, False)):
        p = make_profile(series_of(points, [], 8192, padded), points, [], padded=padded)
        assert p.prefill.padded is padded
        assert (p.quality["prefill"].residual_max < 1e-6) is exact
    assert make_profile(series_of(points, [], 8192, True), points, [], padded=True).prefill.per_pair_s == pytest.approx(
        2e-8
    )


def updates(size: int, copy_s: float) -> Phases:
    taken = {"prepare_s": [(size, 0.01)] * 3, "copy_s": [(size, copy_s)] * 3, "resume_s": [(size, 0.002)] * 3}
    return Phases(1024, 1, updates={"broadcast": taken}, engines={"broadcast": 1})


def test_weight_updates_of_two_sizes_say_what_a_byte_takes() -> None:
    """20 ms + 1 ns a byte: 30 ms for 10 MB, 50 ms for 30 MB. The first model's means stand, whatever comes after."""
    points = engine_points()
    series = series_of(points, [], 8192)
    two = make_profile(series, points, [updates(10_000_000, 0.03), updates(30_000_000, 0.05)]).updates["broadcast"]
    assert (two.bytes, two.copy_s) == (10_000_000, 0.03)
    assert two.copy_per_byte_s == pytest.approx(1e-9) and two.prepare_per_byte_s == pytest.approx(0.0, abs=1e-15)
    one = make_profile(series, points, [updates(10_000_000, 0.03)]).updates["broadcast"]
    assert one.copy_per_byte_s == 0.0


def test_pauses_are_medians_of_idle_and_busy_engines() -> None:
    points = engine_points()
    measured = [ControlPoint("retract", n, t, 0.5 * (not n), 0.25) for n, t in ((0, 1.0), (8, 3.0), (0, 2.0), (8, 5.0))]
    profile = make_profile(series_of(points, [], 8192), points, [], measured)
    assert profile.controls == {"retract": ControlTimes(1.5, 4.0, 8, 0.5, 0.25)}


def test_work_in_company_is_a_median_of_ratios_and_never_quicker() -> None:
    """Decode 1.5, 1.2 and 4 (a pause of the machine); updates 0.9; two prefill batches are too few to go by."""
    points = engine_points()
    series = series_of(points, [], 8192)
    pairs = [BesidePoint("decode", 1.0, 1.5), BesidePoint("decode", 3.0, 3.6), BesidePoint("decode", 0.1, 0.4)]
    trained = [BesidePoint("train", 2.0, 1.8)]
    few = [BesidePoint("prefill", 0.2, 0.9)] * 2
    many = [BesidePoint("prefill", 0.2, t) for t in (0.22, 0.22, 0.23, 0.25, 0.25, 0.26)]
    found = {len(p): make_profile(series, points, [], beside=[*pairs, *trained, *p]).beside for p in (few, many)}
    assert found == {2: BesideFit(1.5, 1.5, 1.0), 6: BesideFit(1.5, pytest.approx(1.2), 1.0)}
    assert make_profile(series, points, [], beside=[*pairs, *many]).beside is None, "no trainer was measured"


def test_the_mean_of_an_update_has_its_long_tail() -> None:
    """But for the longest and the shortest tenth, and the first of a run, which is warm-up."""
    points = engine_points()
    run = updates(10_000_000, 0.03)
    run.updates["broadcast"]["copy_s"] = [(10_000_000, s) for s in (9.0, 0.01, *[0.1] * 4, *[0.2] * 4, 5.0)]
    found = make_profile(series_of(points, [], 8192), points, [run]).updates["broadcast"]
    assert found.copy_s == pytest.approx(0.15)


def test_a_short_run_made_twice_counts_as_one_but_for_its_warm_up() -> None:
    """Each begins with a publication of 9 s and an update of 5 s. The third run is of another deployment: its
    publications count, its trainer's updates do not. An update of a run takes 0.02 s beyond the fitted 0.05 + 1e-4 a
    token."""
    points = engine_points()
    rows = [(100,), (200,), (400, 300), (800,), (900, 800)]
    trained = [TrainPoint(r, 0.05 + 1e-4 * sum(r)) for r in rows]

    def run(copy_s: float, beyond: float) -> Phases:
        made = updates(10_000_000, copy_s)
        made.updates["broadcast"]["copy_s"] = [(10_000_000, s) for s in (9.0, copy_s, copy_s)]
        made.train = [TrainPoint((100,), s) for s in (5.0, 0.06 + beyond, 0.06 + beyond)]
        return made

    phases = [run(0.1, 0.02), run(0.2, 0.02), run(0.3, 0.9)]
    made = make_profile(series_of(points, trained, 8192), points, phases, short_runs=2)
    assert made.updates["broadcast"].copy_s == pytest.approx(0.2)
    assert made.trainer is not None and made.trainer.fixed_s == pytest.approx(0.07, abs=1e-4)


@pytest.mark.parametrize(("requests", "tokens", "context"), [(8, 8192, 512), (3, 320, 512), (4, 100_000, 24)])
def test_what_is_done_side_by_side_is_of_the_design(requests: int, tokens: int, context: int) -> None:
    rounds = beside(requests, tokens, context, 2)
    cold = [e for e in design(requests, tokens, context, 1) if e.held and not e.cached]
    assert len(rounds) == 2 and all(r.experiments and set(r.experiments) <= set(cold) for r in rounds)
    assert all(r.generating.running == requests for r in rounds)


@pytest.mark.parametrize(
    ("requests", "tokens", "context"), [(8, 8192, 512), (16, 320, 512), (4, 100_000, 64), (8, 8, 8)]
)
def test_the_controls_keep_within_what_the_engine_holds(requests: int, tokens: int, context: int) -> None:
    made = list(controls(requests, tokens, context, 1))
    assert {c.mode for c in made} == {"abort", "retract", "in_place"}
    assert {c.running for c in made} == {0, requests}
    assert all(c.outputs + 8 < context or c.outputs <= 1 for c in made)


def test_updates_fit_into_a_requests_context_and_come_in_rounds() -> None:
    sizes = update_sizes(100, 3)
    assert max(u.tokens for u in sizes) == 72  # not 136
    kinds = len(set(sizes))
    assert kinds >= 6 and sizes[:kinds] == sizes[kinds : 2 * kinds], "drift of the machine is in all sizes alike"


@pytest.mark.parametrize(("requests", "tokens", "context"), [(8, 8192, 512), (16, 320, 512), (1, 8192, 24), (4, 64, 8)])
def test_traffic_keeps_within_what_the_engine_holds(requests: int, tokens: int, context: int) -> None:
    loop = traffic(requests, tokens, context)
    assert loop == traffic(requests, tokens, context), "another time it is the same loop"
    assert loop.clients <= requests and len(loop.lengths) > loop.clients
    assert all(p >= 1 and o >= 1 and p + o <= context for p, o in loop.lengths)
    assert loop.clients * max(p + o for p, o in loop.lengths) <= tokens


def test_the_short_run_is_synchronous_and_makes_one_update_a_batch() -> None:
    name, run = short_run(scenario(algorithm={"n_samples_per_prompt": 4, "num_steps_per_rollout": 2}))
    assert name == "8x8" and run.rollout.admission.type == "sync" and run.algorithm.num_steps_per_rollout == 1


def test_a_trainer_is_fitted_to_the_rows_it_packs() -> None:
    """0.05 s + 0.1 s a row + 0.2 ms a token, of batches packed into rows of 1,024: 8 x 16 tokens are one row, 8 x 136
    two (seven fit), 32 x 72 three (14 fit)."""
    sizes = (8 * [16], 8 * [136], 32 * [16], 32 * [72], 16 * [64], 32 * [40])
    rows = [rows_of(lengths, 1024)[0] for lengths in sizes]
    assert [len(r) for r in rows] == [1, 2, 1, 3, 1, 2]
    points = [TrainPoint(tuple(r), 0.05 + 0.1 * len(r) + 2e-4 * sum(r)) for r in rows]
    engine = engine_points()
    fit = make_profile(series_of(engine, points, 8192), engine, []).trainer
    assert fit is not None
    assert (fit.fixed_s, fit.per_row_s, fit.per_token_s, fit.per_pair_s) == pytest.approx(
        (0.05, 0.1, 2e-4, 0), abs=1e-7
    )
    assert fit.seconds((1000, 24)) == pytest.approx(0.05 + 0.2 + 2e-4 * 1024, rel=1e-3)


def test_batches_of_one_experiment_count_each_where_the_forward_is_in_step() -> None:
    """A request alone, then seven together: two points on a CPU engine; on a GPU the launches overlap, and none."""
    one, rest = PrefillBatch(1, 32, 0.0, 0.0, 0.02), PrefillBatch(7, 224, 0.0, 0.0, 0.09)
    step = EnginePoint(8, (), 0.0, 10, 0.4, 8 * (32 + 1 + (OUTPUTS - 1) / 2), 1.0, True)
    split = structs.replace(step, batches=(one, rest), prefill_s=0.11)
    in_step = series_of([step, split, *engine_points()], [], 8192, seen_late=True)["prefill"].points
    mine = {terms[3]: s for terms, s in in_step if terms[1] in (32, 224)}
    assert mine[1] == pytest.approx(0.02) and 0 < mine[7] < 0.09
    assert not [1 for terms, _ in series_of([step, split], [], 8192)["prefill"].points if terms[1] in (32, 224)]


def test_what_an_update_of_a_run_takes_beyond_is_added() -> None:
    """50 ms and 0.2 ms a token alone; in a run 15 ms more. The first of a run is warm-up; one pause does not count."""
    points = [TrainPoint((n,), 0.05 + 2e-4 * n) for n in (100, 200, 400, 600, 800, 1000)]
    run = [TrainPoint((128,), t) for t in (9.0, *[0.065 + 2e-4 * 128] * 4, 0.5)]
    engine = engine_points()
    fit = make_profile(series_of(engine, points, 8192), engine, [Phases(1024, 1, train=run)]).trainer
    assert fit is not None and fit.seconds((400,)) == pytest.approx(0.065 + 2e-4 * 400)
    quick = [Phases(1024, 1, train=[TrainPoint((128,), 0.01)] * 3)]
    fit = make_profile(series_of(engine, points, 8192), engine, quick).trainer
    assert fit is not None and fit.seconds((400,)) == pytest.approx(0.05 + 2e-4 * 400), "never quicker than alone"


def test_a_pause_of_the_machine_does_not_bend_a_fit() -> None:
    """One measurement of six times as long, and one of a third, among 24 with noise of 2 %."""
    draw = random.Random(4)
    points = [((1.0, b, s), seconds(b, s, draw.gauss(0, 0.02))) for b, s in GRID]
    (terms, y), (other, z) = points[5], points[17]
    points[5], points[17] = (terms, 6 * y), (other, z / 3)
    q = fit(("base_s", "per_sequence_s", "per_context_token_s"), points)
    for (b, s), (terms, _) in zip(GRID, points, strict=True):
        assert fitted(q, terms) == pytest.approx(seconds(b, s), rel=0.04)
