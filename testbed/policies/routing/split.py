"""Two routers as one: turns are sent to prefill engines, and from there to decode engines.

Prefill engines are the first ones. Refuses to know any rule: the scenario's router chooses among prefill engines, a
router that looks at load (or at nothing) among decode engines.
"""

from __future__ import annotations

from testbed.policies.routing.balancing import LeastLoadRouter, PowerOfTwoRouter, RandomRouter, RoundRobinRouter
from testbed.policies.routing.base import Fetch, Router, RouteRequest, UniformSource
from testbed.scenario.placement import PdDisaggregation


def _decode_router(config: PdDisaggregation, engines: int, rng: UniformSource) -> Router:
    match config.decode_policy:
        case "random":
            return RandomRouter(engines, rng)
        case "round_robin":
            return RoundRobinRouter(engines)
        case "power_of_two":
            return PowerOfTwoRouter(engines, rng)
        case "least_load":
            return LeastLoadRouter(engines)


class SplitRouter(Router):
    """Engines 0 .. prefill_engines - 1 are `prefill`'s, the `decode_engines` after them a router's of their own."""

    def __init__(
        self,
        prefill: Router,
        config: PdDisaggregation,
        prefill_engines: int,
        decode_engines: int,
        rng: UniformSource,
    ) -> None:
        self._prefill = prefill
        self._first = prefill_engines
        self._decode = _decode_router(config, decode_engines, rng)

    @property
    def why(self) -> str:
        return self._prefill.why

    @property
    def decode_why(self) -> str:
        return self._decode.why

    @property
    def fetch(self) -> Fetch:
        return self._prefill.fetch

    def choose(self, request: RouteRequest) -> int | None:
        """An open prefill engine."""
        return self._prefill.choose(request)

    def choose_decode(self, request: RouteRequest) -> int | None:
        """An open decode engine."""
        engine = self._decode.choose(request)
        return None if engine is None else engine + self._first

    def started(self, engine: int, request: RouteRequest) -> None:
        side, index = self._side(engine)
        side.started(index, request)

    def finished(self, engine: int, trajectory: int = -1) -> None:
        side, index = self._side(engine)
        side.finished(index, trajectory)

    def open(self, engine: int) -> None:
        side, index = self._side(engine)
        side.open(index)

    def close(self, engine: int) -> None:
        side, index = self._side(engine)
        side.close(index)

    def cache_dropped(self, engine: int) -> None:
        side, index = self._side(engine)
        side.cache_dropped(index)

    def lost(self, engine: int) -> None:
        side, index = self._side(engine)
        side.lost(index)

    def _side(self, engine: int) -> tuple[Router, int]:
        return (self._prefill, engine) if engine < self._first else (self._decode, engine - self._first)
