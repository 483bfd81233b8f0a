"""Which rank trains which trajectories, and which of them share a row (a micro-batch of packed sequences).

Pure and deterministic: the real trainer packs by it, and a simulation that knows what a row takes asks it how many
there are. It knows lengths only.
"""

from __future__ import annotations

from collections.abc import Sequence


def bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of `sizes` in bins of at most `capacity`; larger ones alone."""
    found: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        b = next((b for b, free in enumerate(room) if free >= sizes[i]), len(found))
        if b == len(found):
            found.append([])
            room.append(capacity)
        found[b].append(i)
        room[b] -= sizes[i]
    return found


def ranks_of(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of `sizes` (tokens) per rank: longest first to the rank with fewest tokens so far; at most 4/3 of the
    best possible maximum (R. Graham, 1969). In order within a rank; a rank may get none."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        shares[rank].append(i)
        load[rank] += sizes[i]
    return [sorted(share) for share in shares]


def rows_of(sizes: Sequence[int], capacity: int, ranks: int = 1) -> list[list[int]]:
    """Tokens of each row of each rank."""
    return [
        [sum(sizes[share[i]] for i in row) for row in bins([sizes[i] for i in share], capacity)]
        for share in ranks_of(sizes, ranks)
    ]
