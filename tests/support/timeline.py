"""Questions about a scripted run's log: intervals of generation, training and updates, seconds since the start."""

from __future__ import annotations

from testbed.core import actions as do
from testbed.core import events as said
from tests.support.scripted import Scripted

Interval = tuple[float, float]


def training(run: Scripted) -> list[Interval]:
    """From each `Train` to its last update."""
    ends: dict[int, float] = {e.batch: t for t, e in run.of(said.TrainStepFinished)}
    return [(t, ends[a.batch]) for t, a in run.of(do.Train)]


def generation(run: Scripted, engine: int | None = None) -> list[tuple[float, float, int]]:
    """(start, end, group) of every turn that ended in an engine."""
    starts: dict[tuple[int, int], tuple[float, int]] = {}
    turns = []
    for t, x in run.log:
        if isinstance(x, do.StartTurn):
            starts[x.trajectory, x.turn] = (t, x.group)
        elif isinstance(x, said.TurnFinished | said.TurnFailed) and (engine is None or x.engine == engine):
            start, group = starts[x.trajectory, x.turn]
            turns.append((start, t, group))
    return turns


def overlap(a: list[Interval], b: list[Interval]) -> float:
    """Seconds that lie in an interval of each, pair by pair."""
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


def overlap_of_phases(run: Scripted) -> float:
    return overlap(training(run), [(s, e) for s, e, _ in generation(run)])


def pauses(run: Scripted, engine: int) -> list[Interval]:
    """From `PauseEngine` to `EngineResumed`."""
    starts = [t for t, a in run.of(do.PauseEngine) if a.engine == engine]
    ends = [t for t, e in run.of(said.EngineResumed) if e.engine == engine]
    return list(zip(starts, ends, strict=True))


def publications(run: Scripted) -> dict[int, Interval]:
    """Version -> from `PrepareWeights` to the last engine that serves it."""
    begun = {a.version: t for t, a in run.of(do.PrepareWeights)}
    served: dict[int, float] = {e.version: t for t, e in run.of(said.EngineResumed)}
    return {v: (begun[v], t) for v, t in served.items() if v in begun}
