"""A critic as the baseline: the seeds' numbers, and GAE against its written-out sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from real.learning.gae import gae, value_baseline


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


VALUES = f64(0.2, 0.6, 0.4)
"""The critic's at P, P+u, P+u+b."""
REWARDS = f64(0, 0, 1)


def written_out(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_k (gamma lam)^k delta_t+k."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]


def test_lm_19_return_minus_expectation() -> None:
    assert value_baseline(f64(1.0)[0], VALUES).tolist() == pytest.approx([0.8, 0.4, 0.6], abs=1e-12)
    two = value_baseline(f64(1.0, 0.0), torch.stack([VALUES, VALUES]))
    assert two[1].tolist() == pytest.approx([-0.2, -0.6, -0.4])
    assert value_baseline(f64(1.0, 0.5, 0.0), VALUES).tolist() == pytest.approx([0.8, -0.1, -0.4])


def test_lm_20_with_all_of_the_return_it_is_the_return_minus_expectation() -> None:
    advantages, returns = gae(REWARDS, VALUES)
    assert advantages.tolist() == pytest.approx([0.8, 0.4, 0.6], abs=1e-12)
    assert returns.tolist() == pytest.approx([1, 1, 1])


def test_lm_20_with_nothing_of_it_the_td_errors() -> None:
    advantages, _ = gae(REWARDS, VALUES, lam=0.0)
    assert advantages.tolist() == pytest.approx([0.4, -0.2, 0.6], abs=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.6)])
def test_lm_20_between_them_the_written_out_sum(gamma: float, lam: float) -> None:
    rng = torch.Generator().manual_seed(0)
    rewards, values = torch.rand(2, 3, 7, generator=rng, dtype=torch.float64)
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    for b in range(3):
        expected = written_out(rewards[b].tolist(), values[b].tolist(), gamma, lam)
        assert advantages[b].tolist() == pytest.approx(expected)
        assert (returns[b] - values[b]).tolist() == pytest.approx(expected)


def test_lm_20_and_er_05_observations_do_not_decay() -> None:
    """u, two observation tokens, b, d, padding: what u, b, d have without them, whatever a critic says there."""
    mask = torch.tensor([True, False, False, True, True, False])
    values, rewards = f64(0.2, 9.0, -9.0, 0.6, 0.4, 5.0), f64(0, 0, 0, 0, 1, 0)
    found, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    expected = written_out([0, 0, 1], [0.2, 0.6, 0.4], 0.9, 0.8)
    assert found[mask].tolist() == pytest.approx(expected)
    assert found[~mask].tolist() == [0, 0, 0] == returns[~mask].tolist()


def test_lm_20_a_reward_for_a_tool_answer_is_the_choice_before_it() -> None:
    mask = torch.tensor([True, True, False, True])
    found, _ = gae(f64(0, 0, 0.5, 1), f64(0.1, 0.2, 7.0, 0.3), mask, gamma=0.9, lam=0.8)
    assert found[mask].tolist() == pytest.approx(written_out([0, 0.5, 1], [0.1, 0.2, 0.3], 0.9, 0.8))


def test_a_reward_that_no_choice_precedes_is_refused() -> None:
    with pytest.raises(ValueError, match="before the first choice"):
        gae(f64(1, 0), f64(0, 0), torch.tensor([False, True]))


def test_lm_08_no_gradient_into_the_critic() -> None:
    values = VALUES.clone().requires_grad_()
    advantages, returns = gae(REWARDS, values)
    assert not (advantages.requires_grad or returns.requires_grad or value_baseline(f64(1.0)[0], values).requires_grad)
