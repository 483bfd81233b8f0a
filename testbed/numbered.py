"""Living things by their number, where numbers are handed out in order and things die in about that order.

A list from the oldest living number on: an index finds what a dictionary would hash, compare and look up, and the list
is short as long as nothing outlives the rest by far. It refuses to know what the things are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")

_SPARE = 4096
"""Places in front that may be void before the list is cut."""


class Numbered(Generic[V]):
    """As a dictionary of numbers >= 0, in the order of the numbers. O(1), amortised; memory is proportional to the span
    from the oldest living number to the newest."""

    __slots__ = ("_first", "_living", "_places", "_void")

    def __init__(self) -> None:
        self._first = 0
        """Number of the first place."""
        self._void = 0
        """Places in front that hold nothing, all of them."""
        self._living = 0
        self._places: list[V | None] = []

    def __len__(self) -> int:
        return self._living

    def __iter__(self) -> Iterator[int]:
        """The numbers of what lives, rising."""
        first = self._first
        return iter([first + place for place, value in enumerate(self._places) if value is not None])

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
        if place == len(places) and places:  # the next number
            places.append(value)
            self._living += 1
            return
        if not self._living:  # whatever was here is void
            self._first, self._void = number, 0
            self._places = [value]
            self._living = 1
            return
        if place < 0:
            places[:0] = [None] * -place
            self._first, self._void, place = number, 0, 0
        elif place < self._void:
            self._void = place
        elif place >= len(places):
            places.extend([None] * (place + 1 - len(places)))
        self._living += places[place] is None
        places[place] = value

    def __delitem__(self, number: int) -> None:
        """Raises KeyError if nothing of this number lives."""
        if self.pop(number) is None:
            raise KeyError(number)

    def get(self, number: int) -> V | None:
        places, place = self._places, number - self._first
        return places[place] if 0 <= place < len(places) else None

    def pop(self, number: int) -> V | None:
        """What is removed; None if nothing of this number lives."""
        places, place = self._places, number - self._first
        if not 0 <= place < len(places):
            return None
        value = places[place]
        if value is None:
            return None
        places[place] = None
        self._living -= 1
        void = self._void
        if place == void:
            count = len(places)
            while void < count and places[void] is None:
                void += 1
            if void >= _SPARE and 2 * void >= count:
                del places[:void]
                self._first += void
                void = 0
            self._void = void
        return value

    def values(self) -> Iterator[V]:
        return iter([value for value in self._places if value is not None])
