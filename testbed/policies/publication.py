"""When are weights published, by which path, under which rule, and who waits for whom?

Pure decisions over counters, expected costs and engine indexes. How a path moves bytes is the backend's business; what
the steps of an update are is `testbed.core.publication`'s."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.core.events import PathCost
from testbed.scenario.weights import CheapestPath, FixedPath, Path, Waves, Weights

RENDEZVOUS: frozenset[Path] = frozenset({"broadcast"})
"""Paths whose copy is one collective: it starts when every engine of the wave is paused."""


def is_due(weights: Weights, batches_trained: int) -> bool:
    """After every `update_weights_interval` batches."""
    return batches_trained % weights.update_weights_interval == 0


def choose_path(weights: Weights, costs: Sequence[PathCost]) -> tuple[Path, str]:
    """(path, why). `cheapest` compares prepare + transfer + apply + requantise together, ties by the order of `among`.

    Raises ValueError if `cheapest` has no cost for any of its paths.
    """
    match weights.path:
        case FixedPath(update_weight_transfer_mode=path):
            return path, "fixed"
        case CheapestPath(among=among):
            known = {c.path: c.total_s for c in costs}
            options = [(known[p], i, p) for i, p in enumerate(among) if p in known]
            if not options:
                raise ValueError(f"no expected cost for any of the paths {', '.join(among)}")
            total, _, path = min(options)
            return path, f"cheapest: {total:.3f} s of " + ", ".join(f"{p} {t:.3f}" for t, _, p in options)


def waves(weights: Weights, participants: Sequence[int]) -> list[tuple[int, ...]]:
    """Participants in the groups that share a barrier."""
    size = weights.participation.size if isinstance(weights.participation, Waves) else max(len(participants), 1)
    return [tuple(participants[i : i + size]) for i in range(0, len(participants), size)]
