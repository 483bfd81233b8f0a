"""Which ready groups form the batch?

An order is a sort key over ready lots (a lot is a group, or a single trajectory where the baseline does not compare
members); the buffer keeps a heap by it. Filters reject a lot when it becomes ready. It refuses to know ages:
`staleness` does."""

from __future__ import annotations

from typing import Protocol

from testbed.core.records import Lot, Progress
from testbed.scenario.experience import (
    Fifo,
    FreshestFirst,
    OldestFirst,
    Selection,
    SelectionOrder,
    WindowedFifo,
)


class Order(Protocol):
    """`why` names the rule in the journal."""

    why: str
    in_turn: bool
    """Whether a lot waits for those before it in the order, ready or not."""

    def key(self, lot: Lot) -> tuple[int, int]:
        """Smaller is taken first. Fixed once the lot is ready."""

    def outside(self, lot: Lot, p: Progress) -> bool:
        """Whether the lot can never be selected again."""


class ByReadiness(Order):
    """fifo: in the order of becoming ready."""

    why = "fifo"
    in_turn = False

    def key(self, lot: Lot) -> tuple[int, int]:
        return (lot.sequence, 0)

    def outside(self, lot: Lot, p: Progress) -> bool:
        return False


class Windowed(ByReadiness):
    """fifo among lots with dispatch version >= deployed version - window (NeMo RL's start_weight window)."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.why = f"windowed_fifo:{window}"

    def outside(self, lot: Lot, p: Progress) -> bool:
        return lot.dispatch_version < p.deployed - self._window


class Freshest(ByReadiness):
    """Newest oldest-version first; ties by readiness."""

    why = "freshest_first"

    def key(self, lot: Lot) -> tuple[int, int]:
        return (-lot.oldest_version, lot.sequence)


class Oldest(ByReadiness):
    """In the order of submission, and strictly: a batch waits for the oldest that is not ready.

    Sample N <= (i + eta + 1) B then lies in batch <= i + eta + 1, so staleness <= eta (AReaL). If later samples could
    overtake a slow one, it would age without bound."""

    why = "oldest_first"
    in_turn = True

    def key(self, lot: Lot) -> tuple[int, int]:
        return (lot.submitted_index, lot.sequence)


def order(config: SelectionOrder) -> Order:
    match config:
        case Fifo():
            return ByReadiness()
        case WindowedFifo(window=w):
            return Windowed(w)
        case FreshestFirst():
            return Freshest()
        case OldestFirst():
            return Oldest()


def rejected(config: Selection, lot: Lot) -> str:
    """Reason to drop a lot that just became ready, or "". Zero variance: all rewards of a group are equal (DAPO)."""
    if config.filter_zero_variance and len(lot.members) > 1:
        first = lot.members[0].reward
        if all(m.reward == first for m in lot.members):
            return "zero_variance"
    return ""
