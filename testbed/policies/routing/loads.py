"""How many turns are in each engine, and which open engine has the fewest or the most.

Refuses to know what a turn costs. A turn more or less changes an engine's number by one, so the smallest and the
largest number follow from how many open engines have each number: O(1). Which engine has the smallest is looked up in
a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def lowest_bit(mask: int) -> int:
    """Index of the lowest set bit of a mask that is not 0."""
    return (mask & -mask).bit_length() - 1


def bits(mask: int) -> Iterator[int]:
    """Indices of the set bits, ascending."""
    while mask:
        yield lowest_bit(mask)
        mask &= mask - 1


def level_of(levels: Sequence[tuple[int, int]], engine: int) -> int:
    """Of levels (value, mask) whose masks shrink, the value of the last one that the engine is in; 0: of none."""
    for value, mask in reversed(levels):
        if mask >> engine & 1:
            return value
    return 0


def deeper(levels: Sequence[tuple[int, int]], engine: int) -> int:
    """Mask of the engines whose last level comes after this engine's."""
    for _, mask in levels:
        if not mask >> engine & 1:
            return mask
    return 0


class Loads:
    """Turns per engine. `turns[e]` counts closed engines too; `least`, `most` and `fewest` look at open ones only."""

    __slots__ = ("_engines", "_fewest", "_most", "_open", "open_mask", "turns")

    def __init__(self, num_engines: int) -> None:
        if num_engines < 1:
            raise ValueError("a router needs at least one engine")
        self.turns = [0] * num_engines
        self.open_mask = (1 << num_engines) - 1
        self._open = [0] * num_engines
        """Turns of each open engine; -1: it is closed."""
        self._engines = [num_engines]
        """Number of turns -> open engines that have so many."""
        self._fewest = self._most = 0

    def started(self, engine: int) -> None:
        turns = self.turns[engine]
        self.turns[engine] = turns + 1
        if self._open[engine] >= 0:
            self._open[engine] = turns + 1
            engines = self._engines
            engines[turns] = left = engines[turns] - 1
            if turns + 1 == len(engines):
                engines.append(1)
            else:
                engines[turns + 1] += 1
            if turns == self._most:
                self._most = turns + 1
            if not left and turns == self._fewest:
                self._fewest = turns + 1

    def finished(self, engine: int) -> None:
        turns = self.turns[engine]
        if turns == 0:
            raise ValueError(f"engine {engine} has no turn that could finish")
        self.turns[engine] = turns - 1
        if self._open[engine] >= 0:
            self._open[engine] = turns - 1
            engines = self._engines
            engines[turns] = left = engines[turns] - 1
            engines[turns - 1] += 1
            if turns == self._fewest:
                self._fewest = turns - 1
            if not left and turns == self._most:
                self._most = turns - 1

    def open(self, engine: int) -> None:
        if self._open[engine] >= 0:
            return
        turns, engines = self.turns[engine], self._engines
        self._open[engine] = turns
        engines.extend([0] * (turns + 1 - len(engines)))
        engines[turns] += 1
        self._fewest = min(self._fewest, turns) if self.open_mask else turns
        self._most = max(self._most, turns) if self.open_mask else turns
        self.open_mask |= 1 << engine

    def close(self, engine: int) -> None:
        if self._open[engine] < 0:
            return
        self._open[engine] = -1
        engines = self._engines
        engines[self.turns[engine]] -= 1
        self.open_mask ^= 1 << engine
        if self.open_mask:
            while not engines[self._fewest]:
                self._fewest += 1
            while not engines[self._most]:
                self._most -= 1

    def is_open(self, engine: int) -> bool:
        return self._open[engine] >= 0

    def least(self) -> int | None:
        """Open engine with the fewest turns, ties by lowest index; None if none is open."""
        return self._open.index(self._fewest) if self.open_mask else None

    def fewest(self) -> int:
        """Smallest number of turns in an open engine; needs an open engine."""
        return self._fewest

    def most(self) -> int:
        """Largest number of turns in an open engine; needs an open engine."""
        return self._most
