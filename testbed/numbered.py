"""Living things by their number, where numbers are handed out in order and things die in about that order.

A list of the latest numbers: an index finds what a dictionary would hash, compare and look up. What outlives the rest
by far moves to a dictionary, so that one old thing does not keep places for all that came after it. It refuses to know
what the things are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

V = TypeVar("V")

_SPARE: Final = 4096
"""So many places may be void before the list is cut."""


class Numbered(Generic[V]):
    """As a dictionary of numbers >= 0, in the order of the numbers. O(1), amortised; memory is proportional to what
    lives."""

    __slots__ = ("_first", "_living", "_old", "_places")

    def __init__(self) -> None:
        self._first = 0
        """Number of the first place."""
        self._living = 0
        self._places: list[V | None] = []
        self._old: dict[int, V] = {}
        """What has a number before the first place."""

    def __len__(self) -> int:
        return self._living

    def __iter__(self) -> Iterator[int]:
        """The numbers of what lives, rising."""
        first = self._first
        return iter([*sorted(self._old), *[first + i for i, v in enumerate(self._places) if v is not None]])

    def __contains__(self, number: int) -> bool:
        return self.get(number) is not None

    def __getitem__(self, number: int) -> V:
        """Raises KeyError if nothing of this number lives."""
        value = self.get(number)
        if value is None:
            raise KeyError(number)
        return value

    def __setitem__(self, number: int, value: V) -> None:
        places = self._places
        place = number - self._first
        if place < 0:
            self._living += number not in self._old
            self._old[number] = value
            return
        if place < len(places):
            self._living += places[place] is None
            places[place] = value
            return
        if place > len(places):  # not the next number
            if not self._living:
                self._first = number
                places.clear()
            else:
                places.extend([None] * (place - len(places)))
        places.append(value)
        self._living += 1
        if len(places) > _SPARE + 4 * self._living:
            self._cut()

    def _cut(self) -> None:
        """Keep the places of the latest numbers, twice as many as things live; what lives before them is old."""
        places, first = self._places, self._first
        cut = max(len(places) - 2 * self._living, 0)
        for place in range(cut):
            value = places[place]
            if value is not None:
                self._old[first + place] = value
        del places[:cut]
        self._first = first + cut

    def __delitem__(self, number: int) -> None:
        """Raises KeyError if nothing of this number lives."""
        if self.pop(number) is None:
            raise KeyError(number)

    def get(self, number: int) -> V | None:
        places, place = self._places, number - self._first
        if place < 0:
            return self._old.get(number)
        return places[place] if place < len(places) else None

    def pop(self, number: int) -> V | None:
        """What is removed; None if nothing of this number lives."""
        places, place = self._places, number - self._first
        value: V | None
        if place < 0:
            value = self._old.pop(number, None)
        elif place < len(places):
            value = places[place]
            places[place] = None
        else:
            return None
        if value is not None:
            self._living -= 1
        return value

    def values(self) -> Iterator[V]:
        return iter([self[number] for number in self])
