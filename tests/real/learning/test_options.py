"""Options that cannot work are refused in one line that names what can."""

from __future__ import annotations

from typing import Any

import pytest

from real.errors import RealError
from real.learning.options import LIMITS, LossOptions, WeightLimits


def test_defaults_are_the_seeds() -> None:
    options = LossOptions()
    assert (options.advantage_std, options.denominator, options.eps_clip, options.high) == (
        "population",
        "generation",
        0.2,
        0.2,
    )
    assert not options.needs_old_log_probs
    assert LossOptions(eps_clip_high=0.28).high == 0.28


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"advantage_std": "unbiased"}, "population, sample, none"),
        ({"aggregation": "mean"}, "token-mean"),
        ({"denominator": "old"}, "generation, recomputed, decoupled"),
        ({"kl_type": "k4"}, "k1, k2, k3"),
        ({"eps_clip": 0.0}, "0.2"),
        ({"kl_coef": -1.0}, "negative"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "normal_length"),
        ({"normal_length": 100}, "normal_length"),
        ({"loss_type": "ppo"}, "policy_gradient, importance, ppo_clip, gspo, cispo"),
        ({"eps_clip_c": 1.0}, "above 1"),
        ({"eps_clip_c": 3.0, "loss_type": "cispo"}, "belongs to ppo_clip and gspo"),
        ({"limits": LIMITS["tis"], "denominator": "recomputed"}, "denominator decoupled has one"),
        ({"limits": LIMITS["tis"], "loss_type": "policy_gradient"}, "no correction weight to truncate"),
        ({"limits": LIMITS["tis"], "loss_type": "gspo"}, "which is geometric"),
        ({"limits": WeightLimits(normalise=True)}, "normalise needs denominator decoupled"),
    ],
)
def test_refusals(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RealError, match=says):
        LossOptions(**wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"action": "clip", "bounds": (0.0, 2.0)}, "none, truncate, mask"),
        ({"level": "batch"}, "token, sequence, geometric"),
        ({"action": "mask"}, "go together"),
        ({"bounds": (0.5, 2.0)}, "go together"),
        ({"action": "mask", "bounds": (2.0, 0.5)}, "usual pair"),
        ({"geometric_band": (1.01, 1.02)}, "holds 1"),
        ({"veto": 1.5}, "below 1"),
    ],
)
def test_qm_12_limits_that_cannot_work(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RealError, match=says):
        WeightLimits(**wrong)


def test_qm_04_correcting_limiting_and_clipping_are_separate_switches() -> None:
    """Every action with and without the clip, corrected by one ratio or by a separate weight; masking also where
    nothing is corrected."""
    actions = {"none": None, "truncate": (0.0, 1.1), "mask": (0.0, 1.1)}
    for action, bounds in actions.items():
        for loss_type in ("ppo_clip", "importance"):
            for denominator in ("generation", "decoupled"):
                limits = WeightLimits(action, bounds=bounds)  # type: ignore[arg-type]
                assert LossOptions(loss_type=loss_type, denominator=denominator, limits=limits).corrects  # type: ignore[arg-type]
    uncorrected = LossOptions(denominator="recomputed", limits=LIMITS["mis"])
    assert not uncorrected.corrects
    assert not LossOptions(loss_type="policy_gradient").corrects
