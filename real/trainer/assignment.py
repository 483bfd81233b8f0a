"""Which groups make which optimizer update. Pure and deterministic; knows no process and no rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from real.errors import RealError
from real.records import Record


def updates_of(records: Sequence[Record], updates: int) -> list[list[int]]:
    """Indices of `records` per optimizer update: whole groups, in the batch's order (by their first member), as many
    groups in one update as in another (+-1), because an update's noise depends on how much it averages.

    Raises `RealError` if there are fewer groups than updates."""
    groups: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        groups.setdefault(record.group, []).append(i)
    if not 1 <= updates <= len(groups):
        raise RealError(f"trainer: {updates} updates of a batch of {len(groups)} groups; a group is not split")
    members = list(groups.values())
    cuts = [len(members) * u // updates for u in range(updates + 1)]
    return [[i for group in members[a:b] for i in group] for a, b in pairwise(cuts)]
