"""Policy losses against the numbers of the seeds, and against signs worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from real.learning.losses import policy_gradient, policy_loss, ppo_clip, probability_ratio
from real.learning.options import LossOptions

pytestmark = pytest.mark.backend("CORE")


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def gradient(ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> float:
    """d loss / d log p at this ratio."""
    z = log(ratio * 0.5).requires_grad_()
    ppo_clip(z, log(0.5), torch.tensor([advantage]), low, high).loss.sum().backward()
    assert z.grad is not None
    return float(z.grad)


def test_lm_07_gradient_of_the_simplest_loss() -> None:
    z = log(0.5).requires_grad_()
    loss = policy_gradient(z, torch.tensor([1 - 0.4]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(-0.6 * math.log(0.5))
    assert z.grad is not None
    assert z.grad.item() == pytest.approx(-0.6)


def test_lm_08_advantage_and_denominator_are_constants() -> None:
    advantage = torch.tensor([0.6], requires_grad=True)
    old = log(0.5).requires_grad_()
    current = log(0.55).requires_grad_()
    (policy_gradient(current, advantage) + ppo_clip(current, old, advantage, 0.2, 0.2).loss).sum().backward()
    assert advantage.grad is None
    assert old.grad is None
    assert current.grad is not None


@pytest.mark.parametrize(("advantage", "rises"), [(0.6, True), (-0.6, False)])
def test_lm_09_the_sign_moves_an_isolated_choice(advantage: float, rises: bool) -> None:
    logits = torch.zeros(4, requires_grad=True)
    policy_gradient(logits.log_softmax(-1)[:1], torch.tensor([advantage])).sum().backward()
    assert logits.grad is not None
    moved = (logits - 0.1 * logits.grad).softmax(-1)[0].item()
    assert (moved > 0.25) == rises


def test_lm_10_shared_weights_may_move_a_token_against_its_own_signal() -> None:
    # One weight makes both choices likelier. The second token has a positive advantage, and still falls: the first
    # one's negative signal is stronger. This is allowed.
    w = torch.zeros(1, requires_grad=True)
    z = torch.nn.functional.logsigmoid(torch.stack([3 * w, w])).squeeze(-1)
    policy_gradient(z, torch.tensor([-1.0, 0.5])).sum().backward()
    assert w.grad is not None
    moved = torch.sigmoid(w - 0.1 * w.grad).item()
    assert moved < 0.5


def test_ratio_of_the_same_token() -> None:
    assert probability_ratio(log(0.6), log(0.5)).item() == pytest.approx(1.2)


def test_a_ratio_cannot_overflow() -> None:
    assert math.isfinite(probability_ratio(torch.tensor([0.0]), torch.tensor([-500.0])).item())


def test_lm_12_clipping_stops_what_has_moved_enough() -> None:
    assert gradient(1.3, +1.0) == 0
    assert gradient(0.7, -1.0) == 0
    assert gradient(0.7, +1.0) == pytest.approx(-0.7)  # d(-r A)/dz = -r A
    assert gradient(1.3, -1.0) == pytest.approx(1.3)
    assert gradient(1.1, +1.0) == pytest.approx(-1.1)
    assert ppo_clip(log(0.6), log(0.5), torch.tensor([1.0]), 0.2, 0.2).loss.item() == pytest.approx(-1.2)


def test_clip_higher_moves_only_the_upper_bound() -> None:
    assert gradient(1.25, +1.0, high=0.28) == pytest.approx(-1.25)
    assert gradient(1.29, +1.0, high=0.28) == 0
    assert gradient(0.79, -1.0, high=0.28) == 0


def test_clipped_counts_the_stopped_tokens_only() -> None:
    ratio = torch.tensor([1.3, 0.7, 1.3, 0.7, 1.0])
    found = ppo_clip(ratio.log(), torch.zeros(5), torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]), 0.2, 0.2)
    assert found.clipped.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("denominator", "ratio", "weight"),
    [("generation", 0.60 / 0.50, 1.0), ("recomputed", 0.60 / 0.52, 1.0), ("decoupled", 0.60 / 0.52, 0.52 / 0.50)],
)
def test_er_07_the_denominator_is_configuration(denominator: str, ratio: float, weight: float) -> None:
    options = LossOptions(denominator=denominator, eps_clip=0.25)  # type: ignore[arg-type]
    found = policy_loss(log(0.60), log(0.50), log(0.52), torch.tensor([1.0]), options)
    assert found.ratio.item() == pytest.approx(ratio)
    assert found.loss.item() == pytest.approx(-ratio * weight)


def test_a_denominator_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="without old log-probs"):
        policy_loss(log(0.6), log(0.5), None, torch.tensor([1.0]), LossOptions(denominator="recomputed"))
