"""How many turns may run now? Over all engines, and in one engine.

Responsible for the limit. Refuses to know which turn is next, which engine it goes to and what a turn costs. Pure
state machines: times arrive on load reports, counts are handed in.

| type | may one more turn start? | is an engine full? |
|---|---|---|
| `unlimited` | yes | no |
| `fixed` | in flight < max_concurrent | no |
| `per_engine` | yes | turns there >= max_concurrent_per_engine |
| `static_batch` | yes | one of its turns has ended (or it has as many as it takes), and not all have |
| `kv_aimd` | in flight < limit, which follows the engines' KV use | no |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from testbed.core.events import LoadReported
from testbed.scenario import rollout

BINDING_FRACTION = 0.9
"""The limit binds while at least this fraction of it is in flight (prime-rl)."""

TRIM_COOLDOWN_POLLS = 6
"""Polls between two trims: a trim shows only when turns have ended (prime-rl)."""


class Unlimited:
    """Every turn is sent at once; the engine's own queue does the rest. Base of all limits.

    `in_flight` counts turns that were sent to an engine and have not ended.
    """

    report_interval_s: float | None = None
    """How often engines should report their load, seconds; None: not needed."""

    def may_start(self, in_flight: int) -> bool:
        """Whether one more turn may be sent. To be asked whenever a turn waits and something changed."""
        return True

    def engine_full(self, engine: int, in_flight_there: int) -> bool:
        """Whether this engine may get no further turn."""
        return False

    def observe(self, report: LoadReported) -> None:
        """One engine reports its load."""


class Fixed(Unlimited):
    """At most `limit` turns over all engines."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def may_start(self, in_flight: int) -> bool:
        return in_flight < self.limit


class PerEngine(Unlimited):
    """At most `limit` turns in each engine."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def engine_full(self, engine: int, in_flight_there: int) -> bool:
        return in_flight_there >= self.limit


class StaticBatch(Unlimited):
    """An engine is full from its first turn's end, or its `size`-th turn, until it is empty."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._filled: set[int] = set()

    def engine_full(self, engine: int, in_flight_there: int) -> bool:
        if not in_flight_there:
            self._filled.discard(engine)
        elif in_flight_there >= self.size:
            self._filled.add(engine)
        return engine in self._filled

    def left(self, engine: int, in_flight_there: int) -> bool:
        """A turn ended. Returns whether the engine takes no other for now."""
        if in_flight_there:
            self._filled.add(engine)
        return self.engine_full(engine, in_flight_there)


