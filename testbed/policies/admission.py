"""May another group start?

A policy answers with the name of what holds it back, or with an empty string. N_submitted counts groups that were
submitted and not dropped since; B is `rollout_batch_size`; k batches are trained between two publications
(`update_weights_interval`); v counts the due publications that are over, which is the deployed version unless one was
given up or covered several. It knows counters only: no trajectories, no engines, no time."""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Protocol

from testbed.core.records import Progress
from testbed.scenario.rollout import (
    Admission as AdmissionConfig,
)
from testbed.scenario.rollout import (
    BoundedStaleness,
    FullyAsync,
    OneStepAhead,
    OverSampling,
    SyncBarrier,
)


class Admission(Protocol):
    """`why` names the rule in the journal."""

    why: str
    keeps_unfinished: bool
    """Groups that an early stop finds open go on in the next round, instead of being given up."""
    stopped: bool
    """The round is over, and the next one has not begun (as of the last `blocked_by`)."""

    def blocked_by(self, p: Progress) -> str:
        """`barrier`, `staleness_bound`, `capacity`, or "" if one more group may start now."""

    def next_task(self) -> int:
        """A task to run again (>= 0), or -1 for the next one of the data source. Called once per admitted group."""

    def early_stop(self, p: Progress) -> bool:
        """Whether the groups that are still open are to be abandoned now (asked when a group is generated)."""

    def abandoned(self, task: int) -> None:
        """The task of a group that an early stop abandoned."""


class Bounded(Admission):
    """N_submitted <= (v + eta + 1) B k after this submission, i.e. N_submitted < (v + eta + 1) B k before it (AReaL).

    eta = 0 is the synchronous barrier: the next batch starts when the previous one is trained and its weights serve.
    While a publication is on its way nothing starts that the deployed version does not allow.
    """

    def __init__(self, eta: float, why: str, blocked: str) -> None:
        self.eta = eta
        self.keeps_unfinished = self.stopped = False
        self.why = why
        self._blocked = blocked

    def blocked_by(self, p: Progress) -> str:
        bound = int((p.publications + self.eta + 1) * p.groups_per_batch * p.interval)
        return "" if p.submitted - p.dropped < bound else self._blocked

    def next_task(self) -> int:
        return -1

    def early_stop(self, p: Progress) -> bool:
        return False

    def abandoned(self, task: int) -> None:
        raise AssertionError("only over-sampling abandons tasks")


class OneStep(Bounded):
    """N_submitted <= (batches handed to the trainer + 1) B: batch k + 1 generates while batch k trains."""

    def __init__(self) -> None:
        super().__init__(1, "one_step_ahead", "barrier")

    def blocked_by(self, p: Progress) -> str:
        return "" if p.submitted - p.dropped < (p.batches_dequeued + 1) * p.groups_per_batch else self._blocked


class Capacity(Bounded):
    """A constant number of groups in flight: C groups, or C n trajectories when a slot frees per finished trajectory.

    `sample`: a whole group starts once n slots are free: open trajectories + n <= C n.
    """

    def __init__(self, config: FullyAsync) -> None:
        super().__init__(0, "fully_async", "capacity")
        self._groups = config.async_max_concurrent_groups
        self._by_sample = config.submission_granularity == "sample"

    def blocked_by(self, p: Progress) -> str:
        groups = self._groups or p.groups_per_batch
        if self._by_sample:
            free = p.open_trajectories + p.group_size <= groups * p.group_size
        else:
            free = p.open_groups < groups
        return "" if free else self._blocked


class Rounds(Bounded):
    """Synchronous rounds with early stop (RollPacker).

    Short round: start ceil(ratio B) groups, stop at B generated, collect the tasks of the rest. Long round: once B
    tasks are collected, run exactly those to the end. Each round belongs to one batch. A group that is lost (failed,
    filtered) is replaced, after the stop by exactly one. With partial rollout the rest stays open and counts among the
    next round's groups."""

    def __init__(self, config: OverSampling) -> None:
        super().__init__(0, "over_sampling:short", "barrier")
        self._ratio = config.over_sampling_ratio
        self._keep = config.long_rounds
        self.keeps_unfinished = config.partial_rollout
        self._collected: deque[int] = deque()
        self._again: int = 0
        self._round = -1
        self._long = False
        self._before = 0

    def blocked_by(self, p: Progress) -> str:
        size = p.groups_per_batch
        if p.batches_trained > self._round and p.publications >= p.batches_trained // p.interval:
            self._round = p.batches_trained
            self._before = p.submitted - p.dropped - (p.open_groups if self.keeps_unfinished else 0)
            self.stopped = False
            self._long = self._keep and len(self._collected) >= size
            self._again = size if self._long else 0
            self.why = "over_sampling:long" if self._long else "over_sampling:short"
        if self._round < p.batches_trained:
            return self._blocked
        if self.stopped and self.keeps_unfinished and self._alive(p) - p.open_groups < size:
            self.stopped = False  # one that was generated is lost: those that were set aside go on
        wanted = size if self._long or self.stopped else ceil(self._ratio * size)
        return "" if self._alive(p) < wanted else self._blocked

    def _alive(self, p: Progress) -> int:
        """Groups of this round that are being generated, or are generated and not lost."""
        return p.submitted - p.dropped - self._before

    def next_task(self) -> int:
        if not self._again:
            return -1
        self._again -= 1
        return self._collected.popleft()

    def early_stop(self, p: Progress) -> bool:
        stop = not self._long and self._alive(p) - p.open_groups >= p.groups_per_batch
        self.stopped |= stop
        return stop

    def abandoned(self, task: int) -> None:
        if self._keep:
            self._collected.append(task)


def admission(config: AdmissionConfig) -> Admission:
    """The policy that a scenario names."""
    match config:
        case SyncBarrier():
            return Bounded(0, "sync", "barrier")
        case OneStepAhead():
            return OneStep()
        case BoundedStaleness(max_head_offpolicyness=eta):
            return Bounded(eta, f"bounded:eta={eta:g}", "staleness_bound")
        case FullyAsync():
            return Capacity(config)
        case OverSampling():
            return Rounds(config)
