"""What the real backend cannot do, or cannot do yet: asked for real runs only, each fault with what works instead."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.scenario.errors import Fault
from testbed.scenario.rules.context import Context

SERVED = ("bf16", "fp16", "fp32", "fp8", "int8")
"""Weights of a real engine: a plain type, or quantised and dequantised on the engine's own copy."""


def denominator_is_computed(c: Context) -> Iterator[Fault]:
    """A ratio over recomputed log-probabilities needs them."""
    loss = c.scenario.real.loss
    if loss.denominator != "generation" and not c.scenario.algorithm.recompute_old_log_probs:
        what = f"`{loss.denominator}` needs log-probabilities that nothing recomputes"
        near = "algorithm.recompute_old_log_probs: true, or real.loss.denominator: generation"
        yield Fault("real.loss.denominator", what, near)


def correction_exists(c: Context) -> Iterator[Fault]:
    """Truncating a weight needs a loss that has one."""
    loss = c.scenario.real.loss
    if loss.mismatch in ("tis", "seq_mask_tis") and loss.denominator != "decoupled":
        what = f"`{loss.mismatch}` truncates a correction weight, and denominator `{loss.denominator}` has none"
        near = "real.loss.denominator: decoupled with algorithm.recompute_old_log_probs: true"
        yield Fault("real.loss.mismatch", what, f"{near}, or real.loss.mismatch: icepop")


def replay_has_experts(c: Context) -> Iterator[Fault]:
    """Only a mixture of experts has routing to replay."""
    if c.scenario.real.use_rollout_routing_replay and c.model is not None and not c.model.experts:
        what = f"{c.model.name} has no experts, so there is no routing to replay"
        yield Fault("real.use_rollout_routing_replay", what, "real.use_rollout_routing_replay: false")


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
