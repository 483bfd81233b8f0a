"""The simulated backend: a virtual clock around the core. Actions become calls on models, models' results become
events.

It carries out and never decides. One pending wake-up per engine, trainer, link and tool; no process per request.
Observers (journal, metrics) see every event with its actions, in order.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, nextafter
from pathlib import Path
from typing import Any

from sim.clock import ARRIVE, COMPLETE, ENGINE, REPORT, TIMER, WATCHDOG, WEIGHTS, Call, Clock
from sim.costs import cost_model
from sim.engine import Aborted, EngineModel, EngineModelOptions, Finished, Paused, Request
from sim.experience_store import ExperienceStore
from sim.tools import Environments, Station
from sim.trainer import TrainerModel
from sim.weight_paths import WeightPaths
from sim.workloads import Task, Workload, workload
from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.core import Core
from testbed.scenario import Scenario
from testbed.scenario.catalogue import gpu_spec, kv_pool_tokens, model_spec

Observer = Callable[[said.Event, list[do.Action]], None]
Progress = Callable[[float, int, int], None]
"""Called now and then with (simulated seconds, batches trained, events so far)."""


FORM = ENGINE + 5
"""An engine forms its next batch. After all engines have said what ended at this instant: it takes in what they
free."""

COLLECT_EVERY = 500_000
"""Clock events between two collections of reference cycles (flushed prefix trees)."""


class StuckError(RuntimeError):
    """Work is queued and nothing finishes."""


def forms(model: EngineModel) -> bool:
    """Whether the engine's next wake-up starts an iteration (and does not end one or carry news)."""
    return model._form and model._k <= 0 and not model.due


class EngineSlot:
    """One engine model with its pending wake-up."""

    __slots__ = ("index", "model", "namespace", "released", "scheduled")

    def __init__(self, index: int, model: EngineModel) -> None:
        self.index = index
        self.model = model
        self.scheduled = inf
        self.namespace = 0
        self.released = False
        """Its GPUs train."""


