"""What one batch held, folded from its `Train` action: versions, lengths, waits, and where its trajectories' time went.

A batch is kept as sums and counts until its last update is done, then added to the run's totals, if it is measured.
Trajectories that a batch uses again (`use` > 0) count as trained tokens, for they carry loss again, and in nothing
else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from testbed.core.actions import Experience, Train
from testbed.fields import fields_of
from testbed.metrics.sketch import Sketch
from testbed.metrics.staleness import at_completion, at_dequeue
from testbed.metrics.summary import StalenessReading, TrajectoryTime
from testbed.metrics.trajectory import Lives
from testbed.metrics.version_sets import Sizes, VersionSet
from testbed.scenario.experience import Measure

LOST_TURN = "lost_turn"
"""Reason of dropped tokens whose model call was lost or aborted and sent again, in a trajectory that was trained."""
MEASURE_NAMES: tuple[Measure, ...] = get_args(Measure)


class BatchFold:
    """Sums over one batch."""

    def __init__(self, train: Train, lives: Lives, update_times: Sequence[float], sizes: Sizes) -> None:
        """`update_times`: of all optimizer updates so far, from which the trainer version at completion is read."""
        self.batch = train.batch
        self.updates = train.updates
        self.trained_tokens = 0
        """Actor tokens that carry loss, counted at each use."""
        self.trajectories = 0
        self.trained_once_tokens = 0
        self.masked_tokens = 0
        self.lost_tokens = 0
        self.corrected = 0
        self.capped = 0
        self.lengths: list[int] = []
        self.ready_waits: dict[int, float] = {}
        """Group -> seconds that it waited for this batch."""
        self.time = TrajectoryTime()
        self.reward_mean = 0.0
        self._fold(train.experiences, lives, update_times, sizes.trajectories_per_batch * sizes.batches_per_version)

    def _fold(
        self, experiences: tuple[Experience, ...], lives: Lives, update_times: Sequence[float], per_version: int
    ) -> None:
        """`per_version`: trajectories that one published version trained on."""
        total = signals = group_wait = in_buffer = queue = rewards = 0.0
        environment = prefill = decode = tool = paused = held = 0.0
        versions: list[tuple[int, ...]] = []
        for e in experiences:
            # all fields at once: one by one each is looked up by its name
            trajectory: int
            group: int
            outputs: int
            masked: int
            reward: float
            submitted: int
            submitted_t: float
            generated_t: float
            ready_t: float
            group_ready_t: float
            dequeued_t: float
            (
                trajectory,
                group,
                _,
                _,
                _,
                outputs,
                masked,
                _,
                reward,
                dispatch,
                oldest,
                _,
                completion,
                dequeue,
                trainer,
                dispatch_trainer,
                submitted,
                _,
                submitted_t,
                _,
                _,
                generated_t,
                ready_t,
                group_ready_t,
                dequeued_t,
                use,
                corrected,
                _,
            ) = fields_of(e)
            rewards += reward
            self.trained_tokens += outputs - masked
            if use:
                continue
            self.trajectories += 1
            self.trained_once_tokens += outputs - masked
            self.masked_tokens += masked
            self.corrected += bool(corrected)
            self.lengths.append(outputs)
            self.ready_waits[group] = dequeued_t - group_ready_t
            updates = len(update_times)  # those before it was generated: most of them, so it is looked for from the end
            while updates and update_times[updates - 1] > generated_t:
                updates -= 1
            version = submitted // per_version * per_version
            versions.append((oldest, dispatch, completion, dequeue, trainer, dispatch_trainer, version, updates))
            total += dequeued_t - submitted_t
            signals += ready_t - generated_t
            group_wait += group_ready_t - ready_t
            in_buffer += dequeued_t - group_ready_t
            queue += generated_t - submitted_t
            life = lives.get(trajectory)
            if life is not None:
                environment += life.environment
                prefill += life.prefill
                decode += life.decode
                tool += life.tool
                paused += life.paused
                held += life.held
                self.capped += life.capped
                self.lost_tokens += life.lost_tokens
        self.versions = Counter(versions)
        self.reward_mean = rewards / max(len(experiences), 1)
        time = self.time
        time.total, time.waits_for_signals, time.waits_for_group, time.in_buffer = total, signals, group_wait, in_buffer
        time.environment, time.prefill, time.decode, time.tool = environment, prefill, decode, tool
        time.paused, time.held = paused, held
        time.queue = queue - (environment + prefill + decode + tool + paused + held)

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
        sizes = self._sizes
        versions = [(VersionSet(*values), times) for values, times in b.versions.items()]
        for measure in MEASURE_NAMES:
            then: Counter[int] = Counter()  # few readings, of many versions
            now: Counter[int] = Counter()
            for v, times in versions:
                then[at_completion(v, measure, v.completion_trainer_version, sizes)] += times
                now[at_dequeue(v, measure, sizes)] += times
            for reading, times in then.items():
                self._completion[measure].add(reading, times)
            for reading, times in now.items():
                self._dequeue[measure].add(reading, times)

    def staleness(self) -> dict[str, StalenessReading]:
        return {
            m: StalenessReading(self._completion[m].distribution(), self._dequeue[m].distribution())
            for m in MEASURE_NAMES
        }

    def mean_time(self) -> TrajectoryTime:
        """Mean seconds of a trained trajectory, by part."""
        n = max(1, self.trajectories)
        return TrajectoryTime(*(getattr(self.time, part) / n for part in TrajectoryTime.__struct_fields__))
