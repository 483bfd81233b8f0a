"""When a difference may be claimed, and which kind a derived number has."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.kinds import KINDS, result_kind, weakest
from reports.metrics import METRICS, kind_of
from reports.spread import Stat, best_of, separated
from tests.reports.invented import variant


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=8))
def test_mean_and_standard_deviation_over_seeds(values):
    s = Stat(tuple(values))
    assert s.mean == pytest.approx(statistics.fmean(values))
    assert s.sd == pytest.approx(statistics.stdev(values), abs=1e-6)


def test_one_seed_has_no_spread():
    assert Stat((5.0,)).sd == 0.0


@pytest.mark.parametrize(
    ("a", "b", "claimed"),
    [
        ((100.0, 110.0), (130.0, 140.0), True),  # sd 7.07 each: 14.1 < 30
        ((100.0, 120.0), (115.0, 135.0), False),  # sd 14.1 each: 28.3 > 15
        ((100.0, 100.0), (100.4, 100.4), False),  # no spread, but under 0.5 %
        ((100.0, 100.0), (101.0, 101.0), True),
        ((100.0,), (104.9,), False),  # one seed: 5 % or nothing
        ((100.0,), (106.0,), True),
        ((0.0, 0.0), (0.0, 0.0), False),
        ((0.0, 0.0), (0.07, 0.08), True),
    ],
)
def test_differences_within_the_spread_are_not_claimed(a, b, claimed):
    assert separated(Stat(a), Stat(b)) is claimed
    assert separated(Stat(b), Stat(a)) is claimed


def test_the_best_and_what_ties_with_it():
    stats = [Stat((100.0, 104.0)), Stat((101.0, 105.0)), Stat((150.0, 151.0))]
    assert best_of(stats, -1) == [0, 1]
    assert best_of(stats, 1) == [2]


def test_rp_05_a_derived_number_takes_the_weakest_kind():
    assert weakest(["measured", "analytic", "calibrated"]) == "analytic"
    assert weakest(["measured"]) == "measured"
    assert weakest(["assumed", "simulated"]) == "simulated"
    with pytest.raises(KeyError):
        weakest(["measured", "guessed"])


def test_rp_05_kinds_have_different_marks():
    assert len({k.mark for k in KINDS}) == len(KINDS)


def test_rp_05_simulated_and_real_runs_differ_in_kind():
    simulated = variant(3).runs[0]
    assert result_kind("simulated") == "simulated"
    assert all(kind_of(m, simulated) == "simulated" for m in METRICS.values())
    real = variant(3).runs[0]
    real.backend = "real"
    real.kinds = {"price": "published", "links": "measured"}
    assert kind_of(METRICS["step_time_s"], real) == "measured"
    assert kind_of(METRICS["update_total_s"], real) == "measured"
    assert kind_of(METRICS["cost_usd_per_1000_steps"], real) == "published"
