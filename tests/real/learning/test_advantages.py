"""Group comparison: the seeds' numbers, the table of systems.md 3.1, and the groups without a signal."""

from __future__ import annotations

import math

import pytest
import torch

from real.learning.advantages import group_advantages
from real.learning.options import AdvantageStd

pytestmark = pytest.mark.backend("CORE")


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
    ],
)
def test_uneven_groups(rewards: list[float], std: AdvantageStd, first: float, last: float) -> None:
    found = advantages(rewards, std)
    assert (found[0], found[-1]) == pytest.approx((first, last), abs=5e-5)


@pytest.mark.parametrize("std", ["population", "sample", "none"])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [0.0] * 8, [0.3], [0.1 + 0.2, 0.3, 0.3]])
def test_lm_17_equal_rewards_and_singletons_have_no_signal(rewards: list[float], std: AdvantageStd) -> None:
    assert advantages(rewards, std) == [0.0] * len(rewards)


def test_lm_08_no_gradient_through_the_group() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0], requires_grad=True)
    assert not group_advantages(rewards).requires_grad
