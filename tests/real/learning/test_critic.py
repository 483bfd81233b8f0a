"""The value loss and its clip, against closed forms; advantages of the seeds' critic through a record."""

from __future__ import annotations

import pytest
import torch

from real.learning.critic import value_loss
from real.records import RecordError
from real.trainer.options import SignalOptions
from real.trainer.signals import with_advantages, with_returns
from tests.real.trainer.conftest import make_record


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeds_record(values: tuple[float, ...] = (0.2, 0.6, 0.4), mask: tuple[bool, ...] = (True,) * 3):  # type: ignore[no-untyped-def]
    """Response u, b, d with return 1 and what the critic said at P, P+u, P+u+b."""
    record = make_record(1, [9, *range(1, len(mask) + 1)], 1, list(mask), reward=1.0)
    record.extra["values"] = torch.tensor(values).numpy()
    return record


def critic(**options: float) -> SignalOptions:
    return SignalOptions(advantage="critic", **options)  # type: ignore[arg-type]


def test_lm_19_and_lm_20_with_gamma_and_lambda_1_the_advantage_is_return_minus_value() -> None:
    (ready,) = with_advantages([seeds_record()], "population", critic())
    assert ready.extra["advantages"].tolist() == pytest.approx([0.8, 0.4, 0.6])
    (trained,) = with_returns([seeds_record()], critic())
    assert trained.extra["returns"].tolist() == pytest.approx([1, 1, 1])


def test_lm_20_with_lambda_0_it_is_the_td_error() -> None:
    (ready,) = with_advantages([seeds_record()], "population", critic(lambd=0.0))
    assert ready.extra["advantages"].tolist() == pytest.approx([0.4, -0.2, 0.6])
    (trained,) = with_returns([seeds_record()], critic(lambd=0.0))
    assert trained.extra["returns"].tolist() == pytest.approx([0.6, 0.4, 1.0])  # r + V of the next context


def test_lm_20_an_observation_takes_no_time_and_a_reward_after_it_is_the_last_choices() -> None:
    """u, tool, b, d, tool: what the critic said at the tool's tokens is not asked."""
    record = seeds_record((0.2, 9.0, 0.6, 0.4, 9.0), (True, False, True, True, False))
    (ready,) = with_advantages([record], "population", critic(lambd=0.0))
    assert ready.extra["advantages"].tolist() == pytest.approx([0.4, 0, -0.2, 0.6, 0])
    (half,) = with_advantages([record], "population", critic(gamma=0.5, lambd=1.0))
    assert half.extra["advantages"].tolist() == pytest.approx([0.25 - 0.2, 0, 0.5 - 0.6, 1 - 0.4, 0])


def test_a_record_whose_choices_are_all_masked_has_no_advantage() -> None:
    record = seeds_record()
    record.loss_mask[:] = False
    (ready,) = with_advantages([record], "population", critic())
    assert ready.extra["advantages"].tolist() == [0, 0, 0]


def test_er_02_and_lm_21_without_values_there_is_no_critic_advantage() -> None:
    record = seeds_record()
    del record.extra["values"]
    for attach in (lambda: with_advantages([record], "population", critic()), lambda: with_returns([record], critic())):
        with pytest.raises(RecordError, match="trajectory 1 has no critic values, which advantage critic needs"):
            attach()


def test_value_loss_is_half_the_squared_error() -> None:
    values = numbers(0.2, 0.6, 0.4).requires_grad_()
    token = value_loss(values, values.detach(), numbers(1, 1, 1), None)
    assert token.loss.tolist() == pytest.approx([0.32, 0.08, 0.18])
    (gradient,) = torch.autograd.grad(token.loss.sum(), values)
    assert gradient.tolist() == pytest.approx([-0.8, -0.4, -0.6])  # V - G


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "clipped"),
    [
        (0.6, 0.5 * 0.4**2, -0.4, False),  # within 0.5 +- 0.2
        (0.9, 0.5 * 0.3**2, 0.0, True),  # beyond, towards the return: pushes no further, counted as at the bound 0.7
        (0.1, 0.5 * 0.9**2, -0.9, False),  # beyond, away from the return: the larger loss is its own
        (1.4, 0.5 * 0.4**2, 0.4, False),  # past the return and further from it than the bound: comes back
    ],
)
def test_value_clip_stops_what_has_moved_far_enough(value: float, loss: float, gradient: float, clipped: bool) -> None:
    v = numbers(value).requires_grad_()
    token = value_loss(v, numbers(0.5), numbers(1.0), 0.2)
    assert token.loss.item() == pytest.approx(loss)
    (found,) = torch.autograd.grad(token.loss.sum(), v)
    assert found.item() == pytest.approx(gradient)
    assert token.clipped.item() is clipped


def test_lm_08_returns_and_old_values_are_constants() -> None:
    values, old, returns = (numbers(x).requires_grad_() for x in (0.1, 0.5, 1.0))
    value_loss(values, old, returns, 0.2).loss.sum().backward()
    assert values.grad is not None and old.grad is None and returns.grad is None
