"""What a quantisation costs and how well the two sides agree: always both, since one is bought with the other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from real.learning.kl import kl_estimate
from real.learning.quantisation.pairs import Pair, pair_of
from real.learning.quantisation.rules import QUANTIZED, RULES


@dataclass(frozen=True)
class Cost:
    tensors: int
    """Parameters that the rule touches."""
    bytes: int
    """Of the engine's weights as the format would store them, all parameters."""
    plain_bytes: int
    """The same in the parameters' own type."""
    seconds: float
    """Of quantising once, here: what each weight update pays again."""


@dataclass(frozen=True)
class Agreement:
    """Same tokens, same version of the weights, two computations: the engine gap, nothing of an update."""

    tokens: int
    k3: float
    """Mean estimate of KL(engine || trainer), never negative."""
    mean_abs: float
    """Mean |log p_engine - log p_trainer|."""
    equal: float
    """Share of tokens whose two log-probs are the same number."""


@dataclass(frozen=True)
class Comparison:
    pair: Pair
    cost: Cost
    agreement: Agreement


def cost(parameters: Iterable[tuple[str, Tensor]], precision: str) -> Cost:
    """Of an engine's parameters (SGLang's names) in `precision`; one without a rule is plain and costs no seconds."""
    rule = RULES.get(precision)
    tensors, stored, plain, seconds = 0, 0, 0, 0.0
    with torch.no_grad():
        for name, weight in parameters:
            size = weight.numel() * weight.element_size()
            plain += size
            if rule is None or not name.endswith(QUANTIZED):
                stored += size
                continue
            started = time.perf_counter()
            rule.apply(weight)
            if weight.device.type == "cuda":
                torch.cuda.synchronize(weight.device)
            seconds += time.perf_counter() - started
            stored += rule.bytes_of(name, weight)
            tensors += 1
    return Cost(tensors, stored, plain, seconds)


def agreement(generation: Tensor, training: Tensor) -> Agreement:
    """From log-probs [K] of the same sampled tokens: as the engine said, and recomputed by the training forward with
    the same weights. Raises ValueError for none or unequally many."""
    if generation.shape != training.shape or not generation.numel():
        raise ValueError(f"log-probs of the same tokens are needed: {list(generation.shape)}, {list(training.shape)}")
    engine, trainer = generation.double(), training.double()
    return Agreement(
        tokens=generation.numel(),
        k3=float(kl_estimate(engine, trainer).mean()),
        mean_abs=float((engine - trainer).abs().mean()),
        equal=float((generation == training).double().mean()),
    )


def compare(
    rollout: str, training: str, parameters: Iterable[tuple[str, Tensor]], generation: Tensor, recomputed: Tensor
) -> Comparison:
    """Cost of engine weights in `rollout` and agreement with a training forward in `training`. Raises `RealError` for
    a pair that is not allowed."""
    return Comparison(pair_of(rollout, training), cost(parameters, rollout), agreement(generation, recomputed))
