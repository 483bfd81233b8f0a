"""Which engine does a turn go to? One router per `routing.type` of the scenario.

Responsible for choosing among open engines. Refuses to know clocks, weights, tokens, what an engine really has in its
cache (it only knows what it sent there and what it was told was dropped) and whether a turn may start at all
(`concurrency`).

| type | rule | cost of one choice |
|---|---|---|
| `random`, `round_robin`, `power_of_two`, `least_load` | `balancing` | a few operations on bit masks |
| `consistent_hashing` | `hashing` | O(log(engines x virtual nodes)) + closed engines passed on the ring |
| `session_affinity`, `cache_aware` | `affinity` | O(blocks of the prompt) |
| `cost` | `cost` | O(log engines + blocks + engines that hold a part of the prefix and could win) |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.policies.routing.affinity import CacheAwareRouter, SessionAffinityRouter
from testbed.policies.routing.balancing import LeastLoadRouter, PowerOfTwoRouter, RandomRouter, RoundRobinRouter
from testbed.policies.routing.base import Router, RouteRequest, UniformSource
from testbed.policies.routing.cost import CostRouter
from testbed.policies.routing.hashing import ConsistentHashingRouter
from testbed.scenario.rollout import Routing

__all__ = ["RouteRequest", "Router", "UniformSource", "router"]

_ROUTERS: dict[str, Callable[[Any, int, UniformSource], Router]] = {
    "random": lambda config, engines, rng: RandomRouter(engines, rng),
    "round_robin": lambda config, engines, rng: RoundRobinRouter(engines),
    "power_of_two": lambda config, engines, rng: PowerOfTwoRouter(engines, rng),
    "least_load": lambda config, engines, rng: LeastLoadRouter(engines),
    "consistent_hashing": lambda config, engines, rng: ConsistentHashingRouter(engines, config.virtual_nodes),
    "session_affinity": lambda config, engines, rng: SessionAffinityRouter(engines),
    "cache_aware": lambda config, engines, rng: CacheAwareRouter(engines, config),
    "cost": lambda config, engines, rng: CostRouter(engines, config),
}


def router(config: Routing, num_engines: int, rng: UniformSource) -> Router:
    """The router that the scenario asks for; engines 0 .. num_engines-1 are open. `rng` is drawn from only by random
    policies.
    """
    return _ROUTERS[config.type](config, num_engines, rng)
