"""The spread of repeated real runs, pooled over a suite, and what it does to a limit."""

from __future__ import annotations

from math import sqrt

import pytest
from msgspec import structs

from testbed.validation.quantities import Quantity
from testbed.validation.result import Row
from testbed.validation.spread import pool_spread
from tests.reports.test_validation import validation

STEP = Quantity("step_time", "steps", "step time", "s", 0.03)


def with_step(real: list[float], timing: float, engines: int = 1):
    return structs.replace(validation(), engines=engines, rows=[Row(STEP, real, [timing] * len(real), [timing])])


def test_deviations_are_pooled_relative_to_each_scenarios_mean() -> None:
    """10 ± d and 100 ± 10 d have the same; three repeats count twice as much as two. Variance of a ± d is 2 d^2 for two
    repeats (d.o.f. 1) and d^2 for three (a - d, a, a + d; d.o.f. 2)."""
    suite = [with_step([9.8, 10.2], 10), with_step([98, 102], 100), with_step([10, 10], 10), with_step([9, 10, 11], 10)]
    found = pool_spread(suite)
    relative = sqrt((2 * 0.02**2 + 2 * 0.02**2 + 0 + 2 * 0.1**2) / 5)
    assert found == {1: {"step_time": pytest.approx(relative)}}
    assert all(v.rows[0].pooled == pytest.approx(relative) for v in suite)


def test_scenarios_with_other_counts_of_engines_and_single_runs_are_not_mixed_in() -> None:
    few = [with_step([9, 11], 10, engines=2) for _ in range(3)]
    one = [with_step([10, 10.1], 10) for _ in range(4)]
    single = with_step([10], 12)
    found = pool_spread([*few, *one, single])
    assert list(found) == [1], "three scenarios are too few"
    assert single.rows[0].pooled is None and few[0].rows[0].pooled is None


def test_a_small_spread_by_chance_does_not_make_a_miss() -> None:
    """5 % off, with two repeats that are equal by chance on a machine whose repeats differ by 4 to 6 %; 20 % stays a
    miss."""
    lucky, far = with_step([10, 10], 10.5), with_step([10, 10], 12.0)
    assert [v.rows[0].verdict(v.rows[0].timing, 0.03) for v in (lucky, far)] == ["missed", "missed"]
    pool_spread([lucky, far, *(with_step([9.2, 10.8], 10) for _ in range(4))])
    assert [v.rows[0].verdict(v.rows[0].timing, 0.03) for v in (lucky, far)] == ["spread", "missed"]


def test_the_larger_of_a_scenarios_own_spread_and_the_pooled_one_counts() -> None:
    """A scenario that really varies keeps its own."""
    wild = with_step([8, 12], 12.5)
    pool_spread([wild, *(with_step([10, 10.1], 10) for _ in range(20))])
    assert wild.rows[0].pooled < 0.07
    assert wild.rows[0].verdict(wild.rows[0].timing, 0.03) == "spread"
