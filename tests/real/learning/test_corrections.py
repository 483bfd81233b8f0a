"""Differences measured apart, weights and their limits: the seeds' chain 0.50, 0.52, 0.60 and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from real.learning.corrections import correction_weights, differences, effective_sample_size
from real.learning.kl import kl_estimate
from real.learning.losses import policy_loss
from real.learning.options import LIMITS, LossOptions, WeightLimits


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


ENGINE, OLD, NOW = log(0.50), log(0.52), log(0.60)
ONE = torch.tensor([1.0], dtype=torch.float64)


def weights(ratios: list[float], limits: WeightLimits, sequences: list[int] | None = None) -> list[float]:
    log_ratio = log(*ratios)
    which = torch.tensor(sequences or [0] * len(ratios))
    return correction_weights(log_ratio, torch.zeros_like(log_ratio), which, limits).weight.tolist()


# --- differences ------------------------------------------------------------------------------------------------------


def test_qm_01_engine_and_update_difference_apart() -> None:
    engine, update, total = (d.item() for d in differences(ENGINE, OLD, NOW))
    assert engine == pytest.approx(0.0392, abs=5e-5)
    assert update == pytest.approx(0.1431, abs=5e-5)
    assert total == pytest.approx(0.1823, abs=5e-5)
    assert total == pytest.approx(math.log(1.2)) and total == pytest.approx(engine + update)


def test_qm_02_the_ratio_to_the_generation_probability_is_both_together() -> None:
    engine, update, total = (d.exp().item() for d in differences(ENGINE, OLD, NOW))
    assert total == pytest.approx(1.2, abs=1e-12)
    assert engine == pytest.approx(1.04, abs=1e-12)
    assert update == pytest.approx(1.1538, abs=5e-5)
    assert engine * update == pytest.approx(1.2, abs=1e-12)
    # It multiplies the choice's weight in learning: with or without it, the gradient differs by 1.2.
    found = {}
    for loss_type in ("importance", "policy_gradient"):
        now = NOW.clone().requires_grad_()
        policy_loss(now, ENGINE, None, ONE, LossOptions(loss_type=loss_type)).loss.sum().backward()  # type: ignore[arg-type]
        assert now.grad is not None
        found[loss_type] = now.grad.item()
    assert found["importance"] / found["policy_gradient"] == pytest.approx(1.2)


def test_qm_03_a_correction_does_not_change_what_is_measured() -> None:
    for limits in LIMITS.values():
        options = LossOptions(denominator="decoupled", limits=limits)
        policy_loss(NOW, ENGINE, OLD, ONE, options)
        assert differences(ENGINE, OLD, NOW).engine.item() == pytest.approx(math.log(0.52 / 0.50))


def test_qm_10_same_weights_other_numbers_is_measured_and_not_refused() -> None:
    """Equal, close or far: no function insists that recomputed log-probs are the generated ones."""
    for generated in (0.52, 0.50, 1e-9):
        gap = differences(log(generated), OLD, OLD).engine
        assert gap.item() == pytest.approx(math.log(0.52 / generated))
        for denominator in ("generation", "recomputed", "decoupled"):
            options = LossOptions(denominator=denominator)  # type: ignore[arg-type]
            assert math.isfinite(policy_loss(OLD, log(generated), OLD, ONE, options).loss.item())
        assert kl_estimate(log(generated), OLD).item() >= 0


def test_qm_14_staleness_zero_leaves_the_engine_difference() -> None:
    fresh = differences(ENGINE, OLD, OLD)
    assert fresh.engine.item() > 0
    assert fresh.update.item() == 0
    stale_on_equal_engines = differences(OLD, OLD, NOW)
    assert stale_on_equal_engines.engine.item() == 0
    assert stale_on_equal_engines.update.item() > 0


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "weight"), [("none", 1.2), ("truncate", 1.1), ("mask", 0.0)])
@pytest.mark.parametrize("loss_type", ["importance", "ppo_clip"])
def test_qm_04_cap_1_1_on_weight_1_2(action: str, weight: float, loss_type: str) -> None:
    """The same weight 1.2 as the ratio to generation, and as a separate weight outside a ratio of 1."""
    limits = WeightLimits(action, bounds=None if action == "none" else (0.0, 1.1))  # type: ignore[arg-type]
    one = LossOptions(loss_type=loss_type, limits=limits, eps_clip=0.25)  # type: ignore[arg-type]
    two = LossOptions(loss_type=loss_type, limits=limits, eps_clip=0.25, denominator="decoupled")  # type: ignore[arg-type]
    for options, old in ((one, None), (two, NOW)):
        now = NOW.clone().requires_grad_()
        found = policy_loss(now, ENGINE, old, -ONE, options)
        found.loss.sum().backward()
        assert now.grad is not None
        assert (found.loss.item(), now.grad.item()) == pytest.approx((weight, weight), abs=1e-12)
        assert found.weight.item() == pytest.approx(weight, abs=1e-12)
        assert (found.truncated.item(), found.masked.item()) == (action == "truncate", action == "mask")


def test_qm_04_the_clip_limits_the_update_and_the_limits_the_weight() -> None:
    """Ratio 1.3 under weight 3, A = +1: each switch alone stops what it is for."""
    old, now = log(0.3), log(0.39)
    generation = log(0.1)
    expected = {
        ("importance", "none"): (-3.9, 3 * -1.3),
        ("importance", "tis"): (-2.6, 2 * -1.3),
        ("ppo_clip", "none"): (-3.6, 0.0),
        ("ppo_clip", "tis"): (-2.4, 0.0),
        ("importance", "mis"): (0.0, 0.0),
    }
    for (loss_type, name), (value, gradient) in expected.items():
        options = LossOptions(loss_type=loss_type, denominator="decoupled", limits=LIMITS[name])  # type: ignore[arg-type]
        z = now.clone().requires_grad_()
        loss = policy_loss(z, generation, old, ONE, options).loss
        loss.sum().backward()
        assert z.grad is not None
        assert (loss.item(), z.grad.item()) == pytest.approx((value, gradient), abs=1e-12)


def test_qm_12_token_truncation() -> None:
    assert weights([0.3, 1.0, 1.9, 2.5, 100.0], LIMITS["tis"]) == pytest.approx([0.3, 1.0, 1.9, 2.0, 2.0])


def test_qm_12_sequence_masking() -> None:
    """Products 1.5 * 1.2 = 1.8 and 1.5 * 1.5 = 2.25 with cap 2; every token carries its sequence's weight."""
    assert weights([1.5, 1.5, 1.2, 1.5], LIMITS["mis"], [0, 1, 0, 1]) == pytest.approx([1.8, 0, 1.8, 0])


