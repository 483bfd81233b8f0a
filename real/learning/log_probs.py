"""The log-probability of recorded tokens: the learner reads a fixed record, it never samples. Knows no model and no
record, only logits and ids."""

from __future__ import annotations

import torch
from torch import Tensor


def chosen_log_probs(logits: Tensor, chosen: Tensor, temperature: float = 1.0) -> Tensor:
    """log p of `chosen` [K] under `logits` [K, V], row for row: log_softmax(logits / temperature) in float32.

    An engine that samples at temperature T draws from softmax(logits / T), so the same T belongs here. Returns [K]
    float32."""
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    return log_p.gather(-1, chosen.long().unsqueeze(-1)).squeeze(-1)


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(token t | tokens before t) for t = 1 .. T-1 of one sequence; logits [T, V], token_ids [T].

    A causal model's logits at position t - 1 score token t; token 0 has no context and no entry. Returns [T - 1]."""
    return chosen_log_probs(logits[:-1], token_ids[1:], temperature)
