"""Reading the probabilities of recorded tokens, with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from real.learning.log_probs import chosen_log_probs, token_log_probs

U, B, D, P = range(4)
# Next-token distributions after P, P+u, P+u+b; the row after d scores nothing.
CONDITIONALS = torch.tensor(
    [[0.5, 0.1, 0.1, 0.3], [0.3, 0.2, 0.4, 0.1], [0.1, 0.3, 0.4, 0.2], [0.25, 0.25, 0.25, 0.25]]
)
RECORD = torch.tensor([P, U, B, D])


def test_lm_05_logits_before_a_token_score_it() -> None:
    found = token_log_probs(CONDITIONALS.log(), RECORD).exp()
    assert found.tolist() == pytest.approx([0.5, 0.2, 0.4], abs=1e-6)


def test_an_offset_of_the_logits_changes_nothing() -> None:
    shifted = CONDITIONALS.log() + torch.tensor([[1.0], [-7.0], [100.0], [0.0]])
    assert token_log_probs(shifted, RECORD).exp().tolist() == pytest.approx([0.5, 0.2, 0.4], abs=1e-5)


def test_temperature_divides_the_logits() -> None:
    # At T = 2 the weights 0.5, 0.1, 0.1, 0.3 become their square roots.
    roots = [p**0.5 for p in (0.5, 0.1, 0.1, 0.3)]
    found = chosen_log_probs(CONDITIONALS[:1].log(), torch.tensor([U]), temperature=2.0).exp()
    assert found.item() == pytest.approx(roots[0] / sum(roots), abs=1e-6)


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.tensor([[10.0, 9.0, 8.0, 7.0]], dtype=torch.bfloat16)  # all exact in bfloat16
    expected = 10.0 - torch.logsumexp(torch.tensor([10.0, 9.0, 8.0, 7.0], dtype=torch.float64), 0).item()
    found = chosen_log_probs(logits, torch.tensor([0]))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_lm_04_the_record_is_read_not_drawn() -> None:
    before, record = torch.get_rng_state(), RECORD.clone()
    token_log_probs(CONDITIONALS.log(), record)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(record, RECORD)
