"""Mooncake's conductor: the smallest time to first token, with KV fetched from another engine where that is far better.

Refuses to know bytes and links: how fast KV travels is a rate of the scenario, in tokens.
"""

from __future__ import annotations

from itertools import pairwise

from testbed.policies.routing.base import NO_FETCH, RouteRequest
from testbed.policies.routing.estimate import PrefillEstimate
from testbed.policies.routing.loads import bits, level_of, lowest_bit
from testbed.policies.routing.order import Outstanding
from testbed.policies.routing.prefixes import OrderedPrefixTracking
from testbed.scenario.routing import Mooncake

Guess = tuple[float, int, int, int]
"""(TTFT, turns, engine, tokens to fetch)."""


class MooncakeRouter(OrderedPrefixTracking):
    """Algorithm 1 of Mooncake (FAST '25). Let n be the prompt, b the longest prefix that any open engine holds and c_p
    what engine p holds of it. For every open p

        TTFT_p = T_queue + T_prefill(n, c_p)                              if b / c_p < kvcache_balancing_threshold
        TTFT_p = T_transfer(b - c_p) + T_queue + T_prefill(n, b)          else, and b - c_p tokens travel to p

    and the smallest (TTFT, turns, index) is chosen. T_queue: T_prefill of the turns sent there that have not ended, as
    they were estimated. Nothing is fetched where there is no prefix (b = 0), or without `transfer_tokens_per_s`. Its
    refusal of requests whose TTFT is beyond an objective is left out: a rollout that is refused is sent again.
    """

    def __init__(self, num_engines: int, config: Mooncake) -> None:
        super().__init__(num_engines, config.max_tree_size, config.told_of_flushes)
        self._prefill = PrefillEstimate(config.prefill_tokens_per_s, config.attention_pairs_per_s).seconds
        rate = config.transfer_tokens_per_s
        self._transfer_s = 1.0 / rate if rate is not None else None
        self._threshold = config.kvcache_balancing_threshold
        self._queue = [0.0] * num_engines
        self._sent: Outstanding[float] = Outstanding(num_engines)
        self._brought = 0

    def choose(self, request: RouteRequest) -> int | None:
        mask = self.loads.open_mask
        idlest = self._order.least(mask)
        if idlest is None:
            return None
        found = self.tree.matches(request, mask)
        longest, holders, first = found[-1] if found else (0, 0, -1)
        # Engines that hold equally much differ by their wait alone: m, which waits least, beats those that hold what it
        # holds, and every class whose transfer and prefill take no less than its own.
        m, prompt = idlest[2], request.prompt_tokens
        levels = [(0, mask), *((tokens, engines) for tokens, engines, _ in found)]
        best = self._guess(request, m, level_of(levels, m), longest)
        own, _ = self._rest(prompt, level_of(levels, m), longest)
        for (held, engines), (_, further) in pairwise([*levels, (0, 0)]):
            if engines & ~further and self._rest(prompt, held, longest)[0] < own:
                best = min(best, *(self._guess(request, engine, held, longest) for engine in bits(engines & ~further)))
        _, _, engine, fetched = best
        if fetched:
            source = first if first >= 0 and holders >> first & 1 else lowest_bit(holders)
            self.fetch = (source, longest)
            self.why = "fetch_prefix"
        else:
            self.fetch = NO_FETCH
            self.why = "local_prefix" if level_of(levels, engine) else "no_prefix"
        self._brought = longest if fetched else 0
        return engine

    def _guess(self, request: RouteRequest, engine: int, held: int, longest: int) -> Guess:
        wait, turns, _ = self._order.entry(engine)
        seconds, fetched = self._rest(request.prompt_tokens, held, longest)
        return (wait + seconds, turns, engine, fetched)

    def _rest(self, prompt: int, held: int, longest: int) -> tuple[float, int]:
        """(transfer and prefill in an engine that holds `held` tokens, tokens that travel)."""
        if self._transfer_s is None or longest <= held or longest < self._threshold * held:
            return self._prefill(prompt, held), 0
        return (longest - held) * self._transfer_s + self._prefill(prompt, longest), longest - held

    def started(self, engine: int, request: RouteRequest) -> None:
        self.loads.started(engine)
        held = max(self.tree.insert(engine, request), self._brought)
        self._brought = 0
        seconds = self._prefill(request.prompt_tokens, held)
        self._sent.add(engine, request.trajectory, seconds)
        self._add(engine, seconds)

    def finished(self, engine: int, trajectory: int = -1) -> None:
        super().finished(engine)
        self._add(engine, -self._sent.pop(engine, trajectory))

    def _add(self, engine: int, seconds: float) -> None:
        turns = self.loads.turns[engine]
        self._queue[engine] = self._queue[engine] + seconds if turns else 0.0  # no rounding is left of what has ended
        self._order.put(engine, self._queue[engine], turns)
