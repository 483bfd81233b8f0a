"""Weights per token, by hand."""

from __future__ import annotations

import pytest

from real.learning.aggregate import Totals, token_weight
from real.learning.options import Aggregation

pytestmark = pytest.mark.backend("CORE")

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
