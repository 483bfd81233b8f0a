"""Routing by estimated time: wait for the turns already there, plus prefill of what is not cached.

Refuses to know how long a turn really takes: it has the two constants of the scenario and its own account of what it
sent.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from testbed.policies.routing.base import LoadTracking, RouteRequest
from testbed.policies.routing.loads import lowest_bit
from testbed.policies.routing.prefix_tree import PrefixTree
from testbed.scenario.rollout import CacheAware, CostBased

_MAX_TREE_TOKENS: int = CacheAware().max_tree_size
"""Bound of the approximate tree of one engine, tokens: that of `cache_aware`."""


class CostRouter(LoadTracking):
    """argmin over open engines of (wait + prefill(prompt - cached), turns, index).

    That is the rule of the example: with prefix P cached on A alone, choose A iff
    wait_A + prefill(suffix) < wait_B + prefill(P + suffix); a tie goes to the engine with fewer turns, then to the
    lowest index. prefill(n) = n / prefill_tokens_per_s, and
    wait = turns x decode_seconds_per_turn + prefill(uncached prompt tokens of these turns).

    No event says when a prompt has been computed, so its tokens count until the turn ends, and turns are taken to end
    in the order in which they were sent: an over-estimate of the queue, exact when prompts are what an engine waits
    for. Costs are kept in tokens of prefill (seconds x prefill_tokens_per_s): whole numbers, so that ties are ties.
    """

    why = "cost"

    def __init__(self, num_engines: int, config: CostBased) -> None:
        super().__init__(num_engines)
        self._per_turn = config.decode_seconds_per_turn * config.prefill_tokens_per_s
        self._queued = [0] * num_engines
        self._sent: list[deque[int]] = [deque() for _ in range(num_engines)]
        self._tree = PrefixTree(num_engines, _MAX_TREE_TOKENS)
        # (wait, turns, engine); an entry counts if it is what the engine's state says now, others are left to be
        # found stale.
        self._heap: list[tuple[float, int, int]] = [(0.0, 0, engine) for engine in range(num_engines)]

    def wait_tokens(self, engine: int) -> float:
        """Estimated wait in this engine, in tokens of prefill."""
        return self.loads.turns[engine] * self._per_turn + self._queued[engine]

    def choose(self, request: RouteRequest) -> int | None:
        idlest = self._idlest()
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
        for tokens, mask, _ in reversed(self._tree.matches(request, self.loads.open_mask)):
            least = wait + (prompt - tokens)
            if best[0] < least:
                break
            if mask >> m & 1:
                best = min(best, (least, turns, m))
                break
            left = mask & ~seen
            seen = mask
            while left:
                holder = lowest_bit(left)
                left &= left - 1
                best = min(best, (self.wait_tokens(holder) + (prompt - tokens), self.loads.turns[holder], holder))
        return best[2]

    def started(self, engine: int, request: RouteRequest) -> None:
        self.loads.started(engine)
        uncached = request.prompt_tokens - self._tree.insert(engine, request)
        self._sent[engine].append(uncached)
        self._queued[engine] += uncached
        self._changed(engine)

    def finished(self, engine: int) -> None:
        super().finished(engine)
        self._queued[engine] -= self._sent[engine].popleft()
        self._changed(engine)

    def open(self, engine: int) -> None:
        super().open(engine)
        self._changed(engine)

    def cache_dropped(self, engine: int) -> None:
        self._tree.drop(engine)

    def _entry(self, engine: int) -> tuple[float, int, int]:
        return (self.wait_tokens(engine), self.loads.turns[engine], engine)

    def _changed(self, engine: int) -> None:
        if not self.loads.is_open(engine):
            return
        heap = self._heap
        heappush(heap, self._entry(engine))
        if len(heap) > 4 * len(self._queued) + 64:  # mostly stale: O(engines) once in more than that many changes
            heap[:] = [self._entry(other) for other in range(len(self._queued)) if self.loads.is_open(other)]
            heapify(heap)

    def _idlest(self) -> tuple[float, int, int] | None:
        """(wait, turns, engine), the smallest of the open engines."""
        heap = self._heap
        while heap:
            top = heap[0]
            if self.loads.is_open(top[2]) and top == self._entry(top[2]):
                return top
            heappop(heap)
        return None
