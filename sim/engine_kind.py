"""The engine that a scenario describes, as options of the engine model: SGLang's arguments, and what follows from model
and GPU (KV slots, host memory, how fast KV comes back from it). It refuses to know step times.
"""

from __future__ import annotations

from sim.engine_options import EngineModelOptions
from sim.fabric import link_bytes_per_s
from testbed.scenario import Scenario
from testbed.scenario.catalogue import GpuSpec, ModelSpec, engine_memory_of, host_kv_tokens, kv_pool_tokens


def engine_options(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> EngineModelOptions:
    """Raises `CatalogueError` if the weights leave no room for KV."""
    e, placement = scenario.rollout.engine, scenario.placement
    gpus = placement.rollout_num_gpus_per_engine
    split = placement.mode == "disaggregated" and placement.pd_disaggregation is not None
    pcie = link_bytes_per_s(scenario.cluster, gpu, "pcie") * gpus
    return EngineModelOptions(
        max_total_num_tokens=kv_pool_tokens(scenario, model, gpu),
        max_running_requests=e.max_running_requests,
        chunked_prefill_size=e.chunked_prefill_size,
        max_prefill_tokens=e.max_prefill_tokens,
        page_size=e.page_size,
        schedule_policy=e.schedule_policy,
        schedule_conservativeness=e.schedule_conservativeness,
        context_length=e.context_length or 2**31,
        disable_overlap_schedule=e.disable_overlap_schedule,
        disable_radix_cache=e.disable_radix_cache,
        host_tokens=host_kv_tokens(scenario, model, gpu),
        load_back_tokens_per_s=pcie / engine_memory_of(scenario, model, gpu).kv_bytes_per_token,
        takes_in=split or scenario.rollout.routing.type == "mooncake",
        forward="host" if scenario.cluster.gpu == "CPU" else "device",
    )
