"""Which source serves which target of a point-to-point weight copy?

Sources hold every weight (trainer ranks after their gather); a target is one engine rank, which takes only its shard.
Pure arithmetic over counts and sizes; how bytes travel is the backend's business."""

from __future__ import annotations

from collections.abc import Sequence


def plan_sources(sources: int, target_bytes: Sequence[int]) -> tuple[int, ...]:
    """The source planned for each target: the first min(sources, targets) one to one, then each to the source with the
    fewest bytes to serve, ties to the lowest index. Raises ValueError without a source."""
    if sources < 1:
        raise ValueError(f"a point-to-point copy needs at least one source, not {sources}")
    load = [0] * sources
    plan: list[int] = []
    for target, size in enumerate(target_bytes):
        source = target if target < sources else min(range(sources), key=lambda s: (load[s], s))
        load[source] += size
        plan.append(source)
    return tuple(plan)


def spread_pieces(planned: int, sources: int, pieces: int) -> tuple[tuple[int, ...], ...]:
    """Pieces of one target by source, so that it reads from several sources in parallel: piece k comes from source
    (planned + k) mod sources."""
    return tuple(tuple(range((source - planned) % sources, pieces, sources)) for source in range(sources))
