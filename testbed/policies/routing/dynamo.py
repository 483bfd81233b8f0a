"""Dynamo's KV router: prefill still to do and KV in use, both in blocks.

Refuses to know seconds: a block of prefill and a block of decode weigh the same, times `prefill_load_scale`.
"""

from __future__ import annotations

from math import exp

from testbed.policies.routing.active_blocks import ActiveBlocks, ActiveNode
from testbed.policies.routing.base import RouteRequest, UniformSource
from testbed.policies.routing.loads import bits, deeper, level_of
from testbed.policies.routing.order import Entry, Outstanding
from testbed.policies.routing.prefixes import OrderedPrefixTracking
from testbed.scenario.routing import DynamoKv


class DynamoKvRouter(OrderedPrefixTracking):
    """argmin over open engines of prefill_load_scale x prefill + decode (`lib/kv-router/src/scheduling/selector` of
    ai-dynamo/dynamo), where, with blocks of kv_cache_block_size tokens,

    - prefill = (active prefill tokens + prompt - overlap_score_credit x cached) / block;
    - active prefill tokens: uncached prompt tokens of the turns in the engine;
    - decode: blocks in use by those turns and this one, a shared one counted once.

    With a temperature T > 0 an engine is drawn with weight exp(-c' / T), c' the cost scaled to [0, 1] over the engines.
    Differences: it hears of the first token and takes a prompt's tokens off then, here they count until the turn ends
    (the core has no such event, but for prefill engines, whose turns end there); of stored and evicted blocks it hears
    by KV events, here the account is of what was sent, within `router_max_tree_size`; equal costs are drawn among there
    and go to the engine with fewer turns, then to the lowest index here.
    """

    why = "dynamo_kv"

    def __init__(self, num_engines: int, config: DynamoKv, rng: UniformSource) -> None:
        size = config.kv_cache_block_size
        super().__init__(num_engines, config.router_max_tree_size * size, config.told_of_flushes)
        self._size = size
        self._credit = config.overlap_score_credit
        self._scale = config.prefill_load_scale
        self._temperature = config.router_temperature
        self._rng = rng
        self._prefill = [0] * num_engines
        self._active = ActiveBlocks(num_engines, size)
        self._sent: Outstanding[tuple[int, ActiveNode]] = Outstanding(num_engines)

    def choose(self, request: RouteRequest) -> int | None:
        """Costs are compared in tokens (blocks x block size): whole numbers at the default weights."""
        mask = self.loads.open_mask
        idlest = self._order.least(mask)
        if idlest is None:
            return None
        cached = [(tokens, engines) for tokens, engines, _ in self.tree.matches(request, mask)]
        shared = self._active.shared(request, mask)
        whole = self._scale * request.prompt_tokens + self._size * self._active.blocks_of(request)

        def entry(engine: int) -> Entry:
            key, turns, _ = self._order.entry(engine)
            saved = self._scale * self._credit * level_of(cached, engine) + self._size * level_of(shared, engine)
            return (key + (whole - saved), turns, engine)

        if self._temperature > 0:
            return self._drawn([entry(engine) for engine in bits(mask)])
        # Let m be the engine with the smallest (key, turns, index). Who has no more of the prompt than m, cached and in
        # use, saves no more and costs at least as much as m, which precedes it if they tie.
        m = idlest[2]
        return min([entry(m), *(entry(engine) for engine in bits(deeper(cached, m) | deeper(shared, m)))])[2]

    def _drawn(self, entries: list[Entry]) -> int:
        costs = [cost for cost, _, _ in entries]
        low, spread = min(costs), max(costs) - min(costs)
        weights = [exp(-(cost - low) / (spread * self._temperature)) if spread else 1.0 for cost in costs]
        at = self._rng.random() * sum(weights)
        for weight, (_, _, engine) in zip(weights, entries, strict=True):
            at -= weight
            if at < 0:
                return engine
        return entries[-1][2]

    def started(self, engine: int, request: RouteRequest) -> None:
        self.loads.started(engine)
        uncached = request.prompt_tokens - self.tree.insert(engine, request)
        self._sent.add(engine, request.trajectory, (uncached, self._active.add(engine, request)))
        self._prefill[engine] += uncached
        self._changed(engine)

    def finished(self, engine: int, trajectory: int = -1) -> None:
        super().finished(engine)
        uncached, node = self._sent.pop(engine, trajectory)
        self._prefill[engine] -= uncached
        self._active.remove(engine, node)
        self._changed(engine)

    def _changed(self, engine: int) -> None:
        key = self._scale * self._prefill[engine] + self._size * self._active.count[engine]
        self._order.put(engine, key, self.loads.turns[engine])
