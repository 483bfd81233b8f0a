"""What one batch held, folded from its `Train` action: versions, lengths, waits, and where its trajectories' time went.

A batch is kept as sums and counts until its last update is done, then added to the run's totals, if it is measured.
Trajectories that a batch uses again (`use` > 0) count as trained tokens, for they carry loss again, and in nothing
else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import get_args

from testbed.core.actions import Experience, Train
from testbed.metrics.sketch import Sketch
from testbed.metrics.staleness import Sizes, VersionSet, at_completion, at_dequeue
from testbed.metrics.summary import StalenessReading, TrajectoryTime
from testbed.metrics.trajectory import Lives
from testbed.scenario.experience import Measure

LOST_TURN = "lost_turn"
"""Reason of dropped tokens whose model call was lost or aborted and sent again, in a trajectory that was trained."""
MEASURE_NAMES: tuple[Measure, ...] = get_args(Measure)


_VERSIONS = attrgetter(*VersionSet._fields[:6])


class BatchFold:
    """Sums over one batch."""

    def __init__(self, train: Train, lives: Lives, update_times: Sequence[float], sizes: Sizes) -> None:
        """`update_times`: of all optimizer updates so far, from which the trainer version at completion is read."""
        self.batch = train.batch
        self.updates = train.updates
        self.trained_tokens = sum([e.output_tokens - e.masked_tokens for e in train.experiences])
        """Actor tokens that carry loss, counted at each use."""
        self.reward_mean = sum([e.reward for e in train.experiences]) / max(len(train.experiences), 1)
        new = [e for e in train.experiences if e.use == 0]
        self.trajectories = len(new)
        self.trained_once_tokens = sum([e.output_tokens - e.masked_tokens for e in new])
        self.masked_tokens = sum([e.masked_tokens for e in new])
        self.corrected = sum([e.corrected for e in new])
        self.lengths = [e.output_tokens for e in new]
        self.ready_waits = {e.group: e.dequeued_t - e.group_ready_t for e in new}
        """Group -> seconds that it waited for this batch."""
        per_version = sizes.trajectories_per_batch * sizes.batches_per_version
        self.versions = Counter(
            [
                (
                    *_VERSIONS(e),
                    e.submitted_index // per_version * per_version,
                    bisect_right(update_times, e.generated_t),
                )
                for e in new
            ]
        )
        self._sum_times(new, lives)

    def _sum_times(self, new: list[Experience], lives: Lives) -> None:
        self.time = time = TrajectoryTime()
        time.total = sum([e.dequeued_t - e.submitted_t for e in new])
        time.waits_for_signals = sum([e.ready_t - e.generated_t for e in new])
        time.waits_for_group = sum([e.group_ready_t - e.ready_t for e in new])
        time.in_buffer = sum([e.dequeued_t - e.group_ready_t for e in new])
        time.queue = sum([e.generated_t - e.submitted_t for e in new])
        known = [life for e in new if (life := lives.get(e.trajectory)) is not None]
        time.environment = sum([life.environment for life in known])
        time.prefill = sum([life.prefill for life in known])
        time.decode = sum([life.decode for life in known])
        time.tool = sum([life.tool for life in known])
        time.paused = sum([life.paused for life in known])
        time.held = sum([life.held for life in known])
        self.capped = sum([life.capped for life in known])
        self.lost_tokens = sum([life.lost_tokens for life in known])
        time.queue -= time.environment + time.prefill + time.decode + time.tool + time.paused + time.held

    def staleness(self, measure: Measure, sizes: Sizes) -> tuple[float, int]:
        """Mean and largest reading of one measure at dequeue."""
        readings = [(at_dequeue(VersionSet(*v), measure, sizes), n) for v, n in self.versions.items()]
        mean = sum(r * n for r, n in readings) / self.trajectories if readings else 0.0
        return mean, max((r for r, _ in readings), default=0)


class BatchTotals:
    """Sums and distributions over all measured batches."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self.trained_tokens = 0
        self.trained_once_tokens = 0
        self.masked_tokens = 0
        self.lost_tokens = 0
        self.corrected = 0
        self.capped = 0
        self.trajectories = 0
        self.groups = 0
        self.ready_wait_s = 0.0
        self.time = TrajectoryTime()
        self.lengths = Sketch()
        self._completion: dict[Measure, Sketch] = {m: Sketch() for m in MEASURE_NAMES}
        self._dequeue: dict[Measure, Sketch] = {m: Sketch() for m in MEASURE_NAMES}

    def add(self, b: BatchFold) -> None:
        self.trained_tokens += b.trained_tokens
        self.trained_once_tokens += b.trained_once_tokens
        self.masked_tokens += b.masked_tokens
        self.lost_tokens += b.lost_tokens
        self.corrected += b.corrected
        self.capped += b.capped
        self.trajectories += b.trajectories
        self.groups += len(b.ready_waits)
        self.ready_wait_s += sum(b.ready_waits.values())
        self.lengths.extend(b.lengths)
        for part in TrajectoryTime.__struct_fields__:
            setattr(self.time, part, getattr(self.time, part) + getattr(b.time, part))
        for values, times in b.versions.items():
            v = VersionSet(*values)
            for measure in MEASURE_NAMES:
                then = at_completion(v, measure, v.completion_trainer_version, self._sizes)
                self._completion[measure].add(then, times)
                self._dequeue[measure].add(at_dequeue(v, measure, self._sizes), times)

    def staleness(self) -> dict[str, StalenessReading]:
        return {
            m: StalenessReading(self._completion[m].distribution(), self._dequeue[m].distribution())
            for m in MEASURE_NAMES
        }

    def mean_time(self) -> TrajectoryTime:
        """Mean seconds of a trained trajectory, by part."""
        n = max(1, self.trajectories)
        return TrajectoryTime(*(getattr(self.time, part) / n for part in TrajectoryTime.__struct_fields__))
