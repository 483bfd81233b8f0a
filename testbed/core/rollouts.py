"""From "may another group start?" to "this trajectory is generated": admission, dispatch, turns, tools, losses and
aborts.

Asks the admission, concurrency and routing policies; hands generated trajectories to `experience`. It refuses to know
batches, staleness and weights, except that a closed engine takes no turn."""

from __future__ import annotations

from collections import deque
from typing import Final

from numpy.random import Generator

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.context import Context
from testbed.core.errors import ProtocolError
from testbed.core.experience import ExperienceStore
from testbed.core.programs import Programs
from testbed.core.records import Engine, Group, Trajectory
from testbed.fields import fields_of
from testbed.policies.admission import admission
from testbed.policies.concurrency import StaticBatch, concurrency
from testbed.policies.routing import Router, RouteRequest, router
from testbed.policies.routing.split import SplitRouter
from testbed.policies.turn_order import ByGroupLength, Turns, turn_queue
from testbed.scenario.programs import ThunderAgent

_StartTurn: Final = do.StartTurn
MAX_ATTEMPTS: Final = 4
"""A turn that was lost this often ends its trajectory as failed."""


class Rollouts:
    """Owns the queue of turns that want an engine."""

    def __init__(self, ctx: Context, experience: ExperienceStore, rng: Generator) -> None:
        self._ctx = ctx
        self._p = ctx.progress
        self._experience = experience
        rollout = ctx.scenario.rollout
        self.admission = admission(rollout.admission)
        self.concurrency = concurrency(rollout.concurrency)
        self._batched = self.concurrency if isinstance(self.concurrency, StaticBatch) else None
        self._chosen_from = ctx.layout.prefill_engines or len(ctx.engines)
        """The first so many engines are the ones that turns are sent to."""
        self.router: Router = router(rollout.routing, self._chosen_from, rng)
        placement = ctx.scenario.placement
        self._split: SplitRouter | None = None
        if placement.mode == "disaggregated" and placement.pd_disaggregation is not None:
            decode = len(ctx.engines) - self._chosen_from
            self._split = SplitRouter(self.router, placement.pd_disaggregation, self._chosen_from, decode, rng)
            self.router = self._split
        self._handing: deque[tuple[Trajectory, int, int]] = deque()
        """(trajectory, prefill engine, version of its KV): computed prompts that wait for a decode engine."""
        self._keeps_kv = ctx.scenario.weights.transition.kv == "keep"
        self._keeps_history = ctx.scenario.experience.staleness.action == "mask"
        self._open_arrivals = getattr(ctx.scenario.workload, "arrivals", "closed") != "closed"
        self._together = ctx.scenario.algorithm.group_ready_together
        self.programs: Programs | None = None
        if isinstance(rollout.programs, ThunderAgent):
            self.programs = Programs(ctx, rollout.programs, self._chosen_from)
        self.queue: Turns = turn_queue(rollout.turn_order, ctx.scenario.workload.max_response_length)
        self._by_length = self.queue if isinstance(self.queue, ByGroupLength) else None
        self._redundant = rollout.redundant_members
        self._completed = False
        """A group was completed by a member that ended early: whether the round is over has not been asked yet."""
        self._held_groups: list[Group] = []
        """Open groups of a round that is over."""
        self._carried: list[Trajectory] = []
        """Members of theirs that want an engine."""
        self.in_flight = 0
        """Turns in engines."""
        self._arrived: deque[said.TaskArrived] = deque()
        self.exhausted = False
        self._next_group = 0
        self._next_trajectory = 0
        self._full: set[int] = set()
        self._held: set[int] = set()
        self._blocked = ""
        """What held admission back when it was asked last."""

    @property
    def has_arrivals(self) -> bool:
        """Tasks that arrived by themselves and wait for admission."""
        return bool(self._arrived)

    # --- admission ----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Start whatever may start now."""
        if self._completed:
            self._completed = False
            if self.admission.early_stop(self._p):
                self._stop_round()
        if self._handing:
            self._hand_over()
        if self._held_groups:
            self._go_on()
        if self.queue:
            self._dispatch()
        while not (blocked := self._blocked_by()):
            self._start_group()
        if self._open_arrivals and self.queue:  # a task that had arrived was there at once
            self._dispatch()
        if blocked != self._blocked:
            self._blocked = blocked
            self._ctx.note("admission", blocked)

    def _blocked_by(self) -> str:
        ctx = self._ctx
        if ctx.closed or ctx.finished:
            return "no_task"
        if not self._experience.retry_tasks and (not self._arrived if self._open_arrivals else self.exhausted):
            return "no_task"
        blocked = self.admission.blocked_by(self._p)
        if blocked and blocked != "capacity":
            return blocked
        if not self._experience.buffer.admits(1 if self._together else self._p.group_size):
            return "buffer_full"
        return blocked

    def _start_group(self) -> None:
        ctx, p = self._ctx, self._p
        group = Group(self._next_group, ctx.now, self.admission.why)
        self._next_group += 1
        ctx.groups[group.id] = group
        p.submitted += 1
        p.open_groups += 1
        p.open_trajectories += p.group_size
        self._experience.buffer.reserve(1 if self._together else p.group_size)
        retry = self._experience.retry_tasks
        if self._open_arrivals and not retry:
            self._populate(group, self._arrived.popleft())
            return
        task = retry.popleft() if retry else self.admission.next_task()
        ctx.out.append(do.DrawTask(group.id, self.admission.why, task))

    def task_arrived(self, event: said.TaskArrived) -> None:
        if event.group < 0:
            self._arrived.append(event)
        else:
            group = self._ctx.groups.get(event.group)
            if group is None:
                raise ProtocolError(f"TaskArrived for group {event.group}, which asked for no task")
            self._populate(group, event)
        self.pump()

    def tasks_exhausted(self, event: said.TasksExhausted) -> None:
        self.exhausted = True
        group = self._ctx.groups.pop(event.group, None)
        if group is not None:
            group.advance("abort")
            p = self._p
            p.submitted -= 1
            p.open_groups -= 1
            p.open_trajectories -= p.group_size
            self._experience.buffer.release(1 if self._together else p.group_size)
        self.pump()

    def _populate(self, group: Group, task: said.TaskArrived) -> None:
        p, now = self._p, self._ctx.now
        group.advance("task_arrived")
        group.task = task.task
        group.prompt_tokens = task.prompt_tokens
        group.blocks = task.blocks or (-1 - group.task,)
        group.block_tokens = task.block_tokens or max(task.prompt_tokens, 1)
        members = task.members or p.group_size + self._redundant
        p.open_trajectories += members - p.group_size
        if not self._together:
            self._experience.buffer.reserve(members - p.group_size)
        for member in range(members):
            t = Trajectory(self._next_trajectory, group, member, now, p.submitted_trajectories)
            self._next_trajectory += 1
            p.submitted_trajectories += 1
            self._ctx.trajectories[t.id] = t
            group.members.append(t)
            if task.environment:
                t.state = "preparing"
            if self.programs is None or self.programs.arrives(t):
                self._let_in(t)
        if self.programs is not None and task.environment:
            self._prepare_ahead(self.programs)
        self._experience.expect(group)

    def _let_in(self, t: Trajectory) -> None:
        """It may have its environment and its first call."""
        if t.state == "preparing":
            self._prepare(t)
        else:
            self._wants_turn(t)

    def _prepare(self, t: Trajectory) -> None:
        if not t.environment:
            t.environment = True
            self._ctx.out.append(do.PrepareEnvironment(t.id, t.group.id, t.group.task, t.member))

    def environment_ready(self, event: said.EnvironmentReady) -> None:
        t = self._ctx.trajectories.get(event.trajectory)
        if t is None:
            return
        t.advance("environment_ready")
        self._wants_turn(t)
        self._dispatch()

    # --- programs -----------------------------------------------------------------------------------------------------

    def _wants_turn(self, t: Trajectory) -> None:
        """It is sent when an engine takes it, unless its program or its group waits."""
        if self.programs is not None and self.programs.holds(t.id):
            return
        if t.group.held:
            self._carried.append(t)
        else:
            self.queue.append(t)

    def _prepare_ahead(self, programs: Programs) -> None:
        """Environments of programs that are about to be let in, while they wait."""
        for id in programs.near():
            t = self._ctx.trajectories[id]
            if t.state == "preparing":
                self._prepare(t)

    def _waiting(self, t: Trajectory) -> Turns | list[Trajectory]:
        """Where a trajectory that wants an engine waits."""
        return self._carried if t.group.held else self.queue

    def look_at_memory(self) -> None:
        """Pause and restore programs; the core calls it when the timer of `programs` fires."""
        programs = self.programs
        if programs is None:
            return
        held, freed = programs.tick()
        trajectories = self._ctx.trajectories
        for id in held:
            t = trajectories[id]
            if t.state == "queued":
                self._waiting(t).remove(t)
            elif t.state == "generating" and not t.aborting:
                t.aborting = "requeue:paused"
                self._ctx.out.append(do.AbortTurn(t.id, t.turn, t.engine, "paused", keep=True))
        for id in freed:
            t = trajectories[id]
            if t.state in ("preparing", "queued"):
                self._let_in(t)
        self._prepare_ahead(programs)
        self.pump()

    # --- turns --------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        queue, limit, router = self.queue, self.concurrency, self.router
        ctx, p = self._ctx, self._p
        while queue:
            t = queue[0]
            if t.state != "queued":
                queue.popleft()
                continue
            if not limit.may_start(self.in_flight):
                return
            group = t.group
            id, turn = t.id, t.turn
            prompt = t.prompt_tokens + t.output_tokens + t.observation_tokens
            request = RouteRequest(
                id, group.id, turn, group.task, prompt, group.blocks, group.block_tokens, t.home, ctx.now
            )
            index = router.choose(request)
            if index is None:
                return
            queue.popleft()
            engine = ctx.engines[index]
            t.advance("start_turn")
            t.engine = index
            t.turn_engine_version = version = engine.version
            if t.dispatch_version < 0:
                t.dispatch_version = version
                t.dispatch_trainer_version = p.trainer_version
                t.dispatched_t = ctx.now
                self._experience.dispatched(t)
            engine.in_flight[id] = t
            self.in_flight += 1
            if self.programs is not None:
                self.programs.reasons(t, index)
            router.started(index, request)
            if router.fetch[1]:
                ctx.out.append(do.FetchPrefix(id, turn, index, *router.fetch))
            if limit.engine_full(index, len(engine.in_flight)):
                self._full.add(index)
                router.close(index)
            ctx.out.append(_StartTurn(id, turn, index, group.id, group.task, t.member, t.attempt, router.why))

    def _leave_engine(self, t: Trajectory, index: int) -> Engine:
        engine = self._ctx.engines[index]
        if engine.in_flight.pop(t.id, None) is None:
            raise ProtocolError(f"trajectory {t.id} has no turn in engine {index}")
        self.in_flight -= 1
        self.router.finished(index, t.id)
        if self._full and index in self._full and not self.concurrency.engine_full(index, len(engine.in_flight)):
            self._full.discard(index)
            if index not in self._held:
                self.router.open(index)
        elif self._batched is not None and self._batched.left(index, len(engine.in_flight)):
            self._full.add(index)
            self.router.close(index)
        return engine

    def turn_finished(self, event: said.TurnFinished) -> Engine:
        """Returns the engine that the turn left (an update may wait for it to run empty)."""
        # all fields at once: one by one each is looked up by its name
        now: float
        id: int
        turn: int
        index: int
        outputs: int
        started_t: float
        first_t: float
        kv_version: int
        now, id, turn, index, _, outputs, spans, _, first_t, started_t, reason, continues, _, kv_version, _ = fields_of(
            event
        )
        engine, t = self._over(event, index, id, turn)
        if t is None:
            return engine
        self._read_versions(t, turn, spans, outputs)
        if not t.dispatched_t <= started_t <= first_t <= now:
            raise ProtocolError(
                f"times of trajectory {t.id} turn {turn} are out of order: dispatched {t.dispatched_t}, "
                f"started {started_t}, first token {first_t}, finished {now}"
            )
        if 0 <= kv_version < t.turn_engine_version and not self._keeps_kv:
            raise ProtocolError(
                f"trajectory {t.id} turn {turn} was sent to version {t.turn_engine_version} and reused KV of "
                f"version {kv_version}, which the transition rule does not allow"
            )
        t.output_tokens += outputs
        if t.first_token_t < 0:
            t.first_token_t = first_t
        if index < self._chosen_from:
            t.home = index
        t.engine = -1
        if t.aborting and not t.aborting.startswith("requeue"):
            self._end(t, "abort", "aborted", t.aborting)
        elif reason == "abort":
            self._send_again(t, counts=False)
        elif continues:
            t.aborting = ""
            t.advance("turn_continues")
            if self.programs is not None:
                self.programs.acts(t)
            self._ctx.out.append(do.RunTool(t.id, t.turn))
            t.turn += 1
            t.attempt = t.losses = 0
        else:
            t.aborting = ""
            self._generated(t)
        self.pump()
        return engine

    def _read_versions(self, t: Trajectory, turn: int, spans: tuple[said.Span, ...], output_tokens: int) -> None:
        """Invariant 5 of the design, and the version history.

        Versions rise within a turn. The next turn may be older: an engine of a later wave still serves the old version.
        """
        at, latest = 0, -1
        oldest, newest = t.oldest_version, t.newest_version
        history: list[tuple[int, int]] | None = None
        if self._keeps_history:
            if t.token_versions is None:
                t.token_versions = []
            history = t.token_versions
        for version, start, end in spans:
            if start != at or end < start or version < latest:
                raise ProtocolError(f"spans of trajectory {t.id} turn {turn} do not partition its output: {spans}")
            at = end
            if oldest < 0 or version < oldest:
                oldest = version
            latest = version
            if version > newest:
                newest = version
            if history is None:
                continue
            if history and history[-1][0] == version:
                history[-1] = (version, history[-1][1] + end - start)
            else:
                history.append((version, end - start))
        if at != output_tokens:
            raise ProtocolError(f"spans of trajectory {t.id} turn {turn} cover {at} of {output_tokens} tokens")
        t.oldest_version, t.newest_version = oldest, newest

    def _generated(self, t: Trajectory) -> None:
        t.advance("turn_ends")
        if t.environment:
            self._ctx.out.append(do.ReleaseEnvironment(t.id))
            t.environment = False
        if self.programs is not None:
            self.programs.over(t.id)
        group = t.group
        if t.output_tokens > group.longest:
            group.longest = t.output_tokens
            if self._by_length is not None:
                self._by_length.learned(group)
        generated = self._p.generated
        self._experience.generated(t)
        if self._redundant and group.generated == max(len(group.members) - self._redundant, 1):
            self._give_up_rest(group)
        if self._p.generated > generated and self.admission.early_stop(self._p):
            self._stop_round()

    def _give_up_rest(self, group: Group) -> None:
        """Enough members are generated: the others end as their turns come back."""
        for t in list(group.members):
            if t.state in ("preparing", "queued", "generating", "acting"):
                self._give_up(t, "redundant")

    # --- from prefill to decode ---------------------------------------------------------------------------------------

    def prefill_finished(self, event: said.PrefillFinished) -> Engine:
        """Returns the prefill engine, which is done with this turn."""
        engine, t = self._over(event, event.engine, event.trajectory, event.turn)
        if t is None:
            return engine
        t.home = event.engine
        t.engine = -1
        if t.aborting.startswith("requeue"):
            self._send_again(t, counts=False)
        elif t.aborting:
            self._end(t, "abort", "aborted", t.aborting)
        else:
            self.in_flight += 1
            self._handing.append((t, event.engine, event.kv_version))
        return engine

    def _hand_over(self) -> None:
        """Computed prompts go to decode engines. KV of older weights than those of the engine that would go on with it
        is given up, unless the transition rule keeps it."""
        ctx, split = self._ctx, self._split
        assert split is not None
        while self._handing:
            t, source, version = self._handing[0]
            group = t.group
            prompt = t.prompt_tokens + t.output_tokens + t.observation_tokens
            request = RouteRequest(
                t.id, group.id, t.turn, group.task, prompt, group.blocks, group.block_tokens, t.home, ctx.now
            )
            index = split.choose_decode(request)
            if index is None:
                return
            self._handing.popleft()
            engine = ctx.engines[index]
            if version != engine.version and not self._keeps_kv:
                self.in_flight -= 1
                self._send_again(t, counts=False)
                continue
            t.engine = index
            engine.in_flight[t.id] = t
            split.started(index, request)
            ctx.out.append(do.HandOver(t.id, t.turn, source, index, split.decode_why))

    def _between(self, t: Trajectory) -> bool:
        """Take a trajectory out of those that wait for a decode engine, if it is one."""
        for waiting in self._handing:
            if waiting[0] is t:
                self._handing.remove(waiting)
                self.in_flight -= 1
                return True
        return False

    def _over(self, event: said.Event, index: int, id: int, turn: int) -> tuple[Engine, Trajectory | None]:
        """The engine, and the trajectory whose turn has left it; None if an engine that was given up answers after all
        (its turns were sent elsewhere). Raises `ProtocolError` if the turn is not in flight."""
        engine = self._ctx.engines[index]
        if engine.state == "lost" and id not in engine.in_flight:
            return engine, None
        t = self._ctx.trajectories.get(id)
        if t is None or t.turn != turn:
            raise ProtocolError(f"{type(event).__name__} for trajectory {id} turn {turn}, which is not in flight")
        return self._leave_engine(t, index), t

    def turn_failed(self, event: said.TurnFailed) -> Engine:
        """As `turn_finished`."""
        engine, t = self._over(event, event.engine, event.trajectory, event.turn)
        if t is None:
            return engine
        t.wasted_tokens += event.output_tokens
        t.engine = -1
        if t.aborting and not t.aborting.startswith("requeue"):
            self._end(t, "abort", "aborted", t.aborting)
        else:
            self._send_again(t, counts=event.reason != "aborted")
        self.pump()
        return engine

    def _send_again(self, t: Trajectory, counts: bool) -> None:
        """Same request id. `counts`: the loss was nobody's decision, so it uses up an attempt."""
        t.aborting = ""
        t.attempt += 1
        t.losses += counts
        if t.losses >= MAX_ATTEMPTS:
            self._end(t, "fail", "failed", "turn_lost")
            return
        t.advance("turn_lost")
        if t.group.held or (self.programs is not None and self.programs.holds(t.id)):
            self._wants_turn(t)
        else:
            self.queue.appendleft(t)

    def tool_finished(self, event: said.ToolFinished) -> None:
        t = self._ctx.trajectories.get(event.trajectory)
        if t is None:
            return
        if event.failed:
            self._end(t, "fail", "failed", "tool_refused" if event.fault == "queue" else "tool")
            self.pump()
            return
        t.observation_tokens += event.observation_tokens
        t.advance("tool_finished")
        if self.programs is None or self.programs.answered(t):
            self._wants_turn(t)
            self._dispatch()

    # --- ends that are not training -----------------------------------------------------------------------------------

    def _end(self, t: Trajectory, given: str, outcome: str, reason: str) -> None:
        t.advance(given)
        if t.environment:
            self._ctx.out.append(do.ReleaseEnvironment(t.id))
        if self.programs is not None:
            self.programs.over(t.id)
        generated = self._p.generated
        self._experience.ended_early(t)
        del self._ctx.trajectories[t.id]
        self._ctx.out.append(do.Retire((t.id,), t.group.id, outcome, reason, t.output_tokens))
        self._completed |= self._p.generated > generated

    def _stop_round(self) -> None:
        for group in list(self._ctx.groups.values()):
            if group.state != "generating" or group.held:
                continue
            if self.admission.keeps_unfinished:
                self._hold(group)
            else:
                self.admission.abandoned(group.task)
                self._abandon(group, "over_sampled")

    def _hold(self, group: Group) -> None:
        """Its members get no further call in this round, and keep what they have generated; tools go on."""
        for t in group.members:
            if t.state == "queued" and not (self.programs is not None and self.programs.holds(t.id)):
                self.queue.remove(t)
                self._carried.append(t)
            elif t.state == "generating" and not t.aborting:
                t.aborting = "requeue:round_over"
                self._ctx.out.append(do.AbortTurn(t.id, t.turn, t.engine, "round_over", keep=True))
        group.held = True
        self._held_groups.append(group)

    def _go_on(self) -> None:
        """A round has begun: groups of the one before go on, before new ones start."""
        self.admission.blocked_by(self._p)
        if self.admission.stopped:
            return
        for group in self._held_groups:
            group.held = False
        self._held_groups.clear()
        carried, self._carried = self._carried, []
        for t in carried:
            if t.state == "queued":
                self._wants_turn(t)

    def _abandon(self, group: Group, reason: str) -> None:
        """Give up a group that is being generated; its members end as their turns come back.

        Members that are trained singly stay if they are generated: they are worth as much without the others.
        """
        if self._together:
            self._experience.abandon(group)
        for t in group.members:
            if not self._together and t.state not in ("preparing", "queued", "generating", "acting"):
                continue
            self._give_up(t, reason)

    def _give_up(self, t: Trajectory, reason: str) -> None:
        if t.state == "generating" and t.engine < 0 and self._between(t):
            self._end(t, "abort", "aborted", reason)
        elif t.state == "generating":
            t.aborting = reason
            self._ctx.out.append(do.AbortTurn(t.id, t.turn, t.engine, reason))
        elif t.id in self._ctx.trajectories:
            self._end(t, "abort", "aborted", reason)

    def cancel_stale(self, version: int) -> None:
        """Before engines pause for `version`: give up groups in flight that it makes too old (`event: publication`)."""
        rule = self._experience.rule
        if not rule.cancels_in_flight:
            return
        for group in list(self._ctx.groups.values()):
            if group.state == "generating":
                dispatched = [t.dispatch_version for t in group.members if t.dispatch_version >= 0]
                if dispatched and rule.too_old_for(version, min(dispatched)):
                    if rule.action == "retry":
                        self._experience.retry_task(group)
                    self._abandon(group, "stale")

    def take_back(self, engine: Engine, why: str) -> None:
        """Abort this engine's turns and send them elsewhere."""
        for t in engine.in_flight.values():
            if not t.aborting:
                t.aborting = f"requeue:{why}"
                self._ctx.out.append(do.AbortTurn(t.id, t.turn, engine.index, why))

    def engine_lost(self, engine: Engine) -> None:
        self.close(engine.index)
        lost = list(engine.in_flight.values())
        for t in reversed(lost):
            self._leave_engine(t, engine.index)
            t.engine = -1
            if t.aborting and not t.aborting.startswith("requeue"):
                self._end(t, "abort", "aborted", t.aborting)
            else:
                self._send_again(t, counts=True)
        for t, source, _ in list(self._handing):
            if source == engine.index and self._between(t):
                self._send_again(t, counts=True)
        self.router.lost(engine.index)
        if self.programs is not None and engine.index < self._chosen_from:
            self.programs.lost(engine.index)

    def engine_joined(self, index: int) -> None:
        if self.programs is not None and index < self._chosen_from:
            self.programs.joined(index)

    # --- engines ------------------------------------------------------------------------------------------------------

    def open(self, index: int) -> None:
        """The engine takes new turns."""
        self._held.discard(index)
        if index not in self._full:
            self.router.open(index)

    def close(self, index: int) -> None:
        """The engine takes no new turns (weight update, phase, loss)."""
        self._held.add(index)
        self.router.close(index)

    def load_reported(self, event: said.LoadReported) -> None:
        self.concurrency.observe(event)
        if self.queue:
            self._dispatch()
