"""Do the GPUs add up: pools in the cluster, engines in pools and nodes, heads over ranks, the trainer's split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from testbed.scenario.errors import Fault
from testbed.scenario.rules.context import Context, heads_split, whole_nodes


def gpus_within_cluster(c: Context) -> Iterator[Fault]:
    """The pools together have at most the cluster's GPUs."""
    cluster = c.scenario.cluster
    if c.total_gpus <= cluster.num_gpus:
        return
    parts = " + ".join(str(n) for n in c.pools.values())
    sum_of = f"{parts} = {c.total_gpus}" if len(c.pools) > 1 else parts
    has = f"{cluster.num_gpus} ({cluster.nodes} x {cluster.gpus_per_node})"
    what = f"the placement asks for {sum_of} GPUs, the cluster has {has}"
    smaller = f"num_gpus: {cluster.num_gpus}"
    if len(c.pools) > 1:
        smaller = c.split_of(cluster.num_gpus, next(iter(c.pools.values())) / c.total_gpus)
    near = f"cluster.nodes: {math.ceil(c.total_gpus / cluster.gpus_per_node)}"
    yield Fault(next(iter(c.pools)), what, f"{near}, or placement: {{{smaller}}}" if smaller else near)


def engines_divide_pools(c: Context) -> Iterator[Fault]:
    """A pool that serves is a whole number of engines."""
    for key, gpus in c.serving_pools.items():
        if gpus % c.engine_gpus:
            what = f"{gpus} GPUs are not a whole number of engines of {c.engine_gpus} GPUs"
            yield Fault(key, what, c.nearest_engine_size())


def engines_within_nodes(c: Context) -> Iterator[Fault]:
    """An engine is a divisor of a node, or whole nodes."""
    per_node = c.scenario.cluster.gpus_per_node
    if not whole_nodes(c.engine_gpus, per_node):
        what = (
            f"engines of {c.engine_gpus} GPUs do not fill nodes of {per_node}: some would straddle two nodes by a part"
        )
        yield Fault("placement.rollout_num_gpus_per_engine", what, c.nearest_engine_size())


def engine_splits_heads(c: Context) -> Iterator[Fault]:
    """Tensor parallelism of an engine splits query heads, and KV heads evenly or by copies."""
    if c.model is not None and not heads_split(c.model, c.engine_gpus):
        m, key = c.model, "placement.rollout_num_gpus_per_engine"
        what = f"{m.heads} query heads and {m.kv_heads} KV heads of {m.name} do not split over {c.engine_gpus} GPUs"
        yield Fault(key, what, c.nearest_engine_size())


def trainer_split_divides(c: Context) -> Iterator[Fault]:
    """tensor x pipeline x context parallel divides the trainer's GPUs, heads divide by tensor, layers by pipeline."""
    t, m = c.scenario.training, c.model
    dims = {
        "tensor_parallel": t.tensor_parallel,
        "pipeline_parallel": t.pipeline_parallel,
        "context_parallel": t.context_parallel,
    }
    said = " x ".join(f"{k} {v}" for k, v in dims.items() if v > 1)
    what = ""
    if c.trainer_gpus % c.trainer_split:
        what = f"{said} = {c.trainer_split} does not divide the trainer's {c.trainer_gpus} GPUs"
    elif m is not None and not heads_split(m, t.tensor_parallel):
        over = f"tensor_parallel {t.tensor_parallel}"
        what = f"{m.heads} query heads and {m.kv_heads} KV heads of {m.name} do not split over {over}"
    elif m is not None and t.pipeline_parallel > m.layers:
        what = f"pipeline_parallel {t.pipeline_parallel} is more than the {m.layers} layers of {m.name}"
    if what:
        key = next((f"training.{k}" for k, v in dims.items() if v > 1), "training")
        yield Fault(key, what, _nearest_split(c, dims))


def _nearest_split(c: Context, dims: dict[str, int]) -> str:
    """The largest split with no dimension larger than given that works; fewest changes first."""

    def works(split: tuple[int, ...]) -> bool:
        heads = c.model is None or (heads_split(c.model, split[0]) and split[1] <= c.model.layers)
        return c.trainer_gpus % math.prod(split) == 0 and heads

    given = tuple(dims.values())
    options = [s for s in product(*(range(1, min(d, c.trainer_gpus) + 1) for d in given)) if works(s)]
    best = max(options, key=lambda s: (math.prod(s), sum(a == b for a, b in zip(s, given, strict=True))))
    changed = {k: v for (k, old), v in zip(dims.items(), best, strict=True) if old != v}
    return ", ".join(f"training.{k}: {v}" for k, v in changed.items())


def experts_split(c: Context) -> Iterator[Fault]:
    """Expert parallelism needs experts, divides them, and fits one pipeline stage's GPUs."""
    t, m = c.scenario.training, c.model
    ep = t.expert_parallel
    if ep == 1 or m is None:
        return
    stage = c.trainer_gpus // t.pipeline_parallel
    if not m.is_moe:
        yield Fault("training.expert_parallel", f"{m.name} has no experts to split", "training.expert_parallel: 1")
    elif m.experts % ep or stage % ep:
        undivided = f"{m.experts} experts" if m.experts % ep else f"{stage} GPUs of a pipeline stage"
        what = f"expert_parallel {ep} does not divide the {undivided}"
        best = max(n for n in range(1, ep + 1) if m.experts % n == 0 and stage % n == 0)
        yield Fault("training.expert_parallel", what, f"training.expert_parallel: {best}")


def batch_divides_into_updates(c: Context) -> Iterator[Fault]:
    """Every optimizer update of a batch has the same number of trajectories."""
    a = c.scenario.algorithm
    total, steps = a.trajectories_per_batch, a.num_steps_per_rollout
    if total % steps:
        product_of = f"{a.rollout_batch_size} groups x {a.n_samples_per_prompt} = {total} trajectories"
        what = f"{product_of} do not divide into {steps} updates"
        best = max(n for n in range(1, min(steps, total) + 1) if total % n == 0)
        yield Fault("algorithm.num_steps_per_rollout", what, f"algorithm.num_steps_per_rollout: {best}")


# --- remarks --------------------------------------------------------------------------------------------------------


def unused_gpus(c: Context) -> Iterator[str]:
    idle = c.scenario.cluster.num_gpus - c.total_gpus
    if idle > 0:
        yield f"the placement uses {c.total_gpus} of {c.scenario.cluster.num_gpus} GPUs; {idle} are unused"


def ranks_without_data(c: Context) -> Iterator[str]:
    a = c.scenario.algorithm
    ranks = c.trainer_gpus // c.trainer_split
    update = a.trajectories_per_batch // a.num_steps_per_rollout
    if update < ranks:
        yield f"an optimizer update has {update} trajectories for {ranks} ranks: some get none"
