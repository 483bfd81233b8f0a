"""From a scenario to what servers, trainer ranks and environments are started with. Decides nothing, starts nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from real.engines.options import ServerOptions
from real.environments.base import RealTask
from real.errors import RealError
from real.learning.distillation import assigned_teacher
from real.learning.options import LIMITS, LossOptions
from real.trainer.options import CriticOptions, SignalOptions, TrainerOptions
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of
from testbed.scenario.precisions import PLAIN, computed_in

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Place(Struct, frozen=True):
    """Where an engine or a trainer rank lives: node, and GPU indices on it."""

    node: int
    gpus: tuple[int, ...]


class Places(Struct, frozen=True):
    """Where everything lives."""

    engines: tuple[Place, ...]
    ranks: tuple[Place, ...]


def device_of(scenario: Scenario) -> str:
    """`cpu` or `cuda`. Raises `RealError` if CUDA is asked for and there is none."""
    wanted = scenario.real.device
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise RealError("real.device: cuda, and this machine has no CUDA device (nearest: real.device: cpu)")
    return "cpu"


def served_dtype(scenario: Scenario) -> str:
    """What the trainer sends and engines load: quantised formats are made from it on the engine."""
    precision = scenario.rollout.engine.weight_precision
    return DTYPES[precision if precision in PLAIN else computed_in(scenario.training.precision)]


def places_of(scenario: Scenario, gpus_per_node: int) -> Places:
    """GPUs are counted through the nodes: the rollout pool first, then the trainer's, as the layout has them.

    `gpus_per_node`: that there are; fewer than the scenario's need `real.oversubscribe`, and are then used in turns.
    """
    layout = layout_of(scenario)
    per_node = scenario.cluster.gpus_per_node
    if gpus_per_node < min(per_node, layout.num_gpus) and not scenario.real.oversubscribe:
        raise RealError(
            f"the placement uses {layout.num_gpus} GPUs on nodes of {per_node}, and this node has {gpus_per_node} "
            f"(nearest: a smaller placement, or real.oversubscribe: true to let roles share GPUs)"
        )
    per_engine = scenario.placement.rollout_num_gpus_per_engine

    def place(first: int, n: int) -> Place:
        return Place(first // per_node, tuple((first + i) % per_node % gpus_per_node for i in range(n)))

    engines, ranks, first = [], [], 0
    for pool in layout.pools:
        engines += [place(first + k * per_engine, per_engine) for k in range(len(pool.engines))]
        if pool.trains:
            ranks = [place(first + r, 1) for r in range(pool.gpus)]
        first += pool.gpus
    return Places(tuple(engines), tuple(ranks))


def server_options(scenario: Scenario, model_path: Path, device: str, place: Place) -> ServerOptions:
    """One engine's server, under SGLang's names."""
    e, real = scenario.rollout.engine, scenario.real
    return ServerOptions(
        model_path=str(model_path),
        device=device,
        dtype=served_dtype(scenario),
        tp_size=scenario.placement.rollout_num_gpus_per_engine,
        max_total_tokens=e.max_total_num_tokens,
        max_running_requests=e.max_running_requests,
        context_length=e.context_length,
        chunked_prefill_size=e.chunked_prefill_size,
        max_prefill_tokens=e.max_prefill_tokens,
        page_size=e.page_size,
        schedule_policy=e.schedule_policy,
        schedule_conservativeness=e.schedule_conservativeness,
        disable_overlap_schedule=e.disable_overlap_schedule,
        disable_radix_cache=e.disable_radix_cache,
        mem_fraction_static=e.mem_fraction_static if device == "cuda" else None,
        kv_cache_dtype="fp8_e4m3" if e.kv_cache_dtype == "fp8" else "auto",
        enable_return_routed_experts=is_moe(model_path),
        enable_memory_saver=device == "cuda" and scenario.placement.mode != "disaggregated",
        random_seed=scenario.run.seed,
        gpus=place.gpus if device == "cuda" else (),
        command=real.engine_command,
        extra_args=real.engine_args,
    )


def is_moe(model_path: Path) -> bool:
    config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
    return bool(config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts"))


def signal_options(scenario: Scenario) -> SignalOptions:
    """What advantages are made of."""
    loss = scenario.real.loss
    return SignalOptions(scenario.algorithm.advantage, loss.gamma, loss.lambd, loss.opd_kl_coef)


def teachers_of(scenario: Scenario, base_dir: Path, model_path: Path) -> dict[str, str]:
    """Name -> model folder of each teacher (`deployment.with_teachers` has made those that are warm-ups); empty if none
    is asked for."""
    given = scenario.real.teachers
    if not scenario.algorithm.needs_teacher and not given:
        return {}
    return {name: str(base_dir / folder) for folder, name in _named(given).items()} or {"0": str(model_path)}


def teaching_of(scenario: Scenario) -> Callable[[RealTask], str]:
    """Task -> name of its teacher: by kind if teachers are assigned to kinds, else in turns."""
    given, names = scenario.real.teachers, _named(scenario.real.teachers)
    if given and isinstance(given, Mapping):
        assignment = {kind: names[folder] for kind, folder in given.items()}
        return lambda task: assigned_teacher(assignment, task.kind, tuple(names.values()))
    turns = [names[folder] for folder in given] or ["0"]
    return lambda task: turns[task.index % len(turns)]


def _named(teachers: Sequence[Any] | Mapping[str, Any]) -> dict[str, str]:
    """Folder -> name: one that teaches twice is loaded once."""
    folders = teachers.values() if isinstance(teachers, Mapping) else teachers
    return {folder: f"{i}" for i, folder in enumerate(dict.fromkeys(folders))}


def trainer_options(scenario: Scenario, base_dir: Path, model_path: Path, device: str) -> TrainerOptions:
    """What every trainer rank is started with."""
    real, o, loss = scenario.real, scenario.real.optimizer, scenario.real.loss
    precision = scenario.training.precision
    return TrainerOptions(
        model_path=str(model_path),
        device="cuda" if device == "cuda" else "cpu",
        dtype=DTYPES[computed_in(precision)],  # type: ignore[arg-type]
        lr=o.lr,
        betas=(o.adam_beta1, o.adam_beta2),
        eps=o.adam_eps,
        weight_decay=o.weight_decay,
        max_grad_norm=o.clip_grad,
        max_tokens_per_gpu=scenario.training.max_tokens_per_gpu,
        temperature=real.temperature,
        critic=CriticOptions(**real.critic.model_dump()) if scenario.algorithm.needs_critic else None,
        teachers=teachers_of(scenario, base_dir, model_path),
        reward_model=None if real.reward_model is None else str(base_dir / real.reward_model),
        use_rollout_routing_replay=real.use_rollout_routing_replay,
        quantised=None if precision in PLAIN else precision,
        engine_tp_size=scenario.placement.rollout_num_gpus_per_engine,
        loss=LossOptions(
            loss_type=loss.loss_type,
            eps_clip=loss.eps_clip,
            eps_clip_high=loss.eps_clip_high,
            eps_clip_c=loss.eps_clip_c,
            limits=LIMITS[loss.mismatch],
            advantage_std=loss.advantage_std,
            aggregation=loss.loss_aggregation,
            normal_length=loss.normal_length,
            denominator=loss.denominator,
            kl_coef=scenario.algorithm.kl_coef,
            kl_type=loss.kl_loss_type,
        ),
        seed=scenario.run.seed,
        timeout_s=real.request_timeout_s,
    )
