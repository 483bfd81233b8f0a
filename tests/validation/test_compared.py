"""What a comparison is made of: turns with their timelines, quantities, histograms, and what the drawing shows."""

from __future__ import annotations

import pytest

from reports.validation_plot import COLUMNS, binned
from testbed.core.actions import StartTurn
from testbed.core.events import RunStarted, TurnFinished
from testbed.metrics.turns import Turn, Turns, running
from testbed.validation.matched import worst
from testbed.validation.plan import first_difference
from testbed.validation.quantities import Quantity, quantile, total_variation
from testbed.validation.result import Row
from tests.support.scenarios import scenario


def turn(start: float, end: float, task: int = 0) -> Turn:
    return Turn(task, 0, 0, 0, start, start, start, end, 10, 5, 0, 0)


def test_a_turn_is_timed_from_the_last_time_it_was_sent() -> None:
    turns = Turns()
    for t, attempt in ((1.0, 0), (4.0, 1)):
        turns.observe(RunStarted(t), [StartTurn(7, 0, attempt, 3, 5, 2, attempt, "x")])
    turns.observe(TurnFinished(10.0, 7, 0, 1, 10, 5, ((0, 0, 5),), 3, 6.5, 6.0, "stop"), [])
    [found] = turns.turns
    assert (found.task, found.member, found.engine, found.cached_tokens) == (5, 2, 1, 3)
    assert (found.latency_s, found.queue_s, found.prefill_s, found.decode_s) == (6.0, 2.0, 0.5, 3.5)


def test_turns_in_engines_over_time() -> None:
    assert running([turn(0, 2), turn(1, 4)]) == [(0, 1), (1, 2), (2, 1), (4, 0)]


def test_the_bins_of_the_drawing_hold_the_mean() -> None:
    """One turn for the first half, three for the second: means of 1 and 3, whatever the bins cut."""
    bins = binned([(0.0, 1), (5.0, 3)], 10.0)
    assert len(bins) == COLUMNS
    assert [n for _, n in bins[: COLUMNS // 2]] == pytest.approx([1.0] * (COLUMNS // 2))
    assert [n for _, n in bins[COLUMNS // 2 :]] == pytest.approx([3.0] * (COLUMNS // 2))
    third = binned([(0.0, 3), (10.0 / 3, 0)], 10.0)
    assert sum(n for _, n in third) / COLUMNS == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [({0: 1}, {0: 5}, 0.0), ({0: 1}, {1: 1}, 1.0), ({0: 3, 1: 1}, {0: 1, 1: 1}, 0.25), ({0: 1, 2: 1}, {0: 1}, 0.5)],
)
def test_total_variation(a: dict[int, float], b: dict[int, float], distance: float) -> None:
    assert total_variation(a, b) == total_variation(b, a) == pytest.approx(distance)


def test_quantiles_are_values_that_occurred() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0, 5.0], q) for q in (0.0, 0.5, 0.95, 1.0)] == [1.0, 3.0, 4.0, 5.0]


def test_the_parts_of_an_error_sum_to_it() -> None:
    row = Row(Quantity("q", "steps", "q", "s", 0.03), [10.0], [11.0], [13.0])
    assert (row.timing_error, row.work_error, row.full_error) == pytest.approx((0.1, 0.2, 0.3))
    assert row.timing_error is not None and row.work_error is not None
    assert row.timing_error + row.work_error == pytest.approx(row.full_error)


@pytest.mark.parametrize(
    ("real", "simulated", "verdict"),
    [
        ([10.0], [10.2], "within"),
        ([10.0], [10.4], "missed"),
        ([9.0, 11.0], [10.4, 10.4], "spread"),
        ([9.9, 10.1], [10.4, 10.4], "missed"),
    ],
)
def test_a_larger_error_passes_only_within_the_real_sides_own_spread(
    real: list[float], simulated: list[float], verdict: str
) -> None:
    assert Row(Quantity("q", "steps", "q", "s"), real, simulated, simulated).verdict(simulated, 0.03) == verdict


def test_an_error_against_nothing_has_no_size() -> None:
    q = Quantity("q", "turns", "q", "")
    assert Row(q, [0.0], [1.0], [0.0]).timing_error is None
    assert Row(q, [0.0], [1.0], [0.0]).full_error == 0.0


def test_the_worst_turns_come_first() -> None:
    pairs = [(turn(0, 1), turn(0, 1.5)), (turn(0, 4), turn(0, 1)), (turn(0, 2), turn(0, 2))]
    assert worst(pairs, 2) == [pairs[1], pairs[0]]


def test_what_only_the_simulator_reads_may_differ() -> None:
    a = scenario()
    other_times = scenario(
        simulation__engine_costs={"type": "linear", "base_s": 1.0},
        training__cost={"type": "rate", "samples_per_s": 1.0},
        weights__pause_overhead_s=3.0,
        workload__reply={"type": "fixed", "tokens": 9},
        run__seed=5,
    )
    assert first_difference(a, other_times) == ""
    assert first_difference(scenario(rollout__routing={"type": "random"}), a) == (
        "rollout.routing.type: 'random', in the real run 'least_load'"
    )
