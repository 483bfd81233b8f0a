"""Estimators of KL against its definition over whole next-token distributions."""

from __future__ import annotations

import math

import pytest
import torch

from real.learning.kl import kl_estimate
from real.learning.options import KlType

pytestmark = pytest.mark.backend("CORE")

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
