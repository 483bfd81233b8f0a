"""Weights per token, by hand."""

from __future__ import annotations

import pytest

from real.learning.aggregate import Totals, token_weight
from real.learning.options import Aggregation

LENGTHS = (10, 1000)
TOTALS = Totals(tokens=1010, sequences=2)


def share_of_the_long_one(aggregation: Aggregation) -> float:
    short, long = (n * token_weight(n, TOTALS, aggregation, 1000) for n in LENGTHS)
    return long / (short + long)


def test_a_long_response_weighs_by_tokens_or_by_sequence() -> None:
    # The worked example of NeMo RL: responses of 10 and 1,000 tokens.
    assert share_of_the_long_one("token-mean") == pytest.approx(1000 / 1010)
    assert share_of_the_long_one("seq-mean-token-mean") == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("aggregation", "loss"),
    [
        # Losses 2 on each of 3 tokens, and 5 on 1 token; constant length 4.
        ("token-mean", 11 / 4),
        ("token-sum", 11),
        ("seq-mean-token-sum", 11 / 2),
        ("seq-mean-token-sum-norm", 11 / 8),
        ("seq-mean-token-mean", 3.5),
    ],
)
def test_values(aggregation: Aggregation, loss: float) -> None:
    totals = Totals(tokens=4, sequences=2)
    found = sum(
        n * value * token_weight(n, totals, aggregation, normal_length=4) for n, value in ((3, 2.0), (1, 5.0), (0, 9.0))
    )
    assert found == pytest.approx(loss)


def test_nothing_to_learn_from_is_no_division_by_zero() -> None:
    assert token_weight(0, Totals(0, 0), "token-mean") == 0
    assert token_weight(0, Totals(0, 0), "seq-mean-token-mean") == 0


def test_rollout_mean_counts_all_sequences_of_a_rollout() -> None:
    """Two rollouts; the first was cut into sequences of 3 and 1 tokens (losses 2 and 6), the second has 2 (loss 5)."""
    totals = Totals(tokens=6, sequences=3, rollouts=2)
    found = sum(
        n * value * token_weight(n, totals, "rollout-mean", rollout_tokens=m)
        for n, value, m in ((3, 2.0, 4), (1, 6.0, 4), (2, 5.0, 2))
    )
    assert found == pytest.approx(((3 * 2 + 1 * 6) / 4 + (2 * 5) / 2) / 2)
    with pytest.raises(ValueError, match="rollout_tokens"):
        token_weight(3, totals, "rollout-mean")


def test_components_are_means_over_their_own_tokens() -> None:
    """prime-rl: a policy term (-1) on 4 tokens of one sequence, a teacher term (3) on 2 tokens of another."""
    policy = 4 * -1.0 * token_weight(4, Totals(4, 1), "token-mean")
    teacher = 2 * 3.0 * token_weight(2, Totals(2, 1), "token-mean")
    assert policy + teacher == pytest.approx(2.0)
    together = (4 * -1.0 + 2 * 3.0) * token_weight(4, Totals(6, 2), "token-mean")
    assert together == pytest.approx(1 / 3)
