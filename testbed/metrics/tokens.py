"""Tokens generated, prompt tokens reused or computed again, and generated tokens that no loss used, by reason.

Counts since the last `take`. It refuses to know what a batch trained: `batch` does.
"""

from __future__ import annotations

from collections import Counter

from testbed.core.actions import Retire
from testbed.core.events import EngineJoined, EngineResumed, TurnFailed, TurnFinished
from testbed.metrics.fold import Handlers
from testbed.metrics.sketch import Sketch
from testbed.metrics.trajectory import Lives
from testbed.scenario.layout import Layout


class TokenCounts:
    """What one stretch of time added up to."""

    __slots__ = (
        "cached",
        "dropped_tokens",
        "dropped_trajectories",
        "generated",
        "kv_age",
        "prompt",
        "recomputed",
        "retractions",
    )

    def __init__(self) -> None:
        self.generated = 0
        """Output tokens of all turns, those of lost model calls included."""
        self.prompt = 0
        self.cached = 0
        self.recomputed = 0
        self.retractions = 0
        self.kv_age = Sketch()
        self.dropped_tokens: Counter[str] = Counter()
        self.dropped_trajectories: Counter[str] = Counter()

    def add(self, other: TokenCounts) -> None:
        self.generated += other.generated
        self.prompt += other.prompt
        self.cached += other.cached
        self.recomputed += other.recomputed
        self.retractions += other.retractions
        self.kv_age.merge(other.kv_age)
        self.dropped_tokens.update(other.dropped_tokens)
        self.dropped_trajectories.update(other.dropped_trajectories)


class Tokens:
    """The fold. It ends a trajectory's `Life`, whose tokens it counts; `keeps_kv`: the transition rule is `kv:
    keep`."""

    def __init__(self, layout: Layout, lives: Lives, keeps_kv: bool) -> None:
        self._lives = lives
        self._keeps_kv = keeps_kv
        self._deployed = [0] * len(layout.engines)
        self._now = TokenCounts()
        self.handlers: Handlers = {
            TurnFinished: self._turn_finished,
            TurnFailed: self._turn_failed,
            Retire: self._retire,
            EngineResumed: self._serves,
            EngineJoined: self._serves,
        }

    def take(self) -> TokenCounts:
        """The counts since the last time, and start again."""
        taken, self._now = self._now, TokenCounts()
        return taken

    def _turn_finished(self, t: float, e: TurnFinished) -> None:
        self.finish_turn(
            e.engine,
            e.prompt_tokens,
            e.output_tokens,
            e.cached_tokens,
            e.recomputed_tokens,
            e.kv_version,
            e.retractions,
        )

    def finish_turn(
        self, engine: int, prompt: int, outputs: int, cached: int, again: int, kv_version: int, retractions: int
    ) -> None:
        """Tokens, and the version of the oldest KV it reused (-1: none)."""
        now = self._now
        now.generated += outputs
        now.prompt += prompt
        now.cached += cached
        now.recomputed += again
        now.retractions += retractions
        if self._keeps_kv and kv_version >= 0:
            now.kv_age.add(self._deployed[engine] - kv_version)

    def _turn_failed(self, t: float, e: TurnFailed) -> None:
        self._now.generated += e.output_tokens
        if e.output_tokens and self._lives.get(e.trajectory) is None:
            self._now.dropped_tokens[e.reason] += e.output_tokens

    def _retire(self, t: float, a: Retire) -> None:
        trained = a.outcome == "trained"
        reason = a.reason or a.outcome
        for trajectory in a.trajectories:
            life = self._lives.pop(trajectory)
            if life is not None and not trained:
                self._now.dropped_tokens[reason] += life.tokens + life.lost_tokens
        if not trained:
            self._now.dropped_trajectories[reason] += len(a.trajectories)

    def _serves(self, t: float, e: EngineResumed | EngineJoined) -> None:
        self._deployed[e.engine] = e.version
