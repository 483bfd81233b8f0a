"""Estimators of KL against its definition over whole next-token distributions."""

from __future__ import annotations

import math

import pytest
import torch

from real.learning.kl import kl_divergence, kl_estimate
from real.learning.options import KlType

CURRENT = torch.tensor([0.6, 0.2, 0.1, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
KL = sum(p * math.log(p / q) for p, q in zip(CURRENT.tolist(), REFERENCE.tolist(), strict=True))


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_lm_13_expectation_over_the_four_tokens_is_the_divergence(kl_type: KlType) -> None:
    assert KL > 0
    assert (CURRENT * kl_estimate(CURRENT.log(), REFERENCE.log(), kl_type)).sum().item() == pytest.approx(KL)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_lm_13_zero_for_equal_distributions(kl_type: KlType) -> None:
    assert kl_estimate(CURRENT.log(), CURRENT.log(), kl_type).abs().max().item() == 0


def test_k2_and_k3_are_never_negative() -> None:
    for kl_type in ("k2", "k3"):
        assert kl_estimate(CURRENT.log(), REFERENCE.log(), kl_type).min().item() >= 0
    assert kl_estimate(CURRENT.log(), REFERENCE.log(), "k2")[0].item() == pytest.approx(math.log(1.5) ** 2 / 2)


def test_lm_13_whole_distributions_of_four_tokens() -> None:
    """The chosen token's probability may agree while the distributions do not; the offset of logits is nothing."""
    current = torch.stack([CURRENT, CURRENT, torch.tensor([0.6, 0.1, 0.1, 0.2], dtype=torch.float64)]).log()
    reference = torch.stack([REFERENCE, CURRENT, CURRENT]).log() + 7
    expected = [KL, 0.0, 0.1 * math.log(0.1 / 0.2) + 0.2 * math.log(0.2 / 0.1)]
    found = kl_divergence(current, reference)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert found[2].item() > 0


def test_lm_13_gradient_of_the_divergence() -> None:
    """d KL / d logit_j = p_j (log(p_j / q_j) - KL)."""
    logits = CURRENT.log().requires_grad_()
    kl_divergence(logits[None], REFERENCE.log()[None]).sum().backward()
    assert logits.grad is not None
    pairs = zip(CURRENT.tolist(), REFERENCE.tolist(), strict=True)
    assert logits.grad.tolist() == pytest.approx([p * (math.log(p / q) - KL) for p, q in pairs])


def test_lm_13_temperature_is_that_of_the_sampling_distribution() -> None:
    roots_p, roots_q = CURRENT.sqrt() / CURRENT.sqrt().sum(), REFERENCE.sqrt() / REFERENCE.sqrt().sum()
    expected = sum(p * math.log(p / q) for p, q in zip(roots_p.tolist(), roots_q.tolist(), strict=True))
    found = kl_divergence(CURRENT.log()[None], REFERENCE.log()[None], temperature=2.0)
    assert found.item() == pytest.approx(expected)
