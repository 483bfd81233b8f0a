"""Hashing onto a ring of virtual nodes: consistent_hashing, bounded_consistent_hashing and prefix_hash.

A closed engine keeps its places on the ring and is passed over: closing it moves only its own keys, and opening it
again brings exactly those back, so engines that come and go do not reshuffle everybody's cache. Refuses to know what is
cached: equal keys go to equal engines, and that is all.
"""

from __future__ import annotations

from bisect import bisect_left

from testbed.policies.routing.base import LoadTracking, RouteRequest
from testbed.scenario.routing import BoundedConsistentHashing, PrefixHash

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


class Ring:
    """Virtual nodes of all engines, in the order of their hashes."""

    __slots__ = ("_owners", "_points")

    def __init__(self, num_engines: int, virtual_nodes: int) -> None:
        ring = sorted(
            (stable_hash(stable_hash(engine) ^ replica), engine)
            for engine in range(num_engines)
            for replica in range(virtual_nodes)
        )
        self._points = [point for point, _ in ring]
        self._owners = [engine for _, engine in ring]

    def owner(self, key: int, engines: int) -> int:
        """The owner of the first virtual node at or after hash(key) that is in the mask, which may not be 0.

        Owners alternate at random, so about (all engines / engines of the mask) places are looked at.
        """
        owners = self._owners
        place = bisect_left(self._points, stable_hash(key))
        while True:
            if place == len(owners):
                place = 0
            if engines >> owners[place] & 1:
                return owners[place]
            place += 1


class ConsistentHashingRouter(LoadTracking):
    """The owner of hash(group) among the open engines."""

    why = "consistent_hashing"

    def __init__(self, num_engines: int, virtual_nodes: int) -> None:
        super().__init__(num_engines)
        self._ring = Ring(num_engines, virtual_nodes)

    def choose(self, request: RouteRequest) -> int | None:
        mask = self.loads.open_mask
        return self._ring.owner(request.group, mask) if mask else None


class _Averaging(LoadTracking):
    """Knows the turns in all open engines together."""

    def __init__(self, num_engines: int) -> None:
        super().__init__(num_engines)
        self.open_turns = 0

    def started(self, engine: int, request: RouteRequest) -> None:
        super().started(engine, request)
        self.open_turns += self.loads.is_open(engine)

    def finished(self, engine: int, trajectory: int = -1) -> None:
        super().finished(engine)
        self.open_turns -= self.loads.is_open(engine)

    def open(self, engine: int) -> None:
        if not self.loads.is_open(engine):
            self.open_turns += self.loads.turns[engine]
        super().open(engine)

    def close(self, engine: int) -> None:
        if self.loads.is_open(engine):
            self.open_turns -= self.loads.turns[engine]
        super().close(engine)


class BoundedConsistentHashingRouter(_Averaging):
    """SGLang's `bounded_consistent_hashing` (`sgl-model-gateway/src/policies/bounded_consistent_hashing.rs`):

    1. the owner of hash(group) if its turns <= max_load_skew x mean turns of open engines (or nobody has any);
    2. else the first engine further on the ring that satisfies this;
    3. else, if none does, the owner after all.
    """

    why = "ring"

    def __init__(self, num_engines: int, config: BoundedConsistentHashing) -> None:
        super().__init__(num_engines)
        self._ring = Ring(num_engines, config.virtual_nodes)
        self._skew = config.max_load_skew

    def choose(self, request: RouteRequest) -> int | None:
        left = mask = self.loads.open_mask
        if not mask:
            return None
        turns, total = self.loads.turns, self.open_turns
        limit = total / mask.bit_count() * self._skew if total else float("inf")
        self.why = "ring"
        engine = first = self._ring.owner(request.group, mask)
        while turns[engine] > limit:
            left ^= 1 << engine
            if not left:
                self.why = "all_above_bound"
                return first
            self.why = "spillover"
            engine = self._ring.owner(request.group, left)
        return engine


class PrefixHashRouter(_Averaging):
    """SGLang's `prefix_hash` (`sgl-model-gateway/src/policies/prefix_hash.rs`), over the open engines:

    1. the ring's owner of the prompt's first `prefix_token_count` tokens, if its turns <= load_factor x (all turns + 1)
       / engines (or nobody has any);
    2. else the least loaded engine, if that is within the bound;
    3. else the owner after all.

    Prompts are known as blocks here, so the key is the blocks that cover those tokens, and two prompts that differ
    within the last of them have different keys.
    """

    why = "ring"

    def __init__(self, num_engines: int, config: PrefixHash) -> None:
        super().__init__(num_engines)
        self._ring = Ring(num_engines, config.virtual_nodes)
        self._tokens = config.prefix_token_count
        self._factor = config.load_factor

    def choose(self, request: RouteRequest) -> int | None:
        mask = self.loads.open_mask
        if not mask:
            return None
        self.why = "ring"
        owner = self._ring.owner(self._key(request), mask)
        turns, total = self.loads.turns, self.open_turns
        limit = (total + 1) / mask.bit_count() * self._factor if total else float("inf")
        if turns[owner] <= limit:
            return owner
        least = self.loads.least()
        if least is not None and turns[least] <= limit:
            self.why = "least_load"
            return least
        self.why = "all_above_bound"
        return owner

    def _key(self, request: RouteRequest) -> int:
        blocks, step = request.blocks, request.block_tokens
        if not blocks or step <= 0:
            return request.group
        key = 0
        for block in blocks[: -(-self._tokens // step)]:
            key = stable_hash(key ^ (block & _MASK))
        return key
