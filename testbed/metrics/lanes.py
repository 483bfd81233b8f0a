"""GPU time as a partition: every GPU is in exactly one state at any time, so the causes sum to wall time x GPUs.

A pool is a lane; `held[state]` counts its GPUs in a state. When GPUs change state, the two states concerned are
settled: O(1). Idle engines share one pseudo-state whose cause is global, because it changes rarely and for all of them
at once. It refuses to know events, and why a GPU is in a state.
"""

from __future__ import annotations

from math import ceil

from testbed.metrics.summary import CAUSES
from testbed.scenario.layout import Layout, PoolSpec
from testbed.scenario.scenario import Scenario

(
    GENERATE,
    TAIL,
    TRAIN,
    SIGNALS,
    WEIGHT_UPDATE,
    PHASE_SWITCH,
    _RECOMPUTE_KV,
    _GENERATE_DROPPED,
    IDLE_LONGEST,
    IDLE_TRAINER,
    IDLE_DATA,
    IDLE_BUFFER_FULL,
    IDLE_NO_WORK,
) = range(len(CAUSES))
IDLE = len(CAUSES)
"""Pseudo-state of an engine that is idle for the current global cause."""
NONE = -1
"""An engine whose pool does not generate, a pool whose engines have states of their own."""


def tail_slots(scenario: Scenario, layout: Layout) -> int:
    """Turns that fill an engine: its slots, or its even part of a batch where that is less."""
    a_part = ceil(scenario.algorithm.trajectories_per_batch / max(1, len(layout.engines)))
    return min(scenario.rollout.engine.max_running_requests, a_part)


def split_generate(seconds: dict[str, float], recompute_s: float, dropped_share: float) -> float:
    """Move GPU-seconds of recomputed prompts and of dropped tokens out of `generate`, in place; the sum stays.

    `recompute_s` is taken from `generate`, then from `generate_tail`; what neither can give is returned.
    `generate_dropped` is `dropped_share` (dropped over generated tokens) of what is left in `generate`: a tail is slow
    for other reasons.
    """
    left = recompute_s
    for cause in ("generate", "generate_tail"):
        moved = min(left, seconds[cause])
        seconds[cause] -= moved
        seconds["recompute_kv"] += moved
        left -= moved
    dropped = seconds["generate"] * min(1.0, dropped_share)
    seconds["generate"] -= dropped
    seconds["generate_dropped"] += dropped
    return left


class Lane:
    """The GPUs of one pool, and how many of them are in which state since when."""

    __slots__ = (
        "engines",
        "gpus",
        "held",
        "last",
        "name",
        "phase",
        "recompute",
        "seconds",
        "shared",
        "state",
        "trains",
    )

    def __init__(self, pool: PoolSpec) -> None:
        self.name = pool.name
        self.gpus = pool.gpus
        self.shared = pool.shared
        self.trains = pool.trains
        self.phase = ""
        self.state = NONE
        self.engines: list[EngineTime] = []
        self.held = [0] * (IDLE + 1)
        self.last = [0.0] * (IDLE + 1)
        self.seconds = [0.0] * (IDLE + 1)
        self.recompute = 0.0
        """GPU-seconds of prompt tokens computed again, as engines reported them."""

    @property
    def kind(self) -> str:
        return "shared" if self.shared else "trainer" if self.trains else "engines"

    def shift(self, old: int, new: int, gpus: int, t: float) -> None:
        """`gpus` of the lane change from one state to another."""
        seconds, held, last = self.seconds, self.held, self.last
        seconds[old] += held[old] * (t - last[old])
        seconds[new] += held[new] * (t - last[new])
        last[old] = last[new] = t
        held[old] -= gpus
        held[new] += gpus

    def settle(self, t: float, idle_cause: int) -> None:
        """Bring all states up to `t`; what was idle goes to its cause."""
        for state in range(IDLE + 1):
            self.seconds[state] += self.held[state] * (t - self.last[state])
            self.last[state] = t
        self.settle_idle(t, idle_cause)

    def settle_idle(self, t: float, idle_cause: int) -> None:
        self.seconds[idle_cause] += self.seconds[IDLE] + self.held[IDLE] * (t - self.last[IDLE])
        self.seconds[IDLE] = 0.0
        self.last[IDLE] = t


class EngineTime:
    """One engine: what decides its state."""

    __slots__ = ("gpus", "in_flight", "lane", "lost", "paused", "recompute_s", "state")

    def __init__(self, lane: Lane, gpus: int) -> None:
        self.lane = lane
        self.gpus = gpus
        self.in_flight = 0
        self.paused = False
        self.lost = False
        self.state = NONE
        self.recompute_s = 0.0
