"""Ratios of the same choices only, and GSPO's ratio of whole sequences."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from real.errors import RealError
from real.learning.ratios import (
    Choices,
    context_digests,
    probability_ratio,
    ratio_counts,
    ratio_of_choices,
    sequence_mean,
    sequence_min,
    sequence_ratio,
    sequence_sum,
)
from testbed.metrics.ratios import BINS, FARTHEST, bin_of
from tests.support.tito import next_prompt

P, U, B, D = [7, 8], 1, 2, 3


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def choices(ids: list[int], *probabilities: float) -> Choices:
    """The response tokens of P + ids."""
    digests = context_digests([*P, *ids])[len(P) :]
    return Choices(np.asarray(ids), digests, log(*probabilities))


def test_lm_11_ratio_of_the_same_token() -> None:
    assert probability_ratio(log(0.6), log(0.5)).item() == pytest.approx(1.2, abs=1e-12)
    assert ratio_of_choices(choices([U], 0.6), choices([U], 0.5)).item() == pytest.approx(1.2, abs=1e-12)


def test_lm_11_other_tokens_and_other_contexts_have_no_ratio() -> None:
    ours = choices([U, B, D], 0.5, 0.2, 0.4)
    assert len(ratio_of_choices(ours, choices([U, B, D], 0.5, 0.1, 0.4))) == 3
    with pytest.raises(RealError, match="different choices: token 2 is 3 above and 2 below"):
        ratio_of_choices(ours, choices([U, B, B], 0.5, 0.2, 0.4))
    # Token d is the same, what stands before it is not.
    elsewhere = Choices(ours.token_ids, choices([U, U, D], 1, 1, 1).contexts, ours.log_probs)
    with pytest.raises(RealError, match="different choices: context 2"):
        ratio_of_choices(ours, elsewhere)
    with pytest.raises(RealError, match="3 choices to 1"):
        ratio_of_choices(ours, choices([U], 0.5))


def test_lm_01_a_choice_is_part_of_the_next_context() -> None:
    def digest(ids: list[int]) -> int:
        data = b"".join(i.to_bytes(8, "little") for i in ids)
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    prompts = [P, next_prompt(P, [U], [])]
    assert prompts[1] == [*P, U]
    recorded = context_digests([*P, U, B])
    assert [int(d) for d in recorded[len(P) :]] == [digest(p) for p in prompts]
    assert recorded[-1] != context_digests([*P, D, B])[-1]


def test_a_ratio_cannot_overflow() -> None:
    assert math.isfinite(probability_ratio(torch.tensor([0.0]), torch.tensor([-500.0])).item())


def test_sums_means_and_minima_stay_within_a_sequence() -> None:
    values, sequences = torch.tensor([1.0, 2.0, 6.0, -4.0]), torch.tensor([5, 5, 5, 2])
    assert sequence_sum(values, sequences).tolist() == [9, 9, 9, -4]
    assert sequence_mean(values, sequences).tolist() == [3, 3, 3, -4]
    assert sequence_min(values, sequences).tolist() == [1, 1, 1, -4]
    empty = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert [len(f(*empty)) for f in (sequence_sum, sequence_mean, sequence_min)] == [0, 0, 0]


def test_a_sequence_ratio_is_the_geometric_mean() -> None:
    """Ratios 2, 1/2, 8 of one sequence: 2; ratio 1.2 of another: 1.2."""
    old = log(0.1, 0.4, 0.05, 0.5)
    current = (old + torch.tensor([2.0, 0.5, 8.0, 1.2], dtype=torch.float64).log()).requires_grad_()
    found = sequence_ratio(current, old, torch.tensor([0, 0, 0, 1]))
    assert found.tolist() == pytest.approx([2, 2, 2, 1.2])
    # The mean over the tokens of each sequence has the gradient of exp(mean log ratio), written out.
    (found[:3].mean() + found[3]).backward()
    again = current.detach().clone().requires_grad_()
    ((again[:3] - old[:3]).mean().exp() + (again[3] - old[3]).exp()).backward()
    assert current.grad is not None and again.grad is not None
    assert current.grad.tolist() == pytest.approx(again.grad.tolist())


def test_rp_11_a_histogram_of_known_ratios() -> None:
    """The bins of `tests/metrics/test_ratios.py`, worked out by hand there."""
    counts = ratio_counts(torch.tensor([1.0, 1.2, 0.5, 1.00005, 2.0, 0.5, 1e-9], dtype=torch.float64))
    found = {i - FARTHEST: int(n) for i, n in enumerate(counts) if n}
    assert found == {-FARTHEST: 1, -31: 2, 0: 2, 27: 1, 31: 1}
    assert len(counts) == BINS and counts.sum() == 7
    assert ratio_counts(torch.zeros(0)).sum() == 0


def test_rp_11_counts_of_parts_are_the_counts_of_the_whole_and_bins_are_those_of_one_ratio() -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = torch.randn(4000, dtype=torch.float64, generator=generator).mul(0.3).exp()
    whole = ratio_counts(ratios)
    assert torch.equal(whole, ratio_counts(ratios[:1500]) + ratio_counts(ratios[1500:]))
    by_hand = Counter(bin_of(r) for r in ratios.tolist())
    assert {i - FARTHEST: int(n) for i, n in enumerate(whole) if n} == by_hand
