"""KL(p || q), estimated from the log-probs of tokens drawn from p (J. Schulman, "Approximating KL divergence", 2020) or
over whole next-token distributions. Knows two models' numbers, not which models they come from."""

from __future__ import annotations

import torch
from torch import Tensor

from real.learning.options import KlType


def kl_estimate(log_p: Tensor, log_q: Tensor, kl_type: KlType = "k3") -> Tensor:
    """[K] per token, d = log_p - log_q: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d.

    k1 and k3 are unbiased; k2 and k3 are never negative. As a loss term, log_p is the current policy and log_q the
    reference (k3 is then GRPO's). As a measure of a mismatch, log_p is the policy that sampled."""
    d = log_p - log_q
    if kl_type == "k1":
        return d
    return d * d / 2 if kl_type == "k2" else (-d).expm1() + d


def kl_divergence(logits_p: Tensor, logits_q: Tensor, temperature: float = 1.0) -> Tensor:
    """sum_v p(v) log(p(v) / q(v)) at each position; logits [K, V] of the same contexts, finite. Returns [K], >= 0 up to
    rounding, 0 iff the distributions are equal. Float64 stays, anything less is normalised in float32."""
    dtype = torch.promote_types(logits_p.dtype, torch.float32)
    log_p = torch.log_softmax(logits_p.to(dtype) / temperature, -1)
    log_q = torch.log_softmax(logits_q.to(dtype) / temperature, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