class KvAimd(Unlimited):
    """prime-rl's controller: the limit n on turns in flight follows KV use, without a cost model.

    Reports of one interval form a poll, one report of each engine. A poll is judged when as many engines have reported
    as in the last one, at the latest when the next begins. With u the largest kv_used / kv_total of the poll, and f
    its sum of running and waiting turns:

    | | if | then |
    |---|---|---|
    | cut | an engine retracted since its last report | n <- min(n, preemption_cut x f) |
    | trim | else, u > trim_above_kv_usage, and the last trim is 6 polls ago | n <- min(n, f x trim_to / u) |
    | grow | else, u < grow_below_kv_usage, and no engine had turns waiting in two polls running | see below |

    Until the next poll is judged, every turn that ends while f >= 0.9 n (the limit binds) raises the limit:
    n <- n x grow_factor ^ (1 / f), which makes `grow_factor` in one turnover of the pipeline. n stays within
    [min_inflight, max_inflight]. After a cut, polls are ignored up to and including the first that finds
    f <= n: what they say happened before the cut took effect.

    Ended turns are read from the argument of `may_start`: while the limit binds, turns wait for it, and it is asked
    after each end. The unit is a turn where prime-rl has an episode. Not taken over: cancelling the youngest above
    0.9, harsher cuts when overload returns, cuts on a long queue in the engines.
    """

    def __init__(self, config: rollout.AimdConcurrency) -> None:
        self.report_interval_s: float | None = config.report_interval_s
        self._half_interval_s = config.report_interval_s / 2
        self._config = config
        self._limit = self._bounded(config.initial_inflight)
        self._asked_at = 0  # in flight when `may_start` was last asked
        self._may_grow = False
        self._draining = False
        self._cooldown = 0  # polls until a trim is allowed
        self._retractions: dict[int, int] = {}  # of each engine, cumulative
        self._retracted = False  # since the last judgement
        self._waited: set[int] = set()  # engines with waiting turns in the last poll
        self._expected = math.inf  # engines in the last poll; unknown at first
        # The poll that is being collected.
        self._began_t = -math.inf
        self._judged = True
        self._engines: set[int] = set()
        self._waiting: set[int] = set()
        self._turns = 0
        self._usage = 0.0

    @property
    def limit(self) -> int:
        """Turns that may be in flight."""
        return int(self._limit)

    def may_start(self, in_flight: int) -> bool:
        if self._may_grow and in_flight < self._asked_at:
            self._grow(self._asked_at, in_flight)
        self._asked_at = in_flight
        return in_flight < self.limit

    def _grow(self, before: int, after: int) -> None:
        """before - after turns ended; those count that ended while the limit was binding."""
        counted = before - max(after, math.ceil(BINDING_FRACTION * self.limit) - 1)
        if counted > 0:
            self._limit = self._bounded(self._limit * self._config.grow_factor ** (counted / before))

    def observe(self, report: LoadReported) -> None:
        if report.t >= self._began_t + self._half_interval_s:
            if not self._judged:
                self._judge()  # an engine is missing: lost, or its pool is in another phase
            self._expected = len(self._engines) or math.inf
            self._waited = self._waiting
            self._begin_poll(report.t)
        engine = report.engine
        self._engines.add(engine)
        self._turns += report.running + report.waiting
        if report.waiting:
            self._waiting.add(engine)
        if report.kv_total_tokens:
            self._usage = max(self._usage, report.kv_used_tokens / report.kv_total_tokens)
        # An engine that was started again counts from 0.
        self._retracted |= report.retractions > self._retractions.get(engine, 0)
        self._retractions[engine] = report.retractions
        if not self._judged and len(self._engines) >= self._expected:
            self._judge()

    def _begin_poll(self, t: float) -> None:
        self._began_t = t
        self._judged = False
        self._engines = set()
        self._waiting = set()
        self._turns = 0
        self._usage = 0.0

    def _judge(self) -> None:
        config, usage = self._config, self._usage
        retracted, self._retracted = self._retracted, False
        self._judged = True
        self._may_grow = False
        self._cooldown = max(0, self._cooldown - 1)
        if self._draining:
            self._draining = self._turns > self.limit
        elif retracted:
            self._lower(self._turns * config.preemption_cut)
            self._draining = True
        elif usage > config.trim_above_kv_usage:
            if not self._cooldown:
                self._lower(self._turns * config.trim_to / usage)
                self._cooldown = TRIM_COOLDOWN_POLLS
        else:
            self._may_grow = usage < config.grow_below_kv_usage and not self._waited & self._waiting

    def _lower(self, target: float) -> None:
        """Rounded down; the addend keeps a target that is whole but for rounding errors (0.7 x 90 / 0.9) whole."""
        self._limit = min(self._limit, self._bounded(math.floor(target + 1e-9)))

    def _bounded(self, limit: float) -> float:
        return float(min(self._config.max_inflight, max(self._config.min_inflight, limit)))


_POLICIES: dict[str, Callable[[Any], Unlimited]] = {
    "unlimited": lambda config: Unlimited(),
    "fixed": lambda config: Fixed(config.max_concurrent),
    "per_engine": lambda config: PerEngine(config.max_concurrent_per_engine),
    "static_batch": lambda config: StaticBatch(config.batch_size),
    "kv_aimd": KvAimd,
}


def concurrency(config: rollout.Concurrency) -> Unlimited:
    """The limit that the scenario asks for."""
    return _POLICIES[config.type](config)
