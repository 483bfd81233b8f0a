"""What a real run's journal says of the trainer, of weight updates and of phase switches: seconds of each, from the
action that asks for it to the event that answers.

A fold. It refuses to know what is fitted to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from testbed.calibration.speed import times
from testbed.core.actions import (
    Action,
    CopyWeights,
    PauseEngine,
    PrepareWeights,
    RequantizeWeights,
    ResumeEngine,
    SwitchPool,
    Train,
)
from testbed.core.events import (
    EnginePaused,
    EngineReady,
    EngineResumed,
    Event,
    PoolSwitched,
    TrainStepFinished,
    WeightsCopied,
    WeightsPrepared,
)
from testbed.packing import rows_of

_ANSWERS = {EnginePaused: "pause_s", WeightsCopied: "copy_s", EngineReady: "requantize_s", EngineResumed: "resume_s"}


class TrainPoint(Struct, frozen=True):
    """One optimizer update."""

    rows: tuple[int, ...]
    """Prompt, output and observation tokens of each row of the rank with most of them."""
    seconds: float


class Phases(Struct):
    """`updates`: path -> part -> (bytes of the version, seconds); `switches`: phase -> seconds; `engines`: path ->
    participants. `max_tokens_per_gpu` and `ranks`: of the trainer."""

    max_tokens_per_gpu: int
    ranks: int
    train: list[TrainPoint] = field(default_factory=list)
    updates: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    switches: dict[str, list[float]] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    _asked: dict[tuple[str, int], float] = field(default_factory=dict)
    _path: str = ""
    _bytes: int = 0
    _batch: Train | None = None
    _since: float = 0.0

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        """One core call: the event, then its actions, which happen at the event's time."""
        t = event.t
        if isinstance(event, TrainStepFinished):
            self._trained(t, event)
        elif isinstance(event, WeightsPrepared):
            self._bytes = event.bytes
            self._took("prepare_s", -1, t)
        elif isinstance(event, PoolSwitched):
            since = self._asked.pop((event.phase, event.pool), None)
            if since is not None:
                self.switches.setdefault(event.phase, []).append(t - since)
        elif isinstance(event, (EnginePaused, WeightsCopied, EngineReady, EngineResumed)):
            self._took(_ANSWERS[type(event)], event.engine, t)
        for a in actions:
            if isinstance(a, Train):
                self._batch, self._since = a, t
            elif isinstance(a, PrepareWeights):
                self._path = a.path
                self.engines[a.path] = max(self.engines.get(a.path, 0), len(a.participants))
                self._asked["prepare_s", -1] = t
            elif isinstance(a, SwitchPool):
                self._asked[a.phase, a.pool] = t
            elif isinstance(a, PauseEngine):
                self._asked["pause_s", a.engine] = t
            elif isinstance(a, CopyWeights):
                self._asked["copy_s", a.engine] = t
            elif isinstance(a, RequantizeWeights):
                self._asked["requantize_s", a.engine] = t
            elif isinstance(a, ResumeEngine):
                self._asked["resume_s", a.engine] = t

    def times(self, factor: float) -> Phases:
        """All seconds so many times as long."""
        return Phases(
            self.max_tokens_per_gpu,
            self.ranks,
            [times(p, factor) for p in self.train],
            {
                path: {part: [(size, factor * s) for size, s in taken] for part, taken in parts.items()}
                for path, parts in self.updates.items()
            },
            {phase: [factor * s for s in taken] for phase, taken in self.switches.items()},
            self.engines,
        )

    def _took(self, part: str, engine: int, t: float) -> None:
        since = self._asked.pop((part, engine), None)
        if since is not None:
            self.updates.setdefault(self._path, {}).setdefault(part, []).append((self._bytes, t - since))

    def _trained(self, t: float, e: TrainStepFinished) -> None:
        a = self._batch
        if a is None or a.batch != e.batch:
            return
        size, rest = divmod(len(a.experiences), a.updates)
        start = e.update * size + min(e.update, rest)
        part = a.experiences[start : start + size + (e.update < rest)]
        lengths = [x.prompt_tokens + x.output_tokens + x.observation_tokens for x in part]
        rows = max(rows_of(lengths, self.max_tokens_per_gpu, self.ranks), key=sum)
        self.train.append(TrainPoint(tuple(rows), t - self._since))
        self._since = t
