"""How long publications of weights take, part by part, from the events of each participant. Seconds.

A publication is measured when its last participant has resumed with the new version. Participants that pause after
others have resumed are a later wave; drain, copy, requantise and barrier are added over the waves. A wave drains from
the moment its participants may be asked to pause (the weights are prepared, or the wave before is over) until the last
one is paused: under `finish` an engine is asked only when its requests have ended. It refuses to know what the parts
overlap with: `gpu_time` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from testbed.core.actions import CopyWeights, PauseEngine, PrepareWeights, StartTurn
from testbed.core.events import (
    EngineLost,
    EnginePaused,
    EngineReady,
    EngineResumed,
    PoolSwitched,
    WeightsCopied,
    WeightsPrepared,
    WeightUpdateFailed,
)
from testbed.metrics.fold import Handlers
from testbed.metrics.summary import WeightUpdate

PARTS = ("prepare_s", "drain_s", "copy_s", "requantize_s", "barrier_s", "pause_s", "total_s")


class _Participant:
    """Times of one engine in one publication."""

    __slots__ = ("asked", "copied", "copy_asked", "paused", "ready", "resumed")

    def __init__(self, t: float) -> None:
        self.asked = self.paused = self.copy_asked = self.copied = self.ready = self.resumed = t


class _Publication:
    __slots__ = ("begun", "bytes", "engines", "failed", "path", "prepared", "resumed", "start", "version", "waiting")

    def __init__(self, version: int, path: str, participants: tuple[int, ...], t: float) -> None:
        self.version = version
        self.path = path
        self.start = self.prepared = t
        self.begun = -1.0
        """When its participants could be asked to pause: prepared, and their pool generates. -1: not yet."""
        self.bytes = 0
        self.failed = False
        self.waiting = set(participants)
        self.engines: dict[int, _Participant] = {}
        self.resumed: dict[int, _Participant] = {}

    def waves(self) -> list[list[_Participant]]:
        """Participants that shared a barrier: a later wave is asked to pause when an earlier one has resumed."""
        waves: list[list[_Participant]] = []
        last_resumed = -1.0
        for p in sorted(self.resumed.values(), key=lambda p: p.asked):
            if waves and p.asked < last_resumed:
                waves[-1].append(p)
                last_resumed = max(last_resumed, p.resumed)
            else:
                waves.append([p])
                last_resumed = p.resumed
        return waves

    def parts(self) -> dict[str, float]:
        all_of = list(self.resumed.values())
        seconds = {
            "prepare_s": self.prepared - self.start,
            "pause_s": sum(p.resumed - p.paused for p in all_of) / len(all_of),
            "total_s": max(p.resumed for p in all_of) - self.start,
            "drain_s": 0.0,
            "copy_s": 0.0,
            "requantize_s": 0.0,
            "barrier_s": 0.0,
        }
        begun = self.begun
        for wave in self.waves():
            ready = [p.ready for p in wave]
            begun = begun if begun >= 0 else min(p.asked for p in wave)
            seconds["drain_s"] += max(p.paused for p in wave) - begun
            begun = max(p.resumed for p in wave)
            seconds["copy_s"] += max(p.copied for p in wave) - min(p.copy_asked for p in wave)
            seconds["requantize_s"] += sum(p.ready - p.copied for p in wave) / len(wave)
            seconds["barrier_s"] += max(ready) - min(ready)
        return seconds


class Updates:
    """The fold. Sums since the last `take`."""

    def __init__(self) -> None:
        self._open: dict[int, _Publication] = {}
        self._of_engine: dict[int, _Publication] = {}
        self._effective: tuple[float, frozenset[int]] | None = None
        """When the last publication took effect, and where, until a turn has started on it."""
        self._now: defaultdict[str, float] = defaultdict(float)
        self.path = ""
        """Of the last publication."""
        self.handlers: Handlers = {
            PrepareWeights: self._prepare,
            WeightsPrepared: self._prepared,
            PoolSwitched: self._pool_switched,
            PauseEngine: self._pause,
            EnginePaused: self._paused,
            CopyWeights: self._copy,
            WeightsCopied: self._copied,
            EngineReady: self._ready,
            EngineResumed: self._resumed,
            EngineLost: self._lost,
            WeightUpdateFailed: self._failed,
            StartTurn: self._start_turn,
        }

    def take(self) -> Mapping[str, float]:
        """Sums since the last time (`mean_update` divides them), and start again."""
        taken, self._now = self._now, defaultdict(float)
        return taken

    def _prepare(self, t: float, a: PrepareWeights) -> None:
        for stale in [p for p in self._open.values() if p.failed or p.version == a.version]:
            self._forget(stale)
        self._open[a.version] = _Publication(a.version, a.path, a.participants, t)

    def _prepared(self, t: float, e: WeightsPrepared) -> None:
        if e.version in self._open:
            self._open[e.version].prepared = self._open[e.version].begun = t
            self._open[e.version].bytes = e.bytes

    def _pool_switched(self, t: float, e: PoolSwitched) -> None:
        """Engines of a shared pool are asked once their pool generates again."""
        for publication in self._open.values():
            if publication.begun >= 0 and not publication.engines and e.phase == "generate":
                publication.begun = t

    def _pause(self, t: float, a: PauseEngine) -> None:
        publication = self._open.get(a.version)
        if publication is not None:
            self._of_engine[a.engine] = publication
            publication.engines[a.engine] = _Participant(t)

    def _participant(self, engine: int) -> _Participant | None:
        publication = self._of_engine.get(engine)
        return publication.engines.get(engine) if publication else None

    def _paused(self, t: float, e: EnginePaused) -> None:
        if p := self._participant(e.engine):
            p.paused = p.copy_asked = p.copied = p.ready = t

    def _copy(self, t: float, a: CopyWeights) -> None:
        publication = self._open.get(a.version)
        if publication is None:
            return
        self._of_engine[a.engine] = publication
        publication.waiting.add(a.engine)
        publication.engines.setdefault(a.engine, _Participant(t)).copy_asked = t

    def _copied(self, t: float, e: WeightsCopied) -> None:
        if p := self._participant(e.engine):
            p.copied = p.ready = t

    def _ready(self, t: float, e: EngineReady) -> None:
        if p := self._participant(e.engine):
            p.ready = t

    def _resumed(self, t: float, e: EngineResumed) -> None:
        publication = self._of_engine.pop(e.engine, None)
        if publication is None:
            return
        p = publication.engines[e.engine]
        p.resumed = t
        if e.version == publication.version:
            publication.resumed[e.engine] = p
        publication.waiting.discard(e.engine)
        self._close_if_complete(publication, t)

    def _lost(self, t: float, e: EngineLost) -> None:
        self._of_engine.pop(e.engine, None)
        for publication in list(self._open.values()):
            if e.engine in publication.waiting:
                publication.waiting.discard(e.engine)
                self._close_if_complete(publication, t)

    def _failed(self, t: float, e: WeightUpdateFailed) -> None:
        publication = self._open.get(e.version)
        if publication is None:
            return
        if not publication.failed:
            publication.failed = True
            self._now["failed"] += 1
        publication.waiting.discard(e.engine)
        if e.engine < 0:
            self._forget(publication)
        elif publication.resumed:
            self._close_if_complete(publication, t)

    def _close_if_complete(self, publication: _Publication, t: float) -> None:
        if publication.waiting:
            return
        self._forget(publication)
        if publication.resumed:
            self._now["count"] += 1
            self._now["bytes"] += publication.bytes
            for part, seconds in publication.parts().items():
                self._now[part] += seconds
            self.path = publication.path
            self._effective = (t, frozenset(publication.resumed))

    def _forget(self, publication: _Publication) -> None:
        self._open.pop(publication.version, None)
        for engine in [e for e, p in self._of_engine.items() if p is publication]:
            del self._of_engine[engine]

    def _start_turn(self, t: float, a: StartTurn) -> None:
        self.request(t, a.engine)

    def request(self, t: float, engine: int) -> None:
        """An engine gets one."""
        if self._effective is not None and engine in self._effective[1]:
            self._now["first_requests"] += 1
            self._now["effective_s"] += t - self._effective[0]
            self._effective = None


def mean_update(sums: Mapping[str, float], path: str) -> WeightUpdate:
    """Means per publication, from what `take` gave, added up."""
    count = int(sums.get("count", 0))
    return WeightUpdate(
        count=count,
        failed=int(sums.get("failed", 0)),
        path=path,
        **{part: sums.get(part, 0.0) / max(1, count) for part in ("bytes", *PARTS)},
        effective_to_first_request_s=sums.get("effective_s", 0.0) / max(1.0, sums.get("first_requests", 0.0)),
    )
