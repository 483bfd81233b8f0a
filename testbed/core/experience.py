"""From "generated" to "in a batch", and to the end of every trajectory: signals, lots, the buffer, staleness, batches.

Asks the buffer, selection, staleness and job policies. It refuses to know engines and how weights travel.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from math import ceil
from typing import Final

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.context import Context
from testbed.core.errors import ProtocolError
from testbed.core.records import Group, Lot, Trajectory
from testbed.fields import fields_of
from testbed.metrics.staleness import sizes_of
from testbed.policies.buffer import buffer
from testbed.policies.placement import EXTERNAL, JobMap
from testbed.policies.selection import order, rejected
from testbed.policies.staleness import StalenessRule

_ComputeSignals: Final = do.ComputeSignals
_Experience: Final = do.Experience


class ExperienceStore:
    """Owns readiness, the buffer and the disposal of experience."""

    def __init__(self, ctx: Context, jobs: JobMap) -> None:
        self._ctx = ctx
        self._p = ctx.progress
        self._jobs = jobs
        self._trainer_bits = jobs.trainer_bits
        self._external = jobs.external
        algorithm, config = ctx.scenario.algorithm, ctx.scenario.experience
        self._together = algorithm.group_ready_together
        self.lots_per_batch = algorithm.rollout_batch_size if self._together else algorithm.trajectories_per_batch
        self._selection = config.selection
        self._order = order(config.selection.order)
        self.rule = StalenessRule(config.staleness, sizes_of(ctx.scenario))
        lots_per_group = 1 if self._together else algorithm.n_samples_per_prompt
        bound = config.staleness.bound or 0
        self.buffer = buffer(config.buffer, self._order, self.lots_per_batch, bound, lots_per_group)
        self._serial = ctx.scenario.workload.rewards.stage == "serial"
        self.retry_tasks: deque[int] = deque()
        self.for_trainer: deque[Lot] = deque()
        """Lots that only miss signals of the training pool."""
        self._line: deque[Lot] = deque()
        """Live lots by submission, if the order takes them in turn."""
        self.unscored = 0
        """Generated trajectories that are not ready."""
        self._sequence = 0
        self._waits = config.staleness.action == "wait"
        self._unused: dict[int, int] = {}
        """Dispatch version -> trajectories dispatched under it and not yet used; counted if publications wait."""
        self._batch: list[Lot] = []
        self._batches = 0
        self._lost_trajectories = 0
        self._too_old = 0
        """Generated trajectories that were dropped for their age."""
        self._max_dropped_share = config.staleness.max_dropped_share
        self._before: tuple[int, int] | None = None
        """(lots trainable, groups lost) before the signals at hand changed a lot; None: they have not."""

    # --- bookkeeping of versions for the `wait` action ----------------------------------------------------------------

    def dispatched(self, t: Trajectory) -> None:
        if self._waits:
            self._unused[t.dispatch_version] = self._unused.get(t.dispatch_version, 0) + 1

    def _used(self, t: Trajectory) -> None:
        version = t.dispatch_version
        if self._waits and version >= 0:
            left = self._unused[version] - 1
            if left:
                self._unused[version] = left
            else:
                del self._unused[version]

    def holds_publication(self) -> bool:
        if not self._waits or self._ctx.closed or not self._more_to_come():
            return False  # nothing will use the old experience, or not before this publication
        oldest = min(self._unused) if self._unused else None
        return self.rule.holds_publication(self._p.deployed, oldest)

    def _more_to_come(self) -> bool:
        """Whether a batch is there, is being trained, or can come about from what has been submitted."""
        p = self._p
        under_way = p.trainer_busy or p.open_trajectories > 0 or self.awaited > 0
        return under_way or self.batch_possible

    # --- generated -> ready -------------------------------------------------------------------------------------------

    def expect(self, group: Group) -> None:
        """A group was populated: its lots come to life."""
        missing = self._jobs.all_missing
        for t in group.members:
            t.missing = missing
        lots = [Lot(group, group.members)] if self._together else [Lot(group, [t]) for t in group.members]
        group.lots = len(lots)
        for lot in lots:
            for t in lot.members:
                t.lot = lot
        if self._order.in_turn:
            self._line.extend(lots)

    def _lost(self, groups: int, trajectories: int) -> None:
        """Never to be trained: admission makes up for it."""
        p = self._p
        if self._together:
            p.dropped += groups
        else:
            self._lost_trajectories += trajectories
            p.dropped = ceil(self._lost_trajectories / p.group_size)

    def generated(self, t: Trajectory) -> None:
        """All turns of `t` are done; its slot is free already. Asks for the signals that need no training pool."""
        ctx, p, group = self._ctx, self._p, t.group
        t.generated_t = ctx.now
        # While an update goes on in waves, or after one that failed half-way, some engines are ahead of `deployed`.
        deployed = p.deployed
        if t.newest_version > deployed:
            deployed = t.newest_version
        t.completion_deployed = deployed if deployed > t.dispatch_version else t.dispatch_version
        group.generated += 1
        p.open_trajectories -= 1
        self.unscored += 1
        last = group.generated + group.resolved == len(group.members)
        if last:
            group.advance("all_generated")
            p.generated += 1
            p.open_groups -= 1
        for signal in self._external:
            if not self._serial or signal != "reward":
                ctx.out.append(_ComputeSignals(signal, (t.id,), EXTERNAL))
            elif last:
                ctx.out.append(_ComputeSignals(signal, self._generated_members(group), EXTERNAL))
        if not t.missing & ~self._trainer_bits:
            self._scored(t)

    def _generated_members(self, group: Group) -> tuple[int, ...]:
        return tuple(m.id for m in group.members if m.state == "generated")

    def signal_ready(self, event: said.SignalReady) -> bool:
        """A signal is there. Returns whether that changed how many lots are trainable or lost."""
        self._before = None
        signal: str
        ids: tuple[int, ...]
        values: tuple[float, ...]
        _, signal, ids, values = fields_of(event)
        trajectories = self._ctx.trajectories
        bit = self._jobs.bit.get(signal)
        if bit is None:
            raise ProtocolError(f"signal {signal!r} is not one that the algorithm needs: {list(self._jobs.bit)}")
        on_trainer = self._trainer_bits
        is_reward = signal == "reward"
        for i, id in enumerate(ids):
            t = trajectories.get(id)
            if t is None:
                continue
            missing = t.missing
            if not missing & bit:
                raise ProtocolError(f"signal {signal!r} of trajectory {id} arrived twice")
            before = missing & ~on_trainer
            t.missing = missing = missing & ~bit
            if is_reward and values:
                t.reward = values[i]
            if before and not missing & ~on_trainer:
                self._scored(t)
            elif not missing:
                self._ready(t)
        return self._lots_changed()

    def _lots_changed(self) -> bool:
        before = self._before
        return before is not None and before != (self.trainable, self._p.dropped)

    def _lot_changes(self) -> None:
        """Called before a lot becomes trainable or ready."""
        if self._before is None:
            self._before = (self.trainable, self._p.dropped)

    def _scored(self, t: Trajectory) -> None:
        """Every signal that needs no training pool is there."""
        group = t.group
        group.scored += 1
        if not self._trainer_bits:
            self._ready(t)
        elif not self._together or group.scored + group.resolved == len(group.members):
            self._wants_trainer(t.lot)

    def _wants_trainer(self, lot: Lot) -> None:
        self._lot_changes()
        lot.trainable = True
        self.for_trainer.append(lot)

    def _ready(self, t: Trajectory) -> None:
        t.advance("signals_complete")
        t.ready_t = self._ctx.now
        self.unscored -= 1
        lot = t.lot
        lot.missing = missing = lot.missing - 1
        if not missing:
            self._lot_ready(lot)

    def _lot_ready(self, lot: Lot) -> None:
        self._lot_changes()
        lot.group_ready_t = self._ctx.now
        lot.sequence = self._sequence
        self._sequence += 1
        if self._together:
            lot.group.advance("all_ready")
        if reason := rejected(self._selection, lot):
            self.drop(lot, reason, buffered=True)
            return
        if self.rule.at_completion:
            self._read_now(lot)
            reading = self.rule.of_lot(lot)
            lot.verdict = self.rule.verdict(reading)
            if lot.verdict in ("drop", "retry"):
                self._dispose(lot, lot.verdict, reading, buffered=True)
                return
        self._store(lot)

    def _read_now(self, lot: Lot) -> None:
        """Set the fields that measures read, to what holds now."""
        p, now = self._p, self._ctx.now
        deployed, trainer_version, trained_before = p.deployed, p.trainer_version, p.trained_trajectories
        for t in lot.members:
            t.dequeued_t = now
            t.dequeue_deployed = deployed if deployed > t.completion_deployed else t.completion_deployed
            t.trainer_version = trainer_version
            t.trained_before = trained_before

    def _dispose(self, lot: Lot, verdict: str, reading: int, *, buffered: bool) -> None:
        """A lot that is too old: gone, or its task comes again."""
        if verdict == "retry":
            self.retry_task(lot.group)
        self.drop(lot, "stale", buffered=buffered, staleness=reading)

    def retry_task(self, group: Group) -> None:
        """The group's task is to be drawn again, once."""
        if not group.retried:
            group.retried = True
            self.retry_tasks.append(group.task)

    def _store(self, lot: Lot) -> None:
        lot.trainable = True
        waits, evicted = self.buffer.ready(lot)
        if waits is not None:
            self._p.open_groups += 1 if self._together else 0
            self._p.open_trajectories += len(waits.members)
        if evicted is not None:
            self.drop(evicted, "buffer_full", buffered=False)

    # --- early ends ---------------------------------------------------------------------------------------------------

    def ended_early(self, t: Trajectory) -> None:
        """A trajectory ended before it was ready (failed or aborted): its group does not wait for it."""
        p, group = self._p, t.group
        self._used(t)
        lot = t.lot
        del t.lot
        if group.state == "aborted":
            self._bury(group)
            return
        group.resolved += 1
        p.open_trajectories -= 1
        lot.members = [m for m in lot.members if m is not t]
        lot.missing -= 1
        lot.over = not lot.members
        self._lost(0, 1)
        if group.generated + group.resolved == len(group.members) and group.state == "generating":
            p.open_groups -= 1
            if not group.generated:
                group.advance("drop")
                self._lost(1, 0)
                self.buffer.release(group.lots)
                del self._ctx.groups[group.id]
                return
            group.advance("all_generated")
            p.generated += 1
            waiting = self._generated_members(group)
            if self._serial and "reward" in self._jobs.external and waiting:
                self._ctx.out.append(_ComputeSignals("reward", waiting, EXTERNAL))
        if not self._together:
            self.buffer.release(1)
            group.lots -= 1
            if not group.lots:
                self._ctx.groups.pop(group.id, None)
            return
        if self._trainer_bits and group.scored and group.scored + group.resolved == len(group.members):
            self._wants_trainer(lot)
        if lot.members and not lot.missing:
            self._lot_ready(lot)

    def _bury(self, group: Group) -> None:
        """Forget an abandoned group once its last member is gone."""
        group.resolved += 1
        if group.resolved == len(group.members):
            self._ctx.groups.pop(group.id, None)

    def abandon(self, group: Group) -> None:
        """An early stop gives up a whole group; its members end one by one."""
        group.advance("abort")
        p = self._p
        p.open_groups -= 1
        p.open_trajectories -= len(group.members) - group.generated - group.resolved
        self._lost(1, 0)
        self.buffer.release(group.lots)
        for t in group.members:
            if t.id in self._ctx.trajectories:
                t.lot.over = True
            if t.state == "generated":
                self.unscored -= 1

    def drop(self, lot: Lot, reason: str, *, buffered: bool, staleness: int = -1) -> None:
        """Throw away a ready lot. `buffered`: its reserved place is still held."""
        if self._together:
            lot.group.advance("drop")
        if lot.uses == 0:
            self._lost(1, len(lot.members))
        lot.advance("drop")
        if reason in ("stale", "outside_window"):
            self._too_old += len(lot.members)
        if buffered:
            self.buffer.release(1)
        self._retire(lot, "dropped", reason, staleness)

    def _retire(self, lot: Lot, outcome: str, reason: str, staleness: int = -1) -> None:
        ctx = self._ctx
        lot.over = True
        ids, trajectories, group = [], ctx.trajectories, lot.group
        for t in lot.members:
            del trajectories[t.id]
            del t.lot  # lots and groups know their members: without these cuts they would keep each other alive
            if lot.uses == 0:
                self._used(t)
            ids.append(t.id)
        group.lots -= 1
        if group.lots == 0:
            ctx.groups.pop(group.id, None)
        ctx.out.append(do.Retire(tuple(ids), group.id, outcome, reason, lot.output_tokens, staleness))
        if group.lots == 0:
            group.members = []

    # --- batches ------------------------------------------------------------------------------------------------------

    @property
    def trainable(self) -> int:
        """Lots that could be in a batch once the training pool has computed its signals."""
        if self._order.in_turn:
            return self._in_turn(ready_only=False)
        return self.buffer.num_ready + len(self.for_trainer)

    @property
    def drops_too_much(self) -> bool:
        """Whether more than `max_dropped_share` of what was generated is too old; asked of a batch's worth or more."""
        p = self._p
        if self._max_dropped_share >= 1 or p.generated < p.groups_per_batch:
            return False
        return self._too_old > self._max_dropped_share * p.generated * p.group_size

    @property
    def batch_possible(self) -> bool:
        """Whether a batch can be cut now, or once the training pool has computed its signals."""
        return self.trainable >= self.lots_per_batch

    def next_for_trainer(self) -> list[Lot]:
        """Lots to score now: those that the next batch lacks and no others, so that what the trainer says of them is
        said by the weights that the batch starts from."""
        waiting, size = self.for_trainer, self.lots_per_batch
        if not self._order.in_turn:
            lacking = max(size - self.buffer.num_ready, 1)
            return [waiting.popleft() for _ in range(min(lacking, len(waiting)))]
        first = set(islice((lot for lot in self._line if not lot.over), size))
        chosen = [lot for lot in waiting if lot in first]
        if chosen:
            self.for_trainer = deque(lot for lot in waiting if lot not in first)
        return chosen

    @property
    def awaited(self) -> int:
        """Generated trajectories whose signals will come by themselves, without the training pool."""
        return self.unscored - sum(len(lot.members) for lot in self.for_trainer)

    @property
    def batch_ready(self) -> bool:
        enough = self.buffer.num_ready >= self.lots_per_batch
        return enough and (not self._order.in_turn or self._in_turn(ready_only=True) >= self.lots_per_batch)

    def _in_turn(self, ready_only: bool) -> int:
        """Lots at the head of the line that are trainable (or ready), up to the first that is not."""
        line = self._line
        while line and line[0].over:
            line.popleft()
        count = 0
        for lot in line:
            if lot.over:
                continue
            if not lot.trainable or (ready_only and lot.missing):
                break
            count += 1
        return count

    def take_batch(self, pool: int) -> do.Train | None:
        """The next batch, or None. Lots that are too old are disposed of on the way."""
        while self.batch_ready:
            batch = self._take(pool)
            if batch is not None:
                return batch
        return None

    def _take(self, pool: int) -> do.Train | None:
        """A batch of what is in the buffer; None if too much of it is too old (the rest is given back)."""
        p, rule = self._p, self.rule
        left = self._in_turn(ready_only=True) if self._order.in_turn else self.buffer.num_ready
        chosen: list[tuple[Lot, str, list[int]]] = []
        while len(chosen) < self.lots_per_batch and left and self.buffer.num_ready:
            left -= 1
            lot = self.buffer.take()
            self._read_now(lot)
            readings = rule.of_members(lot)
            reading = max(readings)
            verdict = lot.verdict if rule.at_completion else rule.verdict(reading)
            if self._order.outside(lot, p):
                self.drop(lot, "outside_window", buffered=False, staleness=reading)
            elif verdict in ("drop", "retry"):
                self._dispose(lot, verdict, reading, buffered=False)
            else:
                chosen.append((lot, verdict, readings))
        if len(chosen) < self.lots_per_batch:
            for lot, _, _ in chosen:
                self.buffer.give_back(lot)
            self._stored_late()
            return None
        self._stored_late()
        self._batch = [lot for lot, _, _ in chosen]
        for lot in self._batch:
            lot.advance("take")
            if self._together:
                lot.group.advance("take")
        experiences = tuple(
            [
                self._experience(t, lot, verdict, reading)
                for lot, verdict, readings in chosen
                for t, reading in zip(lot.members, readings, strict=True)
            ]
        )
        p.batches_dequeued += 1
        number = self._batches
        self._batches += 1
        return do.Train(number, pool, self._ctx.scenario.algorithm.num_steps_per_rollout, experiences, self._order.why)

    def _stored_late(self) -> None:
        p = self._p
        for lot in self.buffer.taken():
            p.open_groups -= 1 if self._together else 0
            p.open_trajectories -= len(lot.members)

    def _experience(self, t: Trajectory, lot: Lot, verdict: str, reading: int) -> do.Experience:
        if lot.uses == 0:
            self._used(t)
        if verdict == "mask":
            t.masked_tokens = self.rule.masked_tokens(t, t.dequeue_deployed)
        group = t.group
        return _Experience(
            t.id,
            group.id,
            group.task,
            t.turn + 1,
            t.prompt_tokens,
            t.output_tokens,
            t.masked_tokens,
            t.observation_tokens,
            t.reward,
            t.dispatch_version,
            t.oldest_version,
            t.newest_version,
            t.completion_deployed,
            t.dequeue_deployed,
            t.trainer_version,
            t.dispatch_trainer_version,
            t.submitted_index,
            t.trained_before,
            t.submitted_t,
            t.dispatched_t,
            t.first_token_t,
            t.generated_t,
            t.ready_t,
            lot.group_ready_t,
            t.dequeued_t,
            lot.uses,
            verdict == "correct",
            reading,
        )

    def batch_done(self) -> None:
        """The batch's last update is done: each lot is over, or goes back for another use."""
        p = self._p
        p.batches_trained += 1
        batch, self._batch = self._batch, []
        for lot in batch:
            lot.uses += 1
            if lot.uses == 1:
                p.trained_trajectories += len(lot.members)
            if lot.uses < self._selection.use_count:
                lot.advance("reuse")
                if self._together:
                    lot.group.advance("reuse")
                self.buffer.give_back(lot)
                continue
            lot.advance("batch_done")
            if self._together:
                lot.group.advance("batch_done")
            self._retire(lot, "trained", "")

    def close(self) -> None:
        """The run is over: what is left ends as aborted, in order of its id."""
        ctx = self._ctx
        for group in list(ctx.groups.values()):
            alive = [t for t in group.members if t.id in ctx.trajectories]
            for t in alive:
                if t.environment:
                    ctx.out.append(do.ReleaseEnvironment(t.id))
                t.state = "aborted"
                del ctx.trajectories[t.id]
            if alive:
                tokens = sum(t.output_tokens for t in alive)
                ctx.out.append(do.Retire(tuple(t.id for t in alive), group.id, "aborted", "run_ended", tokens))
        ctx.groups.clear()
