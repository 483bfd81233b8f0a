"""Options that cannot work are refused in one line that names what can."""

from __future__ import annotations

from typing import Any

import pytest

from real.errors import RealError
from real.learning.options import LossOptions

pytestmark = pytest.mark.backend("CORE")


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
    ],
)
def test_refusals(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RealError, match=says):
        LossOptions(**wrong)
