"""Which engine does a turn go to? One router per `routing.type` of the scenario.

Responsible for choosing among open engines. Refuses to know clocks, weights, tokens, what an engine really has in its
cache and whether a turn may start at all (`concurrency`).

| type | rule | cost of one choice |
|---|---|---|
| `random`, `round_robin`, `power_of_two`, `least_load` | `balancing` | O(1), the least loaded looked up in a list; prompts: O(log engines) |
| `consistent_hashing`, `bounded_consistent_hashing`, `prefix_hash` | `hashing` | O(log(engines x virtual nodes)) + places passed on the ring |
| `session_affinity` | `affinity` | O(1) |
| `cache_aware` | `affinity` | O(blocks of the prompt) |
| `cost` | `cost` | O(log engines + blocks + engines that hold more of the prefix than the idlest one does) |
| `dynamo_kv` | `dynamo` | as `cost`; with a temperature O(engines) |
| `mooncake` | `mooncake` | as `cost`; O(engines) where the idlest holds a part and fetching elsewhere takes less |
| `preble` | `preble` | as `cost`; turns that leave the window, each once |

What a router knows, and how old that is:

| of | known to | from when on | until |
|---|---|---|---|
| turns in engines, open engines, lost engines | all | the moment it happens | the moment it ends |
| uncached prompt tokens in an engine | `cost`, `dynamo_kv`, `mooncake` | the moment of sending | the turn's end (not the prompt's, which nobody reports) |
| cached prefixes | `cache_aware`, `cost`, `dynamo_kv`, `mooncake`, `preble` | the moment of sending, so before they are computed | own bound on the engine's cache (evictions are not reported); flushes if `told_of_flushes` |
| engine of the previous turn | `session_affinity` | its end | the trajectory's end, flushes or not |
| load of the last minutes | `preble` | the moment of sending | `window_s` |
"""  # noqa: E501  (tables)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.policies.routing.affinity import CacheAwareRouter, SessionAffinityRouter
from testbed.policies.routing.balancing import (
    LeastLoadRouter,
    LeastTokensRouter,
    PowerOfTwoRouter,
    RandomRouter,
    RoundRobinRouter,
)
from testbed.policies.routing.base import Fetch, Router, RouteRequest, UniformSource
from testbed.policies.routing.cost import CostRouter
from testbed.policies.routing.dynamo import DynamoKvRouter
from testbed.policies.routing.hashing import BoundedConsistentHashingRouter, ConsistentHashingRouter, PrefixHashRouter
from testbed.policies.routing.mooncake import MooncakeRouter
from testbed.policies.routing.preble import PrebleRouter
from testbed.scenario.routing import Routing

__all__ = ["Fetch", "RouteRequest", "Router", "UniformSource", "router"]

_LEAST: dict[str, Callable[[int], Router]] = {"requests": LeastLoadRouter, "prompt_tokens": LeastTokensRouter}

_ROUTERS: dict[str, Callable[[Any, int, UniformSource], Router]] = {
    "random": lambda config, engines, rng: RandomRouter(engines, rng),
    "round_robin": lambda config, engines, rng: RoundRobinRouter(engines),
    "power_of_two": lambda config, engines, rng: PowerOfTwoRouter(engines, rng),
    "least_load": lambda config, engines, rng: _LEAST[config.load](engines),
    "consistent_hashing": lambda config, engines, rng: ConsistentHashingRouter(engines, config.virtual_nodes),
    "bounded_consistent_hashing": lambda config, engines, rng: BoundedConsistentHashingRouter(engines, config),
    "prefix_hash": lambda config, engines, rng: PrefixHashRouter(engines, config),
    "session_affinity": lambda config, engines, rng: SessionAffinityRouter(engines),
    "cache_aware": lambda config, engines, rng: CacheAwareRouter(engines, config),
    "cost": lambda config, engines, rng: CostRouter(engines, config),
    "dynamo_kv": lambda config, engines, rng: DynamoKvRouter(engines, config, rng),
    "mooncake": lambda config, engines, rng: MooncakeRouter(engines, config),
    "preble": lambda config, engines, rng: PrebleRouter(engines, config),
}


def router(config: Routing, num_engines: int, rng: UniformSource) -> Router:
    """The router that the scenario asks for; engines 0 .. num_engines-1 are open. `rng` is drawn from only by random
    policies.
    """
    return _ROUTERS[config.type](config, num_engines, rng)
