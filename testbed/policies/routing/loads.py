"""How many turns are in each engine, and which open engine has the fewest or the most.

Refuses to know what a turn costs. Engines are grouped by their number of turns: one integer bit mask of engines per
number, and one bit mask of the numbers in use. The least and the most loaded open engine are then the lowest and
highest set bits, so every operation is a few machine-word operations (engines / 64 and largest load / 64 words),
whatever opens, closes and jumps happen.
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

    __slots__ = ("_at", "_bit", "_levels", "open_mask", "turns")

    def __init__(self, num_engines: int) -> None:
        if num_engines < 1:
            raise ValueError("a router needs at least one engine")
        self.turns = [0] * num_engines
        self.open_mask = (1 << num_engines) - 1
        self._bit = [1 << engine for engine in range(num_engines)]
        self._at = [self.open_mask]  # _at[k]: mask of open engines with k turns
        self._levels = 1  # bit k is set iff _at[k] is not 0

    def started(self, engine: int) -> None:
        turns = self.turns[engine]
        self.turns[engine] = turns + 1
        bit = self._bit[engine]
        if self.open_mask & bit:
            at = self._at
            at[turns] = left = at[turns] ^ bit
            turns += 1
            if turns == len(at):
                at.append(bit)
            else:
                at[turns] |= bit
            levels = self._levels | 1 << turns
            self._levels = levels if left else levels ^ 1 << turns - 1

    def finished(self, engine: int) -> None:
        turns = self.turns[engine]
        if turns == 0:
            raise ValueError(f"engine {engine} has no turn that could finish")
        self.turns[engine] = turns - 1
        bit = self._bit[engine]
        if self.open_mask & bit:
            at = self._at
            at[turns] = left = at[turns] ^ bit
            at[turns - 1] |= bit
            levels = self._levels | 1 << turns - 1
            self._levels = levels if left else levels ^ 1 << turns

    def open(self, engine: int) -> None:
        bit = self._bit[engine]
        if not self.open_mask & bit:
            self.open_mask |= bit
            self._enter(engine, self.turns[engine])

    def close(self, engine: int) -> None:
        bit = self._bit[engine]
        if self.open_mask & bit:
            self.open_mask ^= bit
            self._leave(engine, self.turns[engine])

    def is_open(self, engine: int) -> bool:
        return bool(self.open_mask & self._bit[engine])

    def least(self) -> int | None:
        """Open engine with the fewest turns, ties by lowest index; None if none is open."""
        if not self._levels:
            return None
        return lowest_bit(self._at[lowest_bit(self._levels)])

    def fewest(self) -> int:
        """Smallest number of turns in an open engine; needs an open engine."""
        return lowest_bit(self._levels)

    def most(self) -> int:
        """Largest number of turns in an open engine; needs an open engine."""
        return self._levels.bit_length() - 1

    def _enter(self, engine: int, turns: int) -> None:
        at = self._at
        while turns >= len(at):
            at.append(0)
        at[turns] |= self._bit[engine]
        self._levels |= 1 << turns

    def _leave(self, engine: int, turns: int) -> None:
        at = self._at
        at[turns] ^= self._bit[engine]
        if not at[turns]:
            self._levels ^= 1 << turns
