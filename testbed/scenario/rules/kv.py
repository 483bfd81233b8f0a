"""Where KV lives and travels (caches that routing looks for, host memory, prefill and decode engines), and drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from testbed.scenario.errors import Fault
from testbed.scenario.placement import Disaggregated, PdDisaggregation
from testbed.scenario.rollout import PerEngineConcurrency, StaticBatch
from testbed.scenario.routing import FOLLOWS_PREFIXES, Mooncake
from testbed.scenario.rules.context import Context
from testbed.scenario.weights import Waves

GB = 1e9
TIER = "rollout.engine.hierarchical_cache"
PREFILL = "placement.pd_disaggregation.prefill_num_gpus"


def _split(c: Context) -> PdDisaggregation | None:
    p = c.scenario.placement
    return p.pd_disaggregation if isinstance(p, Disaggregated) else None


def routing_has_a_cache(c: Context) -> Iterator[Fault]:
    """Routing by cached prefixes needs a prefix cache."""
    routing = c.scenario.rollout.routing
    if isinstance(routing, FOLLOWS_PREFIXES) and c.scenario.rollout.engine.disable_radix_cache:
        what = f"`{routing.type}` looks for cached prefixes, and rollout.engine.disable_radix_cache turns the cache off"
        yield Fault("rollout.routing.type", what, "rollout.routing: {type: least_load}")


def host_tier_has_a_cache(c: Context) -> Iterator[Fault]:
    """Nothing is kept in host memory of what is not cached."""
    e = c.scenario.rollout.engine
    if e.hierarchical_cache is not None and e.disable_radix_cache:
        what = "host memory keeps what the prefix cache holds, and rollout.engine.disable_radix_cache turns that off"
        yield Fault(TIER, what, f"rollout.engine.disable_radix_cache: false, or {TIER}: null")


def host_tier_is_the_larger(c: Context) -> Iterator[Fault]:
    """Host slots are more than the GPU's, and their bytes fit the node (SGLang refuses the first too)."""
    tier, memory, slots = (
        c.scenario.rollout.engine.hierarchical_cache,
        c.engine_memory(c.engine_gpus),
        c.kv_tokens(c.engine_gpus),
    )
    if tier is None or memory is None or slots is None or slots <= 0:
        return
    own = slots * memory.kv_bytes_per_token / c.engine_gpus / GB
    per_gpu = tier.hicache_ratio * own if tier.hicache_size is None else tier.hicache_size
    cluster = c.scenario.cluster
    here = min(cluster.gpus_per_node, sum(c.serving_pools.values()))
    key = f"{TIER}.hicache_ratio" if tier.hicache_size is None else f"{TIER}.hicache_size"
    if per_gpu <= own:
        least = "2" if tier.hicache_size is None else str(math.ceil(2 * own))
        yield Fault(key, f"{per_gpu:.1f} GB a GPU behind {own:.1f} GB of KV on it keep nothing more", f"{key}: {least}")
    elif per_gpu * here > cluster.host_memory_gb_per_node:
        what = (
            f"{per_gpu:.1f} GB for each of {here} GPUs are more than {cluster.host_memory_gb_per_node:g} GB of a node"
        )
        room = cluster.host_memory_gb_per_node / here
        near = f"{key}: {math.floor(room / own * 10) / 10 if tier.hicache_size is None else math.floor(room)}"
        yield Fault(key, what, near if room > own else f"{TIER}: null")


def prefill_and_decode_both_exist(c: Context) -> Iterator[Fault]:
    """Both sides have whole engines."""
    split, placement = _split(c), c.scenario.placement
    if split is None or not isinstance(placement, Disaggregated) or c.num_engines < 1:
        return
    n, per = split.prefill_num_gpus, c.engine_gpus
    if n % per or n >= placement.rollout_num_gpus:
        what = f"{n} of {placement.rollout_num_gpus} GPUs for prefill leave no whole engines of {per} for both sides"
        nearest = min(max(round(n / per), 1), c.num_engines - 1) * per
        near = f"{PREFILL}: {nearest}" if nearest > 0 else "placement.pd_disaggregation: null"
        yield Fault(PREFILL, what, near)


def split_updates_at_once(c: Context) -> Iterator[Fault]:
    """Waves would leave prefill engines with newer weights than decode engines."""
    if _split(c) is not None and isinstance(c.scenario.weights.participation, Waves):
        what = "waves give prefill and decode engines different weights, and no turn could go from one to the other"
        yield Fault("weights.participation.type", what, "weights.participation: {type: all}")


def split_has_no_limit_per_engine(c: Context) -> Iterator[Fault]:
    """A hand-over is never refused, so a limit per engine would hold for half of them."""
    if _split(c) is not None and isinstance(c.scenario.rollout.concurrency, PerEngineConcurrency | StaticBatch):
        what = "a limit per engine would hold for prefill engines alone: computed prompts are always handed over"
        yield Fault("rollout.concurrency.type", what, "rollout.concurrency: {type: fixed, max_concurrent: 256}")


# --- real engines -----------------------------------------------------------------------------------------------------


def real_engines_do_both(c: Context) -> Iterator[Fault]:
    """Prefill and decode servers are not started yet."""
    if _split(c) is not None:
        what = "real engines prefill and decode; the split is simulated only"
        yield Fault("placement.pd_disaggregation", what, "placement.pd_disaggregation: null")


def real_engines_keep_kv_on_the_gpu(c: Context) -> Iterator[Fault]:
    """SGLang's hierarchical cache is not switched on yet."""
    if c.scenario.rollout.engine.hierarchical_cache is not None:
        yield Fault(TIER, "real engines are started without it; it is simulated only", f"{TIER}: null")


def real_engines_do_not_speculate(c: Context) -> Iterator[Fault]:
    """Drafts are verified by a step over several tokens of each sequence at once. SGLang's attention for CPUs without
    AMX (`torch_native`) has no such step, and the kernels that walk through the drafts are compiled (`sgl_kernel`)."""
    key = "rollout.engine.speculative"
    if c.scenario.rollout.engine.speculative is not None:
        what = (
            "real engines verify no drafts: on a CPU, SGLang's attention (torch_native) cannot, and on a GPU it is not "
            "switched on yet; it is simulated only"
        )
        yield Fault(key, what, f"{key}: null")


def real_engines_fetch_no_kv(c: Context) -> Iterator[Fault]:
    """There is no store that they share."""
    routing = c.scenario.rollout.routing
    if isinstance(routing, Mooncake) and routing.transfer_tokens_per_s is not None:
        key = "rollout.routing.transfer_tokens_per_s"
        yield Fault(key, "real engines fetch no KV from each other; it is simulated only", f"{key}: null")
