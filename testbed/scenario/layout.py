"""Pools and engines that follow from a placement: which GPUs belong together, who may use them, in which phase a pool
starts.

Pure arithmetic over a scenario; both backends and the core derive the same layout from it.
"""

from __future__ import annotations

from msgspec import Struct

from testbed.scenario.scenario import Scenario


class EngineSpec(Struct, frozen=True):
    """One inference server."""

    index: int
    pool: int
    gpus: int
    node: int
    role: str = "both"
    """`prefill`, `decode`, or `both`."""


class PoolSpec(Struct, frozen=True):
    """A set of GPUs. `shared`: it generates and trains in turns; otherwise it always does what `phase` says."""

    index: int
    name: str
    gpus: int
    shared: bool
    phase: str
    """`generate` or `train`: the phase at the start."""
    engines: tuple[int, ...]
    trains: bool


class Layout(Struct, frozen=True):
    pools: tuple[PoolSpec, ...]
    engines: tuple[EngineSpec, ...]
    train_pool: int

    @property
    def num_gpus(self) -> int:
        return sum(p.gpus for p in self.pools)

    @property
    def prefill_engines(self) -> int:
        """The first so many engines only prefill and the others only decode; 0: all do both."""
        return sum(e.role == "prefill" for e in self.engines)

    @property
    def train_gpus(self) -> int:
        return self.pools[self.train_pool].gpus


def layout_of(scenario: Scenario) -> Layout:
    """Derive pools and engines. GPU counts that do not divide are refused by `testbed.scenario.rules`, not here."""
    p = scenario.placement
    per = p.rollout_num_gpus_per_engine
    per_node = scenario.cluster.gpus_per_node
    engines: list[EngineSpec] = []
    pools: list[PoolSpec] = []
    split = p.pd_disaggregation if p.mode == "disaggregated" else None

    def role(engine: int) -> str:
        if split is None:
            return "both"
        return "prefill" if engine < split.prefill_num_gpus // per else "decode"

    def add(name: str, gpus: int, first_gpu: int, serves: bool, trains: bool) -> None:
        index = len(pools)
        mine = tuple(range(len(engines), len(engines) + (gpus // per if serves else 0)))
        engines.extend(
            EngineSpec(index=e, pool=index, gpus=per, node=(first_gpu + i * per) // per_node, role=role(e))
            for i, e in enumerate(mine)
        )
        phase = "generate" if serves else "train"
        pools.append(PoolSpec(index, name, gpus, serves and trains, phase, mine, trains))

    if p.mode == "colocated":
        add("shared", p.num_gpus, 0, True, True)
    elif p.mode == "disaggregated":
        add("rollout", p.rollout_num_gpus, 0, True, False)
        add("trainer", p.actor_num_gpus, p.rollout_num_gpus, False, True)
    else:
        add("rollout", p.rollout_num_gpus, 0, True, False)
        add("flex", p.actor_num_gpus, p.rollout_num_gpus, True, True)
    return Layout(tuple(pools), tuple(engines), next(q.index for q in pools if q.trains))
