"""What every rule looks at: the scenario, its folder, the model and GPU that its names stand for. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from testbed.scenario.catalogue import EngineMemory, GpuSpec, ModelSpec, engine_memory, trainer_state_bytes_per_gpu
from testbed.scenario.placement import Disaggregated, Hybrid
from testbed.scenario.rollout import BoundedStaleness, FullyAsync, OneStepAhead, OverSampling, SyncBarrier
from testbed.scenario.scenario import Scenario


@dataclass(frozen=True)
class Context:
    """A scenario whose sections are well-formed; `model` is None if its name is unknown (a fault of its own)."""

    scenario: Scenario
    base_dir: Path
    gpu: GpuSpec
    model: ModelSpec | None

    # --- GPUs --------------------------------------------------------------------------------------------------------

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine."""
        return self.scenario.placement.rollout_num_gpus_per_engine

    @cached_property
    def pools(self) -> dict[str, int]:
        """Key of a pool's size -> its GPUs."""
        p = self.scenario.placement
        if isinstance(p, (Disaggregated, Hybrid)):
            return {"placement.rollout_num_gpus": p.rollout_num_gpus, "placement.actor_num_gpus": p.actor_num_gpus}
        return {"placement.num_gpus": p.num_gpus}

    @cached_property
    def serving_pools(self) -> dict[str, int]:
        """The pools that have engines."""
        disaggregated = isinstance(self.scenario.placement, Disaggregated)
        return {k: n for k, n in self.pools.items() if not (disaggregated and k == "placement.actor_num_gpus")}

    @property
    def total_gpus(self) -> int:
        return sum(self.pools.values())

    @property
    def trainer_gpus(self) -> int:
        return list(self.pools.values())[-1]

    @property
    def trainer_key(self) -> str:
        return list(self.pools)[-1]

    @property
    def num_engines(self) -> int:
        return sum(n // self.engine_gpus for n in self.serving_pools.values())

    @property
    def trainer_split(self) -> int:
        """GPUs of one data-parallel rank."""
        t = self.scenario.training
        return t.tensor_parallel * t.pipeline_parallel * t.context_parallel

    # --- batches and staleness ---------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """B: groups of a batch."""
        return self.scenario.algorithm.rollout_batch_size

    @property
    def synchronous(self) -> bool:
        """No group of the next batch starts before the new weights serve: N_submitted <= (version + 1) B."""
        a = self.scenario.rollout.admission
        return isinstance(a, (SyncBarrier, OverSampling)) or (
            isinstance(a, BoundedStaleness) and a.max_head_offpolicyness == 0
        )

    @property
    def versions_ahead(self) -> int:
        """The staleness bound that the buffer must have room for: a synchronous run never holds more than a batch."""
        return 0 if self.synchronous else self.scenario.experience.staleness.bound or 0

    @property
    def refills(self) -> bool:
        """Admission starts groups whatever is published: some group of the current version is always in flight."""
        return isinstance(self.scenario.rollout.admission, (FullyAsync, OneStepAhead))

    # --- memory ------------------------------------------------------------------------------------------------------

    def engine_memory(self, gpus: int) -> EngineMemory | None:
        """Memory of one engine of `gpus` GPUs; None if the model is unknown."""
        e = self.scenario.rollout.engine
        if self.model is None:
            return None
        return engine_memory(self.model, self.gpu, gpus, e.mem_fraction_static, e.weight_precision, e.kv_cache_dtype)

    def kv_tokens(self, gpus: int) -> int | None:
        """KV slots of one engine of `gpus` GPUs; None if the model is unknown."""
        memory, limit = self.engine_memory(gpus), self.scenario.rollout.engine.max_total_num_tokens
        if memory is None:
            return None
        return memory.kv_tokens if limit is None else min(memory.kv_tokens, limit)

    def trainer_state_bytes(self, gpus: int | None = None, sharding: str | None = None) -> float | None:
        """Weights, gradients and optimizer states on one trainer GPU (a critic on the pool doubles them)."""
        if self.model is None:
            return None
        training = self.scenario.training
        if sharding is not None:
            training = training.model_copy(update={"sharding": sharding})
        per_model = trainer_state_bytes_per_gpu(self.model, training, gpus or self.trainer_gpus)
        critic = self.scenario.algorithm.needs_critic and self.scenario.placement.roles.critic == "trainer"
        return per_model * (2 if critic else 1)

    # --- tokens ------------------------------------------------------------------------------------------------------

    @cached_property
    def first_turn_tokens(self) -> tuple[int, int]:
        """(prompt, longest reply) of a first turn, tokens. Prompt: the longest if bounded, else the mean, else 0."""
        w = self.scenario.workload
        if w.type != "lengths":
            return 0, w.max_response_length
        p = w.prompt
        prompt: float
        match p.type:
            case "fixed":
                prompt = p.tokens
            case "uniform":
                prompt = p.high
            case "quantiles":
                prompt = p.points[-1][1]
            case "trace":
                prompt = 0
            case _:
                prompt = p.mean
        return w.shared_prefix_tokens + int(prompt), w.max_response_length

    # --- what works instead ------------------------------------------------------------------------------------------

    def engine_sizes(self) -> Iterator[int]:
        """GPUs per engine that every rule accepts, the closest to the given number first, larger before smaller."""
        per_node = self.scenario.cluster.gpus_per_node
        fitting = [n for n in range(1, min(self.serving_pools.values()) + 1) if self._engine_fits(n, per_node)]
        yield from sorted(fitting, key=lambda n: (abs(n - self.engine_gpus), -n))

    def _engine_fits(self, n: int, per_node: int) -> bool:
        if any(pool % n for pool in self.serving_pools.values()) or not whole_nodes(n, per_node):
            return False
        if self.model is None:
            return True
        kv = self.kv_tokens(n)
        return heads_split(self.model, n) and kv is not None and kv >= sum(self.first_turn_tokens)

    def nearest_engine_size(self) -> str:
        """`placement.rollout_num_gpus_per_engine: N` that works, or the empty string."""
        size = next(self.engine_sizes(), None)
        return f"placement.rollout_num_gpus_per_engine: {size}" if size is not None else ""

    def split_of(self, total: int, rollout_share: float) -> str:
        """A disaggregated placement of `total` GPUs whose pools divide, closest to the share; empty if none."""
        per = self.engine_gpus
        options = [r for r in range(per, total, per) if (total - r) % self.trainer_split == 0]
        if not options:
            return ""
        rollout = min(options, key=lambda r: (abs(r - rollout_share * total), r))
        return f"rollout_num_gpus: {rollout}, actor_num_gpus: {total - rollout}"


def whole_nodes(gpus: int, per_node: int) -> bool:
    """Whether engines of this size never straddle nodes by a part: they divide a node, or are whole nodes."""
    return per_node % gpus == 0 if gpus <= per_node else gpus % per_node == 0


def heads_split(model: ModelSpec, tensor_parallel: int) -> bool:
    """Whether attention splits: query heads divide; KV heads divide or are copied evenly (MLA has none to split)."""
    if model.heads % tensor_parallel:
        return False
    return model.is_mla or model.kv_heads % tensor_parallel == 0 or tensor_parallel % model.kv_heads == 0
