"""Which open engine has the smallest key, and what was sent where: bookkeeping that routers by cost share.

Refuses to know what a key means and what was sent.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Entry = tuple[float, int, int]
"""(key, turns, engine): smaller comes first."""


class EngineOrder:
    """The open engine with the smallest (key, turns, engine); all start with (0, 0, engine). A change costs O(log
    changes), a question O(1) and the changes since the last one, each once."""

    __slots__ = ("_entries", "_heap")

    def __init__(self, num_engines: int) -> None:
        self._entries: list[Entry] = [(0.0, 0, engine) for engine in range(num_engines)]
        self._heap = list(self._entries)

    def put(self, engine: int, key: float, turns: int) -> None:
        """The engine's key is this from now on."""
        entry = self._entries[engine] = (key, turns, engine)
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > 4 * len(self._entries) + 64:  # mostly stale: O(engines) once in more than that many changes
            heap[:] = self._entries
            heapify(heap)

    def opened(self, engine: int) -> None:
        """The engine may have been passed over while it was closed."""
        heappush(self._heap, self._entries[engine])

    def entry(self, engine: int) -> Entry:
        return self._entries[engine]

    def least(self, open_mask: int) -> Entry | None:
        """The smallest entry of an engine of the mask; None if there is none. Engines that are not in it are left out
        until `opened` or `put`."""
        heap, entries = self._heap, self._entries
        while heap:
            top = heap[0]
            if top == entries[top[2]] and open_mask >> top[2] & 1:
                return top
            heappop(heap)
        return None


V = TypeVar("V")


class Outstanding(Generic[V]):
    """A value per turn that is in an engine, by trajectory; in the order of sending."""

    __slots__ = ("_sent", "_unnamed")

    def __init__(self, num_engines: int) -> None:
        self._sent: list[dict[int, V]] = [{} for _ in range(num_engines)]
        self._unnamed = -1

    def add(self, engine: int, trajectory: int, value: V) -> None:
        sent = self._sent[engine]
        if trajectory in sent:  # its earlier turn there has not been said to be over
            self._unnamed -= 1
            trajectory = self._unnamed
        sent[trajectory] = value

    def pop(self, engine: int, trajectory: int) -> V:
        """The value of this trajectory's turn, or of the one sent first (as SGLang's `least_load` counts)."""
        sent = self._sent[engine]
        return sent.pop(trajectory if trajectory in sent else next(iter(sent)))
