"""From one loss per token to one number: every aggregation is a weight per token, and the loss is their weighted sum.

The weights need only totals over the whole update (all ranks, all micro-batches), so that how sequences are packed and
placed changes nothing. They count tokens of the loss mask: a token that a correction takes out shrinks the numerator
only. Knows no ranks: the caller sums the totals.

prime-rl divides each component of a loss by its own token count: that is `token-mean` with `Totals` of the component.
"""

from __future__ import annotations

from dataclasses import dataclass

from real.learning.options import Aggregation


@dataclass(frozen=True)
class Totals:
    """Over every sequence of one optimizer update, on all ranks."""

    tokens: int
    """Tokens that carry loss."""
    sequences: int
    """Sequences with at least one such token; a fully masked one leaves the denominator."""
    rollouts: int = 0
    """Rollouts with at least one such token; one rollout may have become several sequences. For `rollout-mean`."""


def token_weight(
    tokens: int,
    totals: Totals,
    aggregation: Aggregation,
    normal_length: int | None = None,
    rollout_tokens: int | None = None,
) -> float:
    """Weight of each loss-carrying token of a sequence with `tokens` of them (verl's words; systems.md 3.5).

    token-mean 1/N; token-sum 1; seq-mean-token-sum 1/S; seq-mean-token-sum-norm 1/(S L), L constant (Dr.GRPO, arXiv
    2503.20783); seq-mean-token-mean 1/(S n_i); rollout-mean 1/(R m_i), m_i tokens in all sequences of its rollout
    (Miles' default). N tokens, S sequences and R rollouts in total. A sequence without tokens weighs 0.
    """
    if tokens == 0:
        return 0.0
    if aggregation == "token-mean":
        return 1 / totals.tokens
    if aggregation == "token-sum":
        return 1.0
    if aggregation == "seq-mean-token-sum":
        return 1 / totals.sequences
    if aggregation == "seq-mean-token-mean":
        return 1 / (totals.sequences * tokens)
    if aggregation == "rollout-mean":
        if rollout_tokens is None:
            raise ValueError(f"{aggregation} needs rollout_tokens")
        return 1 / (totals.rollouts * rollout_tokens)
    if normal_length is None:
        raise ValueError(f"{aggregation} needs normal_length")
    return 1 / (totals.sequences * normal_length)
