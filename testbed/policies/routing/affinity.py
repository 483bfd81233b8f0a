"""Routers that follow the cache unless load forbids it: session_affinity and SGLang's cache_aware.

They refuse to weigh time against time; that is `cost`.
"""

from __future__ import annotations

from testbed.policies.routing.base import LoadTracking, RouteRequest
from testbed.policies.routing.loads import lowest_bit
from testbed.policies.routing.prefixes import PrefixTracking
from testbed.scenario.routing import CacheAware


class SessionAffinityRouter(LoadTracking):
    """The engine of the previous turn if there is one and it is open, else the least loaded (the router of Miles and
    slime).
    """

    why = "least_load"

    def choose(self, request: RouteRequest) -> int | None:
        if request.home >= 0 and self.loads.is_open(request.home):
            self.why = "home"
            return request.home
        self.why = "least_load"
        return self.loads.least()


class CacheAwareRouter(PrefixTracking):
    """SGLang's `cache_aware` (`sgl-model-gateway/src/policies/cache_aware.rs`), over the open engines:

    1. if max - min > balance_abs_threshold and max > balance_rel_threshold x min (turns): the shortest queue;
    2. else, if matched tokens / prompt tokens > cache_threshold: the engine with the longest match; of several, the
       one that held it first (SGLang remembers one engine per tree node), or the lowest index if that one is closed
       or has lost it;
    3. else the least loaded.

    All three put the prompt into the chosen engine's tree. Differences from SGLang: it matches characters, ours
    blocks of tokens; it trims trees every 120 s, ours at once; loads of engines that do not accept requests count in
    its imbalance test, not in ours; and when the best match is on such an engine, it takes the first engine that does
    accept, where ours takes the best match among those.
    """

    why = "least_load"

    def __init__(self, num_engines: int, config: CacheAware) -> None:
        super().__init__(num_engines, config.max_tree_size, config.told_of_flushes)
        self._abs = config.balance_abs_threshold
        self._rel = config.balance_rel_threshold
        self._threshold = config.cache_threshold

    def choose(self, request: RouteRequest) -> int | None:
        loads = self.loads
        if not loads.open_mask:
            return None
        most, fewest = loads.most(), loads.fewest()
        if most - fewest > self._abs and most > self._rel * fewest:
            self.why = "shortest_queue"
            return loads.least()
        found = self.tree.matches(request, loads.open_mask)
        if found:
            tokens, mask, first = found[-1]
            if tokens and tokens / request.prompt_tokens > self._threshold:
                self.why = "prefix_match"
                return first if first >= 0 and mask >> first & 1 else lowest_bit(mask)
        self.why = "least_load"
        return loads.least()

    def started(self, engine: int, request: RouteRequest) -> None:
        self.loads.started(engine)
        self.tree.insert(engine, request)
