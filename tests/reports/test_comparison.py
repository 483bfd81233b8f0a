"""Which runs may be compared, and the figures of a comparison."""

import json
import math

import pytest

from reports import ComparisonError, VariantRuns, build_comparison, comparison_figures
from reports.comparison import all_figures, closure
from reports.metrics import METRICS
from testbed.metrics.summary import CAUSES
from tests.reports.invented import ASYNC, COLOCATED, PRICE, comparison, run, split, variant


def build(*variants, **changes):
    return build_comparison(**{"study": "s", "question": "q", "variants": list(variants), **changes})


def test_pl_13_unequal_gpu_totals_are_refused_with_both_values():
    smaller = split({"generate": 100.0}, {"train": 100.0}, 32, 24)
    with pytest.raises(ComparisonError, match=r"GPU totals.*64.*56"):
        build(variant(0, 1), VariantRuns("", "small", "", [run("small", smaller)]))


def test_pl_13_unequal_gpus_are_said_when_the_study_allows_them():
    smaller = split({"generate": 100.0}, {"train": 100.0}, 32, 24)
    c = build(variant(0, 1), VariantRuns("", "small", "", [run("small", smaller)]), allow_unequal=["gpus"])
    assert c.unequal == ["gpus"]


def test_rp_13_different_seeds_are_refused():
    with pytest.raises(ComparisonError, match=r"seeds.*\[1, 2\].*\[1\]"):
        build(variant(0, 2), variant(1, 1))


def test_rp_13_different_workloads_are_refused_per_seed():
    other = VariantRuns("", "other", "", [run("other", ASYNC, seed=1), run("other", ASYNC, seed=2, workload="beef")])
    with pytest.raises(ComparisonError, match=r"workload hashes \(seed 2\).*77d0aa412.*beef2"):
        build(variant(0, 2), other)


def test_rp_13_seeds_are_paired_whatever_their_order():
    shuffled = variant(1, 3)
    shuffled.runs.reverse()
    assert build(variant(0, 3), shuffled).seeds == [1, 2, 3]


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ([], "1 to 12"),
        ([VariantRuns("", "none", "", [])], "no runs"),
        ([VariantRuns("", "short", "", [run("short", COLOCATED, measured_steps=0)])], "no measured steps"),
        ([VariantRuns("", "twice", "", [run("x", COLOCATED), run("x", COLOCATED)])], "seed twice"),
    ],
)
def test_what_cannot_be_a_comparison_is_refused(variants, message):
    with pytest.raises(ComparisonError, match=message):
        build(*variants)


def test_letters_follow_the_order_of_the_study():
    assert [v.letter for v in comparison(seeds=1, variants=12).variants] == list("ABCDEFGHIJKL")


def test_rp_06_lanes_close_and_their_area_is_the_gpu_time():
    c = comparison()
    assert closure(c) < 1e-6
    for f, v in zip(all_figures(c), c.variants, strict=True):
        step = sum(r.step_time_mean_s for r in v.runs) / len(v.runs)
        area = sum(lane.gpus * s for lane in f.lanes for s in lane.seconds.values())
        assert area == pytest.approx(64 * step, rel=1e-9)
        assert set(f.causes) <= set(CAUSES)


def test_rp_06_a_gap_in_gpu_time_is_seen():
    broken = run("broken", COLOCATED)
    broken.pools[0].gpu_seconds["train"] *= 1.1
    assert closure(build(VariantRuns("", "broken", "", [broken]))) > 1e-3


def test_as_11_idle_time_is_given_for_each_side():
    shared, f = all_figures(comparison(seeds=1))[:2]
    # one pool in turns: 37 of 328 s the engines wait for the longest, the trainer never waits
    assert shared.mean("engines_idle_share") == pytest.approx(37 / 328)
    assert shared.mean("trainer_idle_share") == 0.0
    # sync, split: engines idle 31 + 227 of 515 s, the trainer 280 of 515 s
    assert f.mean("engines_idle_share") == pytest.approx(258 / 515)
    assert f.mean("trainer_idle_share") == pytest.approx(280 / 515)
    assert f.mean("gpu_idle_share") == pytest.approx((40 * 258 + 24 * 280) / (64 * 515))


def test_as_07_ageing_in_generation_and_in_the_buffer_add_up_to_the_dequeue_reading():
    for f in all_figures(comparison()):
        parts = f.mean("staleness_in_generation") + f.mean("staleness_in_buffer")
        assert parts == pytest.approx(f.mean("staleness_dequeue_mean"))


def test_json_is_plain_and_has_every_figure_of_every_variant():
    c = comparison()
    data = json.loads(json.dumps(comparison_figures(c), allow_nan=False))
    assert [v["letter"] for v in data["variants"]] == list("ABCDE")
    for v in data["variants"]:
        assert set(v["figures"]) == set(METRICS)
        cost = v["figures"]["cost_usd_per_1000_steps"]
        assert cost["mean"] == pytest.approx(v["figures"]["step_time_s"]["mean"] * 64 * PRICE / 3600 * 1000)
        assert len(cost["values"]) == 5 and cost["kind"] == "simulated"
    assert data["best"] == ["D"] and data["baseline"] == "A"
    assert "Reward is not simulated" in data["price_of_it"]


def test_figures_are_means_over_seeds():
    c = comparison()
    f = all_figures(c)[3]
    assert f.mean("step_time_s") == pytest.approx(math.fsum(r.step_time_mean_s for r in c.variants[3].runs) / 5)
