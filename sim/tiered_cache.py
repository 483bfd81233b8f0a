"""SGLang's hierarchical cache (HiCache): a prefix tree in GPU memory with a larger one in host memory behind it.

Write-through, SGLang's default: what is published on the GPU is copied to the host at once, in the background, so the
host's tree holds all of the GPU's and, with its own least-recently-used leaves, more. It refuses to know requests and
how long a copy takes.
"""

from __future__ import annotations

from typing import Any

from sim.radix_cache import Node, RadixCache, Run, Runs, normalised


class TieredCache(RadixCache):
    """`host`: the tree in host memory; its slots are `host_slots` tokens."""

    __slots__ = ("_host_slots", "_names", "host")

    def __init__(self, page: int, slots: int, host_slots: int) -> None:
        self._host_slots = host_slots
        self.host = RadixCache(page, host_slots)
        super().__init__(page, slots)

    def reset(self, slots: int) -> None:
        """A flush empties both tiers."""
        super().reset(slots)
        self.host.reset(self._host_slots)
        self._names: dict[Node, Any] = {}

    def root(self, namespace: Any) -> Node:
        root = super().root(namespace)
        self._names[root] = namespace
        return root

    def longest(self, namespace: Any, runs: Runs, length: int) -> tuple[Node, int]:
        return self.host.match(self.host.root(namespace), runs, length)

    def extend(self, node: Node, runs: Runs, length: int, version: int, lock: bool) -> tuple[Node, int]:
        last, have = super().extend(node, runs, length, version, lock)
        if have < length:
            self._write_through(last)
        return last, have

    def _write_through(self, node: Node) -> None:
        """Copy the path to this node. O(nodes of the path)."""
        version, length = node.version, node.end
        runs: list[Run] = []
        while (parent := node.parent) is not None:
            runs += reversed(node.key)
            node = parent
        host = self.host
        path = normalised(tuple(reversed(runs)))
        last, have = host.extend(host.root(self._names[node]), path, length, version, False)
        host.touch(last)
        host.free -= length - have
        if host.free < 0:
            host.evict(0)
