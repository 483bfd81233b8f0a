"""Consistent hashing: a ring of virtual nodes, keyed by group.

Refuses to know load. A closed engine keeps its places on the ring and is passed over: closing it moves only its own
groups, and opening it again brings exactly those back, so engines that come and go do not reshuffle everybody's
cache.
"""

from __future__ import annotations

from bisect import bisect_left

from testbed.policies.routing.base import LoadTracking, RouteRequest

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def stable_hash(value: int) -> int:
    """64-bit mix of an integer, the same in every process and on every platform (the finaliser of SplitMix64, Steele
    et al. 2014).
    """
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class ConsistentHashingRouter(LoadTracking):
    """The owner of the first virtual node at or after hash(group) whose engine is open."""

    why = "consistent_hashing"

    def __init__(self, num_engines: int, virtual_nodes: int) -> None:
        super().__init__(num_engines)
        ring = sorted(
            (stable_hash(stable_hash(engine) ^ replica), engine)
            for engine in range(num_engines)
            for replica in range(virtual_nodes)
        )
        self._points = [point for point, _ in ring]
        self._owners = [engine for _, engine in ring]

    def choose(self, request: RouteRequest) -> int | None:
        mask = self.loads.open_mask
        if not mask:
            return None
        owners = self._owners
        place = bisect_left(self._points, stable_hash(request.group))
        # Owners alternate at random, so about (engines / open engines) places are looked at.
        while True:
            if place == len(owners):
                place = 0
            if mask >> owners[place] & 1:
                return owners[place]
            place += 1