def test_qm_12_two_sided_token_mask() -> None:
    assert weights([0.1, 0.2, 1.0, 5.0, 5.1], LIMITS["icepop"]) == pytest.approx([0, 0.2, 1.0, 5.0, 0])


def test_qm_12_geometric_mask_then_token_truncation() -> None:
    """Geometric means 1 (4 and 1/4) and 1.02; only the first sequence stays, and its 4 is truncated."""
    found = weights([4.0, 1.02, 0.25, 1.02], LIMITS["seq_mask_tis"], [0, 1, 0, 1])
    assert found == pytest.approx([2.0, 0, 0.25, 0])


def test_qm_12_geometric_weight() -> None:
    limits = WeightLimits("truncate", "geometric", (0.0, 1.5))
    assert weights([4.0, 1.0, 1.2], limits, [0, 0, 1]) == pytest.approx([1.5, 1.5, 1.2])


def test_qm_12_one_impossible_token_vetoes_its_sequence() -> None:
    limits = WeightLimits(veto=1e-4)
    assert weights([1.0, 0.9e-4, 1.0, 1.1e-4], limits, [0, 0, 1, 1]) == pytest.approx([0, 0, 1.0, 1.1e-4])


def test_qm_12_a_product_over_a_long_sequence_vanishes_and_a_mean_does_not() -> None:
    """e^-0.0028 on each of 1,000 tokens: 0.0608 as a product, 0.9972 as a mean."""
    ratios = [math.exp(-0.0028)] * 1000
    assert weights(ratios, WeightLimits(level="sequence"))[0] == pytest.approx(math.exp(-2.8))
    assert weights(ratios, WeightLimits(level="geometric"))[0] == pytest.approx(math.exp(-0.0028))


def test_qm_12_normalised_weights_have_mean_one_over_what_is_kept() -> None:
    """Ratios 0.5, 1, 4, 9 in (0.5, 2.0) with the last sequence vetoed: 0.5, 1, 2 have mean 7/6."""
    limits = WeightLimits("truncate", "token", (0.5, 2.0), veto=1e-4, normalise=True)
    old = log(0.25, 0.5, 0.8, 0.9, 1e-6)
    generation = log(0.5, 0.5, 0.2, 0.1, 0.5)
    options = LossOptions(loss_type="importance", denominator="decoupled", limits=limits)
    sequences = torch.tensor([0, 0, 0, 1, 1])
    found = policy_loss(old, generation, old, torch.ones(5, dtype=torch.float64), options, sequences)
    assert found.weight.tolist() == pytest.approx([3 / 7, 6 / 7, 12 / 7, 0, 0])
    assert (-found.loss).tolist() == pytest.approx([3 / 7, 6 / 7, 12 / 7, 0, 0])
    assert found.truncated.tolist() == [False, False, True, False, False]
    given = policy_loss(old, generation, old, torch.ones(5, dtype=torch.float64), options, sequences, mean_weight=2.0)
    assert given.weight.tolist() == pytest.approx([0.25, 0.5, 1.0, 0, 0])


def test_qm_12_the_numerator_of_a_separate_weight_is_old_and_not_current() -> None:
    """After an update the wrong numerator would give 0.60 / 0.50."""
    options = LossOptions(denominator="decoupled", limits=LIMITS["tis"])
    assert policy_loss(NOW, ENGINE, OLD, ONE, options).weight.item() == pytest.approx(1.04)


def test_qm_12_effective_sample_size() -> None:
    def share(*values: float) -> float:
        return effective_sample_size(torch.tensor(values, dtype=torch.float64)).item()

    assert share(1, 1, 1, 1) == share(3, 3, 3, 3) == 1
    assert share(1, 0, 0, 0) == 0.25
    assert share(2, 1, 1, 0) == pytest.approx(16 / (4 * 6))
    assert share(0, 0) == 0


def test_lm_08_weights_are_constants() -> None:
    old, generation = OLD.clone().requires_grad_(), ENGINE.clone().requires_grad_()
    found = correction_weights(old, generation, torch.tensor([0]), LIMITS["tis"])
    assert not found.weight.requires_grad
    for denominator in ("generation", "decoupled"):
        options = LossOptions(denominator=denominator, limits=LIMITS["tis"])  # type: ignore[arg-type]
        now = NOW.clone().requires_grad_()
        result = policy_loss(now, generation, old, ONE, options)
        result.loss.sum().backward()
        assert (old.grad, generation.grad) == (None, None)
        assert not (result.weight.requires_grad or result.ratio.requires_grad)
