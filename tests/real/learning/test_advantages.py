"""Group comparison: the seeds' numbers, the table of systems.md 3.1, and the groups without a signal."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from real.learning.advantages import combine, group_advantages
from real.learning.options import AdvantageStd


def advantages(rewards: list[float], std: AdvantageStd = "population") -> list[float]:
    return group_advantages(torch.tensor(rewards), std).tolist()


def test_lm_15_two_of_four_succeed() -> None:
    assert advantages([1, 1, 0, 0]) == [1, 1, -1, -1]


def test_lm_18_the_standard_deviation_is_a_choice() -> None:
    assert advantages([1, 1, 0, 0], "none") == [0.5, 0.5, -0.5, -0.5]
    assert advantages([1, 1, 0, 0], "sample") == pytest.approx([math.sqrt(3) / 2] * 2 + [-math.sqrt(3) / 2] * 2)


@pytest.mark.parametrize(
    ("rewards", "std", "first", "last"),
    [
        ([1, 0, 0, 0], "population", 1.7321, -0.5774),
        ([1, 0, 0, 0], "sample", 1.5, -0.5),
        ([1, 0, 0, 0], "none", 0.75, -0.25),
        ([1] * 7 + [0], "population", 0.3780, -2.6458),
        ([1] * 7 + [0], "sample", 0.3536, -2.4749),
        ([1] * 7 + [0], "none", 0.125, -0.875),
        ([1, 1, 0, 0], "leave_one_out", 1.1547, -1.1547),
        # The others of the only winner, and of the only loser, are equal: not divided.
        ([1, 0, 0, 0], "leave_one_out", 1.0, -0.5774),
        ([1] * 7 + [0], "leave_one_out", 0.3780, -1.0),
        ([1, 0], "leave_one_out", 1.0, -1.0),
    ],
)
def test_lm_18_uneven_groups(rewards: list[float], std: AdvantageStd, first: float, last: float) -> None:
    found = advantages(rewards, std)
    assert (found[0], found[-1]) == pytest.approx((first, last), abs=5e-5)


def test_lm_18_leave_one_out_against_written_out_statistics() -> None:
    rewards = [0.3, 1.0, 0.0, 0.7, 0.7]
    expected = []
    for i, r in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        expected.append((r - statistics.mean(others)) / statistics.stdev(others))
    assert group_advantages(torch.tensor(rewards, dtype=torch.float64), "leave_one_out").tolist() == pytest.approx(
        expected
    )


@pytest.mark.parametrize("std", ["population", "sample", "none", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [0.0] * 8, [0.3], [0.1 + 0.2, 0.3, 0.3]])
def test_lm_17_equal_rewards_and_singletons_have_no_signal(rewards: list[float], std: AdvantageStd) -> None:
    assert advantages(rewards, std) == [0.0] * len(rewards)


def test_lm_08_no_gradient_through_the_group() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0], requires_grad=True)
    assert not group_advantages(rewards).requires_grad


def test_op_06_eight_failures_say_nothing_and_one_success_does() -> None:
    assert advantages([0] * 8) == [0.0] * 8
    assert advantages([1] + [0] * 7) == pytest.approx([2.646] + [-0.378] * 7, abs=5e-4)  # mean 0.125, std 0.3307


def test_op_05_a_teacher_signal_is_added_or_stands_alone() -> None:
    signal = torch.tensor([0.4 / 0.2, 0.2 / 0.4], dtype=torch.float64).log()
    task = torch.tensor([1.0, 1.0], dtype=torch.float64)
    assert combine(task, signal).tolist() == pytest.approx([1 + math.log(2), 1 - math.log(2)])
    assert combine(task, signal, 0.5).tolist() == pytest.approx([1.3466, 0.6534], abs=1e-4)
    assert combine(None, signal, 2.0).tolist() == pytest.approx([1.3863, -1.3863], abs=1e-4)


def test_op_04_and_lm_08_nothing_that_is_combined_carries_a_gradient() -> None:
    task, signal = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert not combine(task, signal).requires_grad
    assert not combine(None, signal).requires_grad
