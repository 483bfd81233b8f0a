"""Preble's E2: exploit the cached prefix if it is most of the prompt, else explore for the lightest engine.

Refuses to know what turns really took: loads are estimates of what was sent within a window.
"""

from __future__ import annotations

from collections import deque

from testbed.policies.routing.base import RouteRequest
from testbed.policies.routing.estimate import PrefillEstimate
from testbed.policies.routing.loads import bits, deeper, level_of
from testbed.policies.routing.order import Entry
from testbed.policies.routing.prefixes import OrderedPrefixTracking
from testbed.scenario.routing import Preble

FIRST_REQUESTS = 50
"""So many requests are sent before loads are compared (`handle_important_node_stealing`)."""


class PrebleRouter(OrderedPrefixTracking):
    """E2 (Preble, arXiv 2407.00023; `multi_node/global_scheduler_with_time.py` of WukLab/preble), over open engines:

    1. exploit, if the longest cached prefix is longer than the rest of the prompt: of the engines that hold it, the one
       with the lowest load; unless that load is above high_load_threshold x the lowest of all, then the engine with it
       (after the first 50 requests);
    2. else explore: argmin of (load + prefill(prompt - cached), turns, index).

    load = sum over turns sent within window_s of prefill(uncached tokens) + decode_seconds_per_turn. Left out: the cost
    of what would be evicted (off by default there), and the copies of prefixes whose time to first token doubles, which
    needs what engines report.
    """

    why = "explore"

    def __init__(self, num_engines: int, config: Preble) -> None:
        super().__init__(num_engines, config.max_tree_size, config.told_of_flushes)
        self._prefill = PrefillEstimate(config.prefill_tokens_per_s).seconds
        self._decode_s = config.decode_seconds_per_turn
        self._window_s = config.window_s
        self._high = config.high_load_threshold
        self._load = [0.0] * num_engines
        self._in_window = [0] * num_engines
        self._requests = 0
        self._recent: deque[tuple[float, int, float]] = deque()

    def choose(self, request: RouteRequest) -> int | None:
        self._forget(request.t - self._window_s)
        mask = self.loads.open_mask
        lightest = self._order.least(mask)
        if lightest is None:
            return None
        prompt = request.prompt_tokens
        cached = [(tokens, engines) for tokens, engines, _ in self.tree.matches(request, mask)]
        if cached and cached[-1][0] > prompt - cached[-1][0]:
            holders = cached[-1][1]
            holds = holders >> lightest[2] & 1
            load, _, engine = lightest if holds else min(self._order.entry(e) for e in bits(holders))
            if self._requests >= FIRST_REQUESTS and load > self._high * lightest[0]:
                self.why = "high_load"
                return lightest[2]
            self.why = "exploit"
            return engine
        self.why = "explore"

        def entry(engine: int) -> Entry:
            load, turns, _ = self._order.entry(engine)
            return (load + self._prefill(prompt, level_of(cached, engine)), turns, engine)

        m = lightest[2]  # who has no more cached than m costs at least as much, and m precedes it if they tie
        return min([entry(m), *(entry(engine) for engine in bits(deeper(cached, m)))])[2]

    def started(self, engine: int, request: RouteRequest) -> None:
        self.loads.started(engine)
        seconds = self._prefill(request.prompt_tokens, self.tree.insert(engine, request)) + self._decode_s
        self._recent.append((request.t, engine, seconds))
        self._requests += 1
        self._in_window[engine] += 1
        self._load[engine] += seconds
        self._changed(engine)

    def finished(self, engine: int, trajectory: int = -1) -> None:
        super().finished(engine)
        self._changed(engine)

    def _forget(self, before: float) -> None:
        recent = self._recent
        while recent and recent[0][0] < before:
            _, engine, seconds = recent.popleft()
            self._in_window[engine] -= 1
            self._load[engine] = self._load[engine] - seconds if self._in_window[engine] else 0.0
            self._changed(engine)

    def _changed(self, engine: int) -> None:
        self._order.put(engine, self._load[engine], self.loads.turns[engine])
