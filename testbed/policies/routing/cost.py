"""Routing by estimated time: wait for the turns already there, plus prefill of what is not cached.

Refuses to know how long a turn really takes: it has the two constants of the scenario and its own account of what it
sent.
"""

from __future__ import annotations

from testbed.policies.routing.base import RouteRequest
from testbed.policies.routing.loads import bits
from testbed.policies.routing.order import Outstanding
from testbed.policies.routing.prefixes import OrderedPrefixTracking
from testbed.scenario.routing import CacheAware, CostBased

_MAX_TREE_TOKENS: int = CacheAware().max_tree_size
"""Bound of the approximate tree of one engine, tokens: that of `cache_aware`."""


class CostRouter(OrderedPrefixTracking):
    """argmin over open engines of (wait + prefill(prompt - cached), turns, index).

    That is the rule of the example: with prefix P cached on A alone, choose A iff
    wait_A + prefill(suffix) < wait_B + prefill(P + suffix); a tie goes to the engine with fewer turns, then to the
    lowest index. prefill(n) = n / prefill_tokens_per_s, and
    wait = turns x decode_seconds_per_turn + prefill(uncached prompt tokens of these turns).

    No event says when a prompt has been computed, so its tokens count until the turn ends: an over-estimate of the
    queue, exact when prompts are what an engine waits for. Costs are kept in tokens of prefill (seconds x
    prefill_tokens_per_s): whole numbers, so that ties are ties.
    """

    why = "cost"

    def __init__(self, num_engines: int, config: CostBased) -> None:
        super().__init__(num_engines, _MAX_TREE_TOKENS, config.told_of_flushes)
        self._per_turn = config.decode_seconds_per_turn * config.prefill_tokens_per_s
        self._queued = [0] * num_engines
        self._sent: Outstanding[int] = Outstanding(num_engines)

    def wait_tokens(self, engine: int) -> float:
        """Estimated wait in this engine, in tokens of prefill."""
        return self.loads.turns[engine] * self._per_turn + self._queued[engine]

    def choose(self, request: RouteRequest) -> int | None:
        idlest = self._order.least(self.loads.open_mask)
        if idlest is None:
            return None
        # Let m be the engine with the least (wait, turns, index). Engines without any part of the prefix need not be
        # looked at, m apart: such an engine x costs wait_x + prefill(prompt) >= wait_m + prefill(prompt) >= cost of m.
        # If m holds a part, the last step is strict and x loses; if not, x ties at best, and m precedes it.
        wait, turns, m = idlest
        prompt = request.prompt_tokens
        best = (wait + prompt, turns, m)
        # From the longest match down. Whoever has no more than `tokens` cached costs at least `least`, which is what m
        # costs if it has them: then nobody further down can win.
        seen = 0
        for tokens, mask, _ in reversed(self.tree.matches(request, self.loads.open_mask)):
            least = wait + (prompt - tokens)
            if best[0] < least:
                break
            if mask >> m & 1:
                best = min(best, (least, turns, m))
                break
            for holder in bits(mask & ~seen):
                best = min(best, (self.wait_tokens(holder) + (prompt - tokens), self.loads.turns[holder], holder))
            seen = mask
        return best[2]

    def started(self, engine: int, request: RouteRequest) -> None:
        self.loads.started(engine)
        uncached = request.prompt_tokens - self.tree.insert(engine, request)
        self._sent.add(engine, request.trajectory, uncached)
        self._queued[engine] += uncached
        self._order.put(engine, self.wait_tokens(engine), self.loads.turns[engine])

    def finished(self, engine: int, trajectory: int = -1) -> None:
        super().finished(engine)
        self._queued[engine] -= self._sent.pop(engine, trajectory)
        self._order.put(engine, self.wait_tokens(engine), self.loads.turns[engine])