class SimulatedBackend:
    """Runs one scenario in virtual time.

    `faults`: events to inject at given times (`EngineLost`, `EngineJoined`, `WeightUpdateFailed`), for tests and
    what-if studies. Raises `StuckError` when nothing moves any more, `WorkloadError` and `CostError` before the run
    starts.
    """

    def __init__(
        self,
        scenario: Scenario,
        base_dir: Path,
        observers: Sequence[Observer] = (),
        faults: Iterable[said.Event] = (),
    ) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.core = Core(scenario)
        self._observers = tuple(observers)
        model = model_spec(scenario.model, base_dir)
        gpu = gpu_spec(scenario.cluster.gpu)
        layout = self.core.layout
        self.workload: Workload = workload(scenario, base_dir)
        self.store = ExperienceStore(self.workload)
        self.costs = cost_model(scenario, model, gpu, base_dir)
        self.trainer = TrainerModel(scenario, layout, model, gpu)
        self.paths = WeightPaths(scenario, layout, model, gpu)
        options = self._engine_options(kv_pool_tokens(scenario, model, gpu))
        mode = scenario.simulation.mode
        self.engines = [EngineSlot(e.index, EngineModel(options, self.costs, mode)) for e in layout.engines]
        rewards, tools, roles = scenario.workload.rewards, scenario.workload.tools, scenario.placement.roles
        self.verifiers = Station(self.clock, rewards.servers)
        self.tools = Station(self.clock, tools.slots)
        self.external = Station(self.clock, roles.external_slots)
        self._external_s = roles.external_seconds_per_trajectory
        self.environments = Environments(self.clock, tools.environments)
        self._salt = scenario.weights.transition.kv == "salt_by_version"
        self._max_new = scenario.workload.max_response_length
        self._ignore_eos = scenario.rollout.ignore_eos
        self._overlap = not scenario.rollout.engine.disable_overlap_schedule
        self._keep_tasks = scenario.experience.staleness.action == "retry" or (
            scenario.rollout.admission.type == "over_sampling"
        )
        self._pending: deque[said.Event] = deque()
        self._telling = False
        self._forming = False
        self._arrivals: Iterator[tuple[float, Task]] | None = None
        self._preparing: list[Call] = []
        """What the preparation under way will say, unless it fails."""
        self._left_to_copy: dict[int, set[int]] = {}
        self.wake_ups = 0
        """Engine wake-ups that did something."""
        self._completed = 0
        self._seen_completed = -1
        self._faults = tuple(faults)
        self._do: dict[type[do.Action], Callable[[Any], None]] = {
            kind: getattr(self, name)
            for kind, name in (
                (do.StartTurn, "_start_turn"),
                (do.AbortTurn, "_abort_turn"),
                (do.DrawTask, "_draw_task"),
                (do.PrepareEnvironment, "_prepare_environment"),
                (do.ReleaseEnvironment, "_release_environment"),
                (do.RunTool, "_run_tool"),
                (do.ComputeSignals, "_compute_signals"),
                (do.Train, "_train"),
                (do.Retire, "_retire"),
                (do.PrepareWeights, "_prepare_weights"),
                (do.PauseEngine, "_pause_engine"),
                (do.CopyWeights, "_copy_weights"),
                (do.RequantizeWeights, "_requantize"),
                (do.FlushCache, "_flush_cache"),
                (do.ResumeEngine, "_resume_engine"),
                (do.SwitchPool, "_switch_pool"),
                (do.SetTimer, "_set_timer"),
            )
        }

    def _engine_options(self, kv_tokens: int) -> EngineModelOptions:
        e = self.scenario.rollout.engine
        return EngineModelOptions(
            max_total_num_tokens=kv_tokens,
            max_running_requests=e.max_running_requests,
            chunked_prefill_size=e.chunked_prefill_size,
            max_prefill_tokens=e.max_prefill_tokens,
            page_size=e.page_size,
            schedule_policy=e.schedule_policy,
            schedule_conservativeness=e.schedule_conservativeness,
            context_length=e.context_length or 2**31,
            disable_overlap_schedule=e.disable_overlap_schedule,
            disable_radix_cache=e.disable_radix_cache,
        )

    def use(self, observers: Sequence[Observer]) -> None:
        """Replace the observers; before the run starts."""
        self._observers = tuple(observers)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, progress: Progress | None = None, every: int = 4_000) -> str:
        """Run to the end; returns the reason that the core gave for finishing."""
        self.start()
        collects = gc.isenabled()
        gc.disable()  # finished records are freed by reference counts; scanning for cycles costs a quarter of a run
        try:
            self._loop(progress, every)
        finally:
            if collects:
                gc.enable()
        return self.finish_reason

    def _loop(self, progress: Progress | None, every: int) -> None:
        clock, core = self.clock, self.core
        limit = self.scenario.simulation.max_simulated_s
        collect_at = COLLECT_EVERY
        while not core.finished:
            clock.run_events(every, limit)
            if clock.stopped:
                return
            if clock._heap and clock._heap[0][0] > limit:
                raise StuckError(f"the run is longer than max_simulated_s = {limit} s: {core.explain()}")
            if not clock._heap:
                raise StuckError(f"nothing is scheduled at {clock.now:.3f} s: {core.explain()}")
            if clock.events >= collect_at:
                collect_at = clock.events + COLLECT_EVERY
                gc.collect()
            if progress is not None:
                progress(clock.now, core.context.progress.batches_trained, clock.events)

    finish_reason = ""

    def start(self) -> None:
        """Schedule what happens by itself, and tell the core that the engines are up."""
        clock, scenario = self.clock, self.scenario
        for fault in self._faults:
            clock.at(fault.t, WEIGHTS, self._fault, fault)
        self._arrivals = self.workload.arrivals()
        clock.at(scenario.simulation.watchdog_s, WATCHDOG, self._watchdog)
        interval = self.core.rollouts.concurrency.report_interval_s
        if interval:
            clock.at(interval, REPORT, self._report_all, interval)
        wanted = scenario.weights.path
        paths = wanted.among if wanted.type == "cheapest" else ()
        self.tell(said.RunStarted(clock.now, tuple(self.paths.expected(p) for p in paths)))
        self._next_arrival()

    def tell(self, event: said.Event) -> None:
        """Hand an event to the core and carry out what follows; events that follow at once are told in order."""
        pending = self._pending
        if self._telling:
            pending.append(event)
            return
        self._telling = True
        handle, observers, table = self.core.handle, self._observers, self._do
        try:
            while True:
                actions = handle(event)
                for observe in observers:
                    observe(event, actions)
                for action in actions:
                    carry_out = table.get(type(action))
                    if carry_out is not None:
                        carry_out(action)
                    elif type(action) is do.Finish:
                        self.finish_reason = action.reason
                        self.clock.stopped = True
                        pending.clear()
                if not pending:
                    break
                event = pending.popleft()
        finally:
            self._telling = False

    def _watchdog(self, _: Any) -> None:
        if self._completed == self._seen_completed:
            raise StuckError(
                f"nothing finished between {self.clock.now - self.scenario.simulation.watchdog_s:.0f} s and "
                f"{self.clock.now:.0f} s (simulated): {self.core.explain()}"
            )
        self._seen_completed = self._completed
        self.clock.at(self.clock.now + self.scenario.simulation.watchdog_s, WATCHDOG, self._watchdog)

    def _fault(self, event: said.Event) -> None:
        now = self.clock._now
        if isinstance(event, said.EngineLost):
            slot = self.engines[event.engine]
            slot.model = EngineModel(
                self._engine_options(slot.model.kv_total), self.costs, self.scenario.simulation.mode
            )
            slot.scheduled = inf
            if slot.released:
                slot.model.release_memory(now)
        elif isinstance(event, said.EngineJoined):
            slot = self.engines[event.engine]
            slot.model.set_version(now, event.version)
            if self._salt:
                slot.namespace = event.version
        elif isinstance(event, said.WeightUpdateFailed) and event.engine < 0:
            for call in self._preparing:
                call.cancel()
        self.tell(event)

    # --- engines ------------------------------------------------------------------------------------------------------

    def _schedule(self, slot: EngineSlot) -> None:
        model = slot.model
        wake = model.wake_at
        if wake != slot.scheduled:
            slot.scheduled = wake
            if wake != inf:
                now = self.clock._now
                phase = FORM if forms(model) else ENGINE
                self.clock.at(wake if wake > now else now, phase, self._wake, (slot, wake, phase))

    def _wake(self, arg: tuple[EngineSlot, float, int]) -> None:
        slot, wake, phase = arg
        if slot.scheduled != wake:
            return
        if phase == ENGINE and forms(slot.model):
            self.clock.at(self.clock._now, FORM, self._wake, (slot, wake, FORM))
            return
        slot.scheduled = inf
        self.wake_ups += 1
        self._forming = phase == FORM
        for notice in slot.model.advance(self.clock._now):
            self._notice(slot, notice)
        self._forming = False
        self._schedule(slot)

    def _message_t(self) -> float:
        """When a message that is sent now reaches an engine. What follows from the start of an iteration comes after
        all iterations that start at this instant, whichever of them were formed already."""
        now = self.clock._now
        return nextafter(now, inf) if self._forming else now

    def _notice(self, slot: EngineSlot, n: Finished | Aborted | Paused) -> None:
        now = self.clock._now
        kind = type(n)
        if kind is Finished:
            self._completed += 1
            trajectory, turn = divmod(n.rid, _TURNS)
            c = self.store.conversation(trajectory)
            plan = c.plan
            prompt = c.prompt_tokens
            # under overlap a stop token is seen one step late, and that step has computed its KV
            seen_late = self._overlap and n.finish_reason == "stop"
            self.store.answered(c, n.output_tokens, n.output_tokens - (not seen_late))
            continues = turn + 1 < len(plan.output_tokens)
            reason = "tool_calls" if continues else n.finish_reason
            self.tell(
                said.TurnFinished(
                    now,
                    trajectory,
                    turn,
                    slot.index,
                    prompt,
                    n.output_tokens,
                    n.spans,
                    n.cached_tokens,
                    n.first_token_t,
                    n.started_t,
                    reason,
                    continues,
                    n.recomputed_tokens,
                    n.kv_version,
                    n.retractions,
                )
            )
        elif kind is Aborted:
            trajectory, turn = divmod(n.rid, _TURNS)
            self.tell(said.TurnFailed(now, trajectory, turn, slot.index, "aborted", n.output_tokens))
        else:
            self.tell(said.EnginePaused(now, slot.index))

    def _start_turn(self, a: do.StartTurn) -> None:
        slot = self.engines[a.engine]
        c = self.store.open(a.trajectory, a.group, a.task, a.member)
        self.store.begin_turn(c)
        plan, turn = c.plan, a.turn
        slot.model.submit(
            self._message_t(),
            Request(
                rid=a.trajectory * _TURNS + turn,
                content=c.content,
                prompt_tokens=c.prompt_tokens,
                output_tokens=plan.output_tokens[turn],
                max_new_tokens=self._max_new if plan.stops[turn] else plan.output_tokens[turn],
                stops=plan.stops[turn],
                ignore_eos=self._ignore_eos,
                output_content=c.output_content,
                namespace=slot.namespace,
                known_tokens=c.known_tokens,
            ),
        )
        self._schedule(slot)

    def _abort_turn(self, a: do.AbortTurn) -> None:
        slot = self.engines[a.engine]
        slot.model.abort(self._message_t(), a.trajectory * _TURNS + a.turn)
        self._schedule(slot)

    def _report(self, slot: EngineSlot) -> None:
        m = slot.model
        m.sync(self.clock._now)
        self._schedule(slot)
        self.tell(
            said.LoadReported(
                self.clock._now,
                slot.index,
                m.running,
                m.waiting,
                m.kv_used,
                m.kv_total,
                m.retractions,
                m.prefill_s,
                m.recompute_s,
                m.decode_s,
            )
        )

    def _report_all(self, interval: float) -> None:
        for slot in self.engines:
            self._report(slot)
        self.clock.at(self.clock._now + interval, REPORT, self._report_all, interval)

    # --- tasks, tools, environments -----------------------------------------------------------------------------------

    def _draw_task(self, a: do.DrawTask) -> None:
        task = self.workload.draw() if a.task < 0 else self.workload.again(a.task)
        now = self.clock._now
        if task is None:
            self.tell(said.TasksExhausted(now, a.group))
        else:
            self._deliver(a.group, task)

    def _deliver(self, group: int, task: Task) -> None:
        self.store.add_task(task)
        if group >= 0:
            self.store.bind(group, task.index)
        self.tell(
            said.TaskArrived(
                self.clock._now,
                group,
                task.index,
                task.prompt_tokens,
                task.blocks,
                task.block_tokens,
                task.environment,
                len(task.plans),
            )
        )

    def _next_arrival(self) -> None:
        if self._arrivals is None:
            return
        following = next(self._arrivals, None)
        if following is None:
            self.tell(said.TasksExhausted(self.clock._now))
        else:
            self.clock.at(following[0], ARRIVE, self._arrive, following[1])

    def _arrive(self, task: Task) -> None:
        self._deliver(-1, task)
        self._next_arrival()

    def _prepare_environment(self, a: do.PrepareEnvironment) -> None:
        c = self.store.open(a.trajectory, a.group, a.task, a.member)
        self.environments.prepare(a.trajectory, c.plan.prepare_s, self._environment_ready, a.trajectory)

    def _environment_ready(self, trajectory: int) -> None:
        self.tell(said.EnvironmentReady(self.clock._now, trajectory))

    def _release_environment(self, a: do.ReleaseEnvironment) -> None:
        self.environments.release(a.trajectory, self.store.conversation(a.trajectory).plan.release_s)

    def _run_tool(self, a: do.RunTool) -> None:
        seconds = self.store.conversation(a.trajectory).plan.tool_s[a.turn]
        self.tools.submit(seconds, self._tool_done, (a.trajectory, a.turn))

    def _tool_done(self, arg: tuple[int, int]) -> None:
        trajectory, turn = arg
        self._completed += 1
        c = self.store.find(trajectory)
        if c is None:
            return
        tokens = c.plan.observation_tokens[turn]
        self.store.observed(c, tokens)
        self.tell(said.ToolFinished(self.clock._now, trajectory, tokens))

    # --- signals and training -----------------------------------------------------------------------------------------

    def _compute_signals(self, a: do.ComputeSignals) -> None:
        if a.pool >= 0:
            lengths = [self.store.conversation(t).prompt_tokens for t in a.trajectories]
            end = self.clock._now + self.trainer.forward_seconds(lengths)
            self.clock.at(end, COMPLETE, self._signals_done, a)
        elif a.signal == "reward":
            for t in a.trajectories:
                plan = self.store.conversation(t).plan
                if plan.reward_s <= 0 and not self.verifiers.slots:
                    self.tell(said.SignalReady(self.clock._now, "reward", (t,), (plan.reward,)))
                else:
                    self.verifiers.submit(plan.reward_s, self._reward_done, (t, plan.reward))
        else:
            for t in a.trajectories:
                self.external.submit(self._external_s, self._external_done, (a.signal, t))

    def _signals_done(self, a: do.ComputeSignals) -> None:
        self._completed += 1
        self.tell(said.SignalReady(self.clock._now, a.signal, a.trajectories))

    def _reward_done(self, arg: tuple[int, float]) -> None:
        self.tell(said.SignalReady(self.clock._now, "reward", (arg[0],), (arg[1],)))

    def _external_done(self, arg: tuple[str, int]) -> None:
        self.tell(said.SignalReady(self.clock._now, arg[0], (arg[1],)))

    def _train(self, a: do.Train) -> None:
        lengths = [x.prompt_tokens + x.output_tokens + x.observation_tokens for x in a.experiences]
        end = self.clock._now
        for update, seconds in enumerate(self.trainer.update_seconds(lengths, a.updates)):
            end += seconds
            self.clock.at(end, COMPLETE, self._step_finished, (a.batch, update, update + 1 == a.updates))

    def _step_finished(self, arg: tuple[int, int, bool]) -> None:
        batch, update, last = arg
        self._completed += 1
        if last:
            for slot in self.engines:
                self._report(slot)
        self.tell(said.TrainStepFinished(self.clock._now, batch, update))

    def _retire(self, a: do.Retire) -> None:
        self.store.retire(a.trajectories, a.group, keep_task=self._keep_tasks and a.outcome != "trained")

    # --- weights and phases -------------------------------------------------------------------------------------------

    def _prepare_weights(self, a: do.PrepareWeights) -> None:
        prepared = self.paths.prepare(self.clock._now, a.path, a.participants)
        seconds = prepared.ready_t - self.clock._now
        event = said.WeightsPrepared(prepared.ready_t, a.version, seconds, prepared.bytes)
        self._preparing = [self.clock.at(prepared.ready_t, WEIGHTS, self.tell, event)]
        if prepared.trainer_released_t is None:
            self._left_to_copy[a.version] = set(a.participants)
        else:
            released = said.TrainerReleased(prepared.trainer_released_t, a.version)
            self._preparing.append(self.clock.at(prepared.trainer_released_t, WEIGHTS, self.tell, released))

    def _pause_engine(self, a: do.PauseEngine) -> None:
        slot = self.engines[a.engine]
        slot.model.pause(self._message_t(), a.mode)
        self._schedule(slot)

    def _copy_weights(self, a: do.CopyWeights) -> None:
        end = self.paths.copy(self.clock._now, a.path, a.participants, a.engine)
        self.clock.at(end, WEIGHTS, self._copied, a)

    def _copied(self, a: do.CopyWeights) -> None:
        self.tell(said.WeightsCopied(self.clock._now, a.engine, a.version))
        left = self._left_to_copy.get(a.version)
        if left is not None:
            left.discard(a.engine)
            if not left:
                del self._left_to_copy[a.version]
                self.tell(said.TrainerReleased(self.clock._now, a.version))

    def _requantize(self, a: do.RequantizeWeights) -> None:
        end = self.paths.requantize(self.clock._now, a.engine)
        self.clock.at(end, WEIGHTS, self.tell, said.EngineReady(end, a.engine, a.version))

    def _flush_cache(self, a: do.FlushCache) -> None:
        if not self.engines[a.engine].model.flush(self.clock._now):
            version = self.core.publications.update.version if self.core.publications.update else 0
            reason = "flush refused: a batch is running"
            self.tell(said.WeightUpdateFailed(self.clock._now, a.engine, version, "flush", reason))

    def _resume_engine(self, a: do.ResumeEngine) -> None:
        end = self.clock._now + self.scenario.weights.pause_overhead_s
        self.clock.at(end, WEIGHTS, self._resumed, (a, self.engines[a.engine].model))

    def _resumed(self, arg: tuple[do.ResumeEngine, EngineModel]) -> None:
        a, model = arg
        slot, now = self.engines[a.engine], self.clock._now
        if slot.model is not model:
            return  # it was lost meanwhile
        slot.model.set_version(now, a.version)
        if self._salt:
            slot.namespace = a.version
        slot.model.resume(now)
        self.tell(said.EngineResumed(now, a.engine, a.version))
        self._schedule(slot)

    def _switch_pool(self, a: do.SwitchPool) -> None:
        now = self.clock._now
        if a.phase == "train" and self.scenario.placement.switch.clear_kv:
            for index in self.core.layout.pools[a.pool].engines:
                slot = self.engines[index]
                self._take_in(slot)
                slot.model.release_memory(now)
                slot.released = True
        self.clock.at(now + self.paths.switch_seconds(a.phase), COMPLETE, self._switched, a)

    def _take_in(self, slot: EngineSlot) -> None:
        """Let an idle engine handle messages that came too late (an abort of a request that ended by itself)."""
        for notice in slot.model.advance(self.clock._now):
            self._notice(slot, notice)
        self._schedule(slot)

    def _switched(self, a: do.SwitchPool) -> None:
        now = self.clock._now
        if a.phase == "generate" and self.scenario.placement.switch.clear_kv:
            for index in self.core.layout.pools[a.pool].engines:
                slot = self.engines[index]
                slot.model.resume_memory(now)
                slot.released = False
        self.tell(said.PoolSwitched(now, a.pool, a.phase))

    def _set_timer(self, a: do.SetTimer) -> None:
        self.clock.at(a.at, TIMER, self._timer, a.timer)

    def _timer(self, timer: int) -> None:
        self.tell(said.TimerFired(self.clock._now, timer))


_TURNS = 1 << 20
"""Request id = trajectory x this + turn."""
