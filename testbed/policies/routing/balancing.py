"""Routers that look at load or at nothing: random, round_robin, power_of_two, least_load.

They refuse to know prefixes, groups and trajectories.
"""

from __future__ import annotations

from testbed.policies.routing.base import LoadTracking, RouteRequest, UniformSource
from testbed.policies.routing.loads import lowest_bit
from testbed.policies.routing.order import EngineOrder, Outstanding


class LeastLoadRouter(LoadTracking):
    """argmin over open engines of (turns, index)."""

    why = "least_load"

    def choose(self, request: RouteRequest) -> int | None:
        return self.loads.least()


class LeastTokensRouter(LoadTracking):
    """argmin over open engines of (prompt tokens of the turns there, turns, index): SGLang's `least_load`
    (`sgl-model-gateway/src/policies/least_load.rs`), which counts characters and lets the first sent end first.
    """

    why = "least_load"

    def __init__(self, num_engines: int) -> None:
        super().__init__(num_engines)
        self._tokens = [0] * num_engines
        self._sent: Outstanding[int] = Outstanding(num_engines)
        self._order = EngineOrder(num_engines)

    def choose(self, request: RouteRequest) -> int | None:
        least = self._order.least(self.loads.open_mask)
        return None if least is None else least[2]

    def started(self, engine: int, request: RouteRequest) -> None:
        self.loads.started(engine)
        self._sent.add(engine, request.trajectory, request.prompt_tokens)
        self._add(engine, request.prompt_tokens)

    def open(self, engine: int) -> None:
        super().open(engine)
        self._order.opened(engine)

    def finished(self, engine: int, trajectory: int = -1) -> None:
        super().finished(engine)
        self._add(engine, -self._sent.pop(engine, trajectory))

    def _add(self, engine: int, tokens: int) -> None:
        self._tokens[engine] += tokens
        self._order.put(engine, self._tokens[engine], self.loads.turns[engine])


class RoundRobinRouter(LoadTracking):
    """The open engine that follows the last choice in index order, cyclically; the first choice is the lowest open
    index.
    """

    why = "round_robin"

    def __init__(self, num_engines: int) -> None:
        super().__init__(num_engines)
        self._next = 0

    def choose(self, request: RouteRequest) -> int | None:
        mask = self.loads.open_mask
        if not mask:
            return None
        ahead = mask >> self._next
        engine = self._next + lowest_bit(ahead) if ahead else lowest_bit(mask)
        self._next = engine + 1
        return engine


class _Drawing(LoadTracking):
    """Keeps the open engines in a list, so that one can be drawn in O(1). Its order follows from the calls, so runs
    repeat.
    """

    def __init__(self, num_engines: int, rng: UniformSource) -> None:
        super().__init__(num_engines)
        self._rng = rng
        self._open = list(range(num_engines))
        self._place = list(range(num_engines))

    def open(self, engine: int) -> None:
        if not self.loads.is_open(engine):
            self._place[engine] = len(self._open)
            self._open.append(engine)
        super().open(engine)

    def close(self, engine: int) -> None:
        if self.loads.is_open(engine):
            place, last = self._place[engine], self._open.pop()
            if last != engine:
                self._open[place] = last
                self._place[last] = place
        super().close(engine)


class RandomRouter(_Drawing):
    """Uniform over open engines."""

    why = "random"

    def choose(self, request: RouteRequest) -> int | None:
        engines = self._open
        return engines[int(self._rng.random() * len(engines))] if engines else None


class PowerOfTwoRouter(_Drawing):
    """Two different open engines at random, the one with fewer turns; a tie goes to the first drawn (as in SGLang)."""

    why = "power_of_two"

    def choose(self, request: RouteRequest) -> int | None:
        engines = self._open
        count = len(engines)
        if count < 2:
            return engines[0] if engines else None
        one = int(self._rng.random() * count)
        two = int(self._rng.random() * (count - 1))
        two += two >= one  # uniform over the places that are not `one`
        first, second = engines[one], engines[two]
        turns = self.loads.turns
        return first if turns[first] <= turns[second] else second
