"""Estimates of KL(p || q) from the log-probs of tokens drawn from p (J. Schulman, "Approximating KL divergence", 2020).
Knows two log-probs per token, not which models they come from."""

from __future__ import annotations

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
