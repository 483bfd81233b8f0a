"""What the real backend cannot do, or cannot do yet: asked for real runs only, each fault with what works instead."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.scenario.errors import Fault
from testbed.scenario.rules.context import Context

SIGNALS = ("reward", "old_log_probs", "reference")
"""Signals that real services and trainers compute."""

SERVED = ("bf16", "fp16", "fp32", "fp8", "int8")
"""Weights of a real engine: a plain type, or quantised and dequantised on the engine's own copy."""


def signals_can_be_computed(c: Context) -> Iterator[Fault]:
    """Critics and teachers are simulated; no real role computes them."""
    a = c.scenario.algorithm
    missing = [s for s in a.signals if s not in SIGNALS]
    if missing:
        what = f"no real role computes {' and '.join(missing)}; real runs have {', '.join(SIGNALS)}"
        yield Fault("algorithm.advantage", what, "algorithm.advantage: group")


def denominator_is_computed(c: Context) -> Iterator[Fault]:
    """A ratio over recomputed log-probabilities needs them."""
    loss = c.scenario.real.loss
    if loss.denominator != "generation" and not c.scenario.algorithm.recompute_old_log_probs:
        what = f"`{loss.denominator}` needs log-probabilities that nothing recomputes"
        near = "algorithm.recompute_old_log_probs: true, or real.loss.denominator: generation"
        yield Fault("real.loss.denominator", what, near)


def precision_is_served(c: Context) -> Iterator[Fault]:
    """Formats that an engine can hold."""
    precision = c.scenario.rollout.engine.weight_precision
    if precision not in SERVED:
        what = f"real engines serve {', '.join(SERVED)}, not {precision}"
        yield Fault("rollout.engine.weight_precision", what, "rollout.engine.weight_precision: bf16")


def one_trainer_split(c: Context) -> Iterator[Fault]:
    """Real trainers shard parameters over all ranks (FSDP2) and split nothing else."""
    t = c.scenario.training
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(t, name) > 1:
            what = f"real trainers shard parameters only (FSDP2), {name} is {getattr(t, name)}"
            yield Fault(f"training.{name}", what, f"training.{name}: 1")
