"""What the real backend cannot do, or cannot do yet: asked for real runs only, each fault with what works instead."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.scenario.errors import Fault
from testbed.scenario.precisions import PLAIN, computed_in
from testbed.scenario.rules.context import Context

CROSSES_ROWS = ("fp8", "nvfp4")
"""Formats in which a value's rounding depends on other rows of its matrix."""


def denominator_is_computed(c: Context) -> Iterator[Fault]:
    """A ratio over recomputed log-probabilities needs them."""
    loss = c.scenario.real.loss
    if loss.denominator != "generation" and not c.scenario.algorithm.recompute_old_log_probs:
        what = f"`{loss.denominator}` needs log-probabilities that nothing recomputes"
        near = "algorithm.recompute_old_log_probs: true, or real.loss.denominator: generation"
        yield Fault("real.loss.denominator", what, near)


def normal_length_is_read(c: Context) -> Iterator[Fault]:
    """One aggregation divides by a constant, and no other has one."""
    loss = c.scenario.real.loss
    normalised = loss.loss_aggregation == "seq-mean-token-sum-norm"
    if normalised and loss.normal_length is None:
        what = f"`{loss.loss_aggregation}` divides by a constant length, and none is given"
        near = f"real.loss.normal_length: {c.scenario.workload.max_response_length}, the cap of one turn"
        yield Fault("real.loss.normal_length", what, near, see="real.loss.loss_aggregation")
    if not normalised and loss.normal_length is not None:
        what = f"`{loss.loss_aggregation}` divides by no constant length"
        near = "real.loss.loss_aggregation: seq-mean-token-sum-norm, or real.loss.normal_length: null"
        yield Fault("real.loss.normal_length", what, near)


def reward_model_is_asked(c: Context) -> Iterator[Fault]:
    """Distillation alone reads no reward."""
    advantage = c.scenario.algorithm.advantage
    if c.scenario.real.reward_model is not None and "reward" not in c.scenario.algorithm.signals:
        what = f"advantage `{advantage}` reads no reward, so nothing asks a reward model"
        near = "algorithm.advantage: group_with_distillation, or real.reward_model: null"
        yield Fault("real.reward_model", what, near)


def correction_exists(c: Context) -> Iterator[Fault]:
    """Truncating a weight needs a loss that has one."""
    loss = c.scenario.real.loss
    if loss.mismatch in ("tis", "seq_mask_tis") and loss.denominator != "decoupled":
        what = f"`{loss.mismatch}` truncates a correction weight, and denominator `{loss.denominator}` has none"
        near = "real.loss.denominator: decoupled with algorithm.recompute_old_log_probs: true"
        yield Fault("real.loss.mismatch", what, f"{near}, or real.loss.mismatch: icepop")


def eval_has_tasks(c: Context) -> Iterator[Fault]:
    """Only tasks with a verifier can be scored."""
    if c.scenario.real.eval_tasks is not None and getattr(c.scenario.workload, "environment", None) is None:
        what = "held-out tasks need text and a verifier, and the workload has neither"
        yield Fault("real.eval_tasks", what, "workload.environment: {type: arithmetic}, or real.eval_tasks: null")


def replay_has_experts(c: Context) -> Iterator[Fault]:
    """Only a mixture of experts has routing to replay."""
    if c.scenario.real.use_rollout_routing_replay and c.model is not None and not c.model.experts:
        what = f"{c.model.name} has no experts, so there is no routing to replay"
        yield Fault("real.use_rollout_routing_replay", what, "real.use_rollout_routing_replay: false")


def format_is_made_on_engines(c: Context) -> Iterator[Fault]:
    """Real trainers keep and send plain weights; each engine makes the format on its own copy."""
    engine = c.scenario.rollout.engine.weight_precision
    if engine not in PLAIN and c.scenario.weights.requantize == "none":
        what = (
            f"real trainers send {computed_in(c.scenario.training.precision)} weights, and the engines serve {engine}"
        )
        yield Fault("weights.requantize", what, f"weights.requantize: {engine}", see="rollout.engine.weight_precision")


def heads_round_alike(c: Context) -> Iterator[Fault]:
    """KV heads that several engine ranks hold are rounded with each rank's own queries, where blocks cross rows: a
    training forward on the engines' values has then no one value to take."""
    precision, per_engine = c.scenario.training.precision, c.scenario.placement.rollout_num_gpus_per_engine
    if c.model is None or precision not in CROSSES_ROWS or per_engine <= c.model.kv_heads:
        return
    key = "placement.rollout_num_gpus_per_engine"
    what = f"engines of {per_engine} ranks hold the {c.model.kv_heads} KV heads of {c.model.name} several times"
    what += f", and each rounds them to {precision} with other queries: training cannot follow all of them"
    yield Fault(key, what, f"{key}: {c.model.kv_heads}, or training.precision: bf16")


def one_trainer_split(c: Context) -> Iterator[Fault]:
    """Real trainers shard parameters over all ranks (FSDP2) and split nothing else."""
    t = c.scenario.training
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(t, name) > 1:
            what = f"real trainers shard parameters only (FSDP2), {name} is {getattr(t, name)}"
            yield Fault(f"training.{name}", what, f"training.{name}: 1")
