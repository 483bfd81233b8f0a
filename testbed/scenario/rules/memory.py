"""Does it fit: weights and KV of an engine, the trainer's state, and both at once on GPUs that take turns.

Activations are not counted: a plan that passes may still run out of memory, a plan that is refused does not fit at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from testbed.scenario.catalogue import CatalogueError, model_spec
from testbed.scenario.errors import Fault
from testbed.scenario.placement import Colocated, Hybrid
from testbed.scenario.rules.context import Context
from testbed.scenario.training import CalibratedTrainer, RateTrainer

GB = 1e9
ENGINE_SIZE = "placement.rollout_num_gpus_per_engine"


def model_known(c: Context) -> Iterator[Fault]:
    """The model is in the catalogue, or its `config.json` can be read."""
    config = c.scenario.model
    try:
        model_spec(config, c.base_dir)
    except CatalogueError as err:
        key = {"preset": "model.name", "config_json": "model.path"}.get(config.type, "model")
        yield Fault(key, err.message, err.nearest)


def weights_fit_engine(c: Context) -> Iterator[Fault]:
    """The weights leave room in the static memory of an engine."""
    memory, e = c.engine_memory(c.engine_gpus), c.scenario.rollout.engine
    if memory is not None and memory.kv_tokens < e.page_size:
        name = c.model.name if c.model is not None else ""
        what = (
            f"{name} in {e.weight_precision} takes {memory.weight_bytes / GB:.1f} GB; "
            f"an engine of {c.engine_gpus} {c.gpu.name} has "
            f"{memory.static_bytes / GB:.1f} GB for weights and KV (mem_fraction_static {e.mem_fraction_static:g})"
        )
        yield Fault(ENGINE_SIZE, what, c.nearest_engine_size())


def sequence_fits(c: Context) -> Iterator[Fault]:
    """One prompt and the longest reply fit the context window and the engine's KV pool."""
    e = c.scenario.rollout.engine
    prompt, reply = c.first_turn_tokens
    need = prompt + reply
    said = f"prompt {prompt} + max_response_length {reply} = {need} tokens"
    if e.context_length is not None and need > e.context_length:
        what = f"{said} are more than the context window of {e.context_length}"
        room = e.context_length - prompt
        near = f"rollout.engine.context_length: {need}"
        yield Fault(
            "workload.max_response_length",
            what,
            near + (f", or workload.max_response_length: {room}" if room > 0 else ""),
        )
    pool = c.kv_tokens(c.engine_gpus)
    if pool is None or pool < e.page_size or need <= pool:
        return
    what = f"{said} are more than the {pool} KV slots of one engine"
    memory = c.engine_memory(c.engine_gpus)
    if e.max_total_num_tokens is not None and memory is not None and memory.kv_tokens >= need:
        yield Fault("rollout.engine.max_total_num_tokens", what, f"rollout.engine.max_total_num_tokens: {need}")
    else:
        yield Fault("workload.max_response_length", what, c.nearest_engine_size())


def trainer_fits(c: Context) -> Iterator[Fault]:
    """Weights, gradients and optimizer states fit the trainer's GPUs (a plain rate has no memory model)."""
    state = c.trainer_state_bytes()
    measured = isinstance(c.scenario.training.cost, (RateTrainer, CalibratedTrainer))
    if state is None or measured or state <= c.gpu.hbm_bytes:
        return
    what = (
        f"the trainer's state takes {state / GB:.1f} GB of each of {c.trainer_gpus} GPUs; "
        f"{c.gpu.name} has {c.gpu.hbm_gb:g} GB"
    )
    sharded = c.trainer_state_bytes(sharding="zero3")
    if sharded is not None and sharded <= c.gpu.hbm_bytes:
        yield Fault("training.sharding", what, "training.sharding: zero3")
        return
    gpus = c.trainer_gpus
    while (c.trainer_state_bytes(gpus) or 0.0) > c.gpu.hbm_bytes and gpus < 1 << 20:
        gpus *= 2
    yield Fault(c.trainer_key, what, f"{c.trainer_key}: {gpus}" if gpus < 1 << 20 else "")


def phases_fit_together(c: Context) -> Iterator[Fault]:
    """Without offload, what an engine reserves and the trainer's state share a GPU's memory."""
    p = c.scenario.placement
    state, memory = c.trainer_state_bytes(), c.engine_memory(c.engine_gpus)
    if not isinstance(p, (Colocated, Hybrid)) or p.switch.offload or state is None or memory is None:
        return
    e = c.scenario.rollout.engine
    reserved = memory.static_bytes
    if e.max_total_num_tokens is not None:
        reserved = min(reserved, memory.weight_bytes + e.max_total_num_tokens * memory.kv_bytes_per_token)
    reserved /= c.engine_gpus
    if reserved + state <= c.gpu.hbm_bytes:
        return
    what = (
        f"without offload both phases stay in memory: {reserved / GB:.1f} GB of an engine "
        f"+ {state / GB:.1f} GB of trainer state per GPU are more than the {c.gpu.hbm_gb:g} GB of {c.gpu.name}"
    )
    near = "placement.switch.offload: true"
    left = int((c.gpu.hbm_bytes - state) / c.gpu.hbm_bytes * 100) / 100
    floor = memory.weight_bytes + sum(c.first_turn_tokens) * memory.kv_bytes_per_token
    if left * c.gpu.hbm_bytes * c.engine_gpus >= floor:
        near += f", or rollout.engine.mem_fraction_static: {left:g}"
    yield Fault("placement.switch.offload", what, near)


def offload_fits_host(c: Context) -> Iterator[Fault]:
    """What a phase leaves behind on its GPUs fits the node's host memory."""
    p = c.scenario.placement
    state, memory = c.trainer_state_bytes(), c.engine_memory(c.engine_gpus)
    if not isinstance(p, (Colocated, Hybrid)) or not p.switch.offload or state is None or memory is None:
        return
    cluster = c.scenario.cluster
    per_gpu = max(state, memory.weight_bytes / c.engine_gpus)
    need = per_gpu * min(cluster.gpus_per_node, c.trainer_gpus)
    if need > cluster.host_memory_gb_per_node * GB:
        what = (
            f"offloading moves up to {per_gpu / GB:.1f} GB of each GPU, {need / GB:.0f} GB of a node, to host "
            f"memory of {cluster.host_memory_gb_per_node:g} GB"
        )
        yield Fault("cluster.host_memory_gb_per_node", what, f"cluster.host_memory_gb_per_node: {need / GB:.0f}")
