"""When is experience stored, and when is it selectable?

Two roles of one interface: `insert_when_ready` holds ready lots only and may refuse them when full; `store_then_ready`
reserves a place at dispatch and changes its status. "In the buffer" is never "ready". A buffer keeps ready lots in the
order of a selection policy; it knows no versions, no time and no trainer."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import floor
from typing import Protocol

from testbed.core.records import Lot
from testbed.policies.selection import Order
from testbed.scenario.experience import Buffer as BufferConfig
from testbed.scenario.experience import InsertWhenReady, StoreThenReady


class Buffer(Protocol):
    """Places for lots."""

    capacity: int
    """Lots."""

    def admits(self, lots: int) -> bool:
        """Whether a group of this many lots may be dispatched now, as far as the buffer is concerned."""

    def reserve(self, lots: int) -> None:
        """A group of this many lots was dispatched (or has that many more than expected)."""

    def release(self, lots: int) -> None:
        """Lots that were reserved ended before they became ready."""

    def ready(self, lot: Lot) -> tuple[Lot | None, Lot | None]:
        """A lot became ready. (waits, evicted): if the buffer is full, the lot that waits outside or the one that made
        room."""

    def take(self) -> Lot:
        """The first ready lot by the selection order, removed. Raises IndexError if none is ready."""

    def taken(self) -> list[Lot]:
        """Call after taking: lots that waited outside and are stored now."""

    def give_back(self, lot: Lot) -> None:
        """A taken lot returns, ready as before (not enough for a batch, or to be reused)."""

    @property
    def present(self) -> int:
        """Lots in the buffer, ready or not."""

    @property
    def num_ready(self) -> int:
        """Selectable lots."""

    def lots(self) -> list[Lot]:
        """Every ready lot, stored or waiting outside, in no order."""


class _Ready:
    """A heap of ready lots by the selection order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: list[tuple[tuple[int, int], int, Lot]] = []

    def _push(self, lot: Lot) -> None:
        heappush(self._heap, (self._order.key(lot), lot.sequence, lot))

    def take(self) -> Lot:
        return heappop(self._heap)[2]

    @property
    def num_ready(self) -> int:
        return len(self._heap)


class ReadyBuffer(_Ready):
    """insert_when_ready: bounded, complete groups only (Miles: capacity floor(2.0 x rollout_batch_size) groups)."""

    def __init__(self, order: Order, capacity: int, drop_oldest: bool) -> None:
        super().__init__(order)
        self.capacity = capacity
        self._drop_oldest = drop_oldest
        self._outside: deque[Lot] = deque()
        self._arrival: deque[Lot] = deque()

    def admits(self, lots: int) -> bool:
        return not self._outside

    def reserve(self, lots: int) -> None:
        return

    def release(self, lots: int) -> None:
        return

    def ready(self, lot: Lot) -> tuple[Lot | None, Lot | None]:
        if len(self._heap) < self.capacity:
            self._push(lot)
            return None, None
        if self._drop_oldest:
            evicted = self._replace(min(self._heap, key=lambda e: e[1]), lot)
            return None, evicted
        waits = lot
        if self._order.in_turn:
            last = max(self._heap)
            if self._order.key(lot) < last[0]:
                waits = self._replace(last, lot)
        self._outside.append(waits)
        return waits, None

    def _replace(self, entry: tuple[tuple[int, int], int, Lot], lot: Lot) -> Lot:
        """`lot` takes the place of the entry, whose lot is returned."""
        self._heap.remove(entry)
        heapify(self._heap)
        self._push(lot)
        return entry[2]

    def taken(self) -> list[Lot]:
        stored = []
        while self._outside and len(self._heap) < self.capacity:
            lot = min(self._outside, key=self._order.key) if self._order.in_turn else self._outside[0]
            self._outside.remove(lot)
            self._push(lot)
            stored.append(lot)
        return stored

    def give_back(self, lot: Lot) -> None:
        self._push(lot)

    @property
    def present(self) -> int:
        return len(self._heap)

    def lots(self) -> list[Lot]:
        return [e[2] for e in self._heap] + list(self._outside)


class SlotBuffer(_Ready):
    """store_then_ready: reserve at dispatch, commit when generated, selectable when ready (NeMo RL, ROLL, verl V1)."""

    def __init__(self, order: Order, capacity: int) -> None:
        super().__init__(order)
        self.capacity = capacity
        self._reserved = 0

    def admits(self, lots: int) -> bool:
        return self._reserved + lots <= self.capacity

    def reserve(self, lots: int) -> None:
        self._reserved += lots

    def release(self, lots: int) -> None:
        self._reserved -= lots

    def ready(self, lot: Lot) -> tuple[Lot | None, Lot | None]:
        self._push(lot)
        return None, None

    def take(self) -> Lot:
        lot = super().take()
        self._reserved -= 1
        return lot

    def taken(self) -> list[Lot]:
        return []

    def give_back(self, lot: Lot) -> None:
        self._reserved += 1
        self._push(lot)

    @property
    def present(self) -> int:
        return self._reserved

    def lots(self) -> list[Lot]:
        return [e[2] for e in self._heap]


def buffer(
    config: BufferConfig, order: Order, lots_per_batch: int, staleness_bound: int, lots_per_group: int = 1
) -> Buffer:
    """The buffer that a scenario names; capacities are in lots.

    A group reserves its lots at once, so slots beyond a batch are needed where some of a group's lots were lost singly.
    """
    match config:
        case InsertWhenReady(async_data_buffer_capacity_factor=factor, put_when_full=put):
            return ReadyBuffer(order, floor(factor * lots_per_batch), put == "drop_oldest")
        case StoreThenReady(max_buffered_groups=given):
            slots = given * lots_per_group if given else lots_per_batch * (staleness_bound + 1)
            return SlotBuffer(order, max(slots, lots_per_batch + lots_per_group - 1))
