"""Ratios of two probabilities of the same choice, per token or per sequence. Knows no loss and no role: what stands
above and below is the caller's business.

Layout: [K] values of tokens that carry loss, sequence after sequence without padding; `sequences` [K] says which
sequence a token is of (any integers)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from real.errors import RealError
from testbed.metrics.ratios import BINS, FARTHEST, LEAST, PER_DECADE

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: beyond it a ratio is a fault, and must not become inf (Miles' clamp)."""


def probability_ratio(log_probs: Tensor, denominator: Tensor) -> Tensor:
    """r = p_current / p_denominator of the same tokens, [K]; gradient through `log_probs` alone."""
    return exp_clamped(log_probs - denominator.detach())


def sequence_ratio(log_probs: Tensor, denominator: Tensor, sequences: Tensor) -> Tensor:
    """GSPO's s = (p_current(y) / p_denominator(y))^(1/|y|) = exp(mean_t log r_t) on each token of y (arXiv 2507.18071).

    [K]. The value is one for the sequence; each token's gradient is s times that of its own log-prob (GSPO-token), so
    a mean over the sequence's tokens has the gradient of s itself."""
    s = exp_clamped(sequence_mean((log_probs - denominator).detach(), sequences))
    return s * (log_probs - log_probs.detach()).exp()


def exp_clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_counts(ratio: Tensor) -> Tensor:
    """How many of the ratios [K] lie in each bin of `testbed.metrics.ratios`, [BINS] float64 from the lowest to the
    highest; counts of several calls, and of several ranks, add up."""
    distance = ratio.detach().double().log()
    above = torch.floor(PER_DECADE * torch.log10(distance.abs() / LEAST)) + 1
    found = distance.sign() * above.clamp(0, FARTHEST)
    return torch.bincount(found.long() + FARTHEST, minlength=BINS).double()


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """On each token the sum over its sequence, [K]."""
    found, index = torch.unique(sequences, return_inverse=True)
    return values.new_zeros(len(found)).index_add(0, index, values)[index]


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """On each token the mean over its sequence, [K]."""
    return sequence_sum(values, sequences) / sequence_sum(torch.ones_like(values), sequences)


def sequence_min(values: Tensor, sequences: Tensor) -> Tensor:
    """On each token the smallest of its sequence, [K]."""
    found, index = torch.unique(sequences, return_inverse=True)
    return values.new_full((len(found),), torch.inf).scatter_reduce(0, index, values, "amin")[index]


class Choices(NamedTuple):
    """Log-probs together with what they are of. For values that come from somewhere else than this trainer, such as a
    teacher's server: a ratio of two different choices is a number without meaning."""

    token_ids: NDArray[np.int64]
    """[K]"""
    contexts: NDArray[np.uint64]
    """[K]: `context_digests` of the tokens before each."""
    log_probs: Tensor
    """[K]"""


def context_digests(token_ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.uint64]:
    """For each token a digest of all tokens before it, [T]; entry 0 is that of nothing."""
    ids = np.ascontiguousarray(token_ids, dtype="<i8")
    running, found = hashlib.blake2b(digest_size=8), np.empty(len(ids), np.uint64)
    for t in range(len(ids)):
        found[t] = int.from_bytes(running.digest(), "little")
        running.update(ids[t].tobytes())
    return found


def ratio_of_choices(current: Choices, denominator: Choices) -> Tensor:
    """`probability_ratio`, [K], of the same tokens in the same contexts. Raises `RealError` where they differ."""
    if len(current.token_ids) != len(denominator.token_ids):
        raise RealError(f"ratio of {len(current.token_ids)} choices to {len(denominator.token_ids)}")
    for what, ours, theirs in (
        ("token", current.token_ids, denominator.token_ids),
        ("context", current.contexts, denominator.contexts),
    ):
        if len(differ := np.flatnonzero(ours != theirs)):
            k = int(differ[0])
            raise RealError(f"ratio of different choices: {what} {k} is {ours[k]} above and {theirs[k]} below")
    return probability_ratio(current.log_probs, denominator.log_probs)
