"""What the simulated backend has besides engines and weights: data source, tools, environments, verifiers, trainer.

Each action becomes a job at a queue or a formula, each result an event. It refuses to know engines and versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from sim.clock import ARRIVE, COMPLETE, Clock
from sim.experience_store import ExperienceStore
from sim.shared_machine import SharedMachine
from sim.tools import Done, Environments, Station
from sim.trainer import TrainerModel
from testbed.core import actions as do
from testbed.core import events as said
from testbed.fields import fields_of
from testbed.scenario import Scenario
from testbed.workloads import Task, Workload

_SignalReady: Final = said.SignalReady


class Services:
    """`tell` hands an event to the core; `before_step` is called before the last update of a batch is reported."""

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        store: ExperienceStore,
        workload: Workload,
        trainer: TrainerModel,
        tell: Callable[[said.Event], None],
        before_step: Callable[[], None],
    ) -> None:
        self.clock = clock
        self._agenda = clock.agenda
        self.store = store
        self.workload = workload
        self.trainer = trainer
        self.tell = tell
        self._before_step = before_step
        rewards, tools, roles = scenario.workload.rewards, scenario.workload.tools, scenario.placement.roles
        self.verifiers = Station(clock, rewards.servers)
        self.tools = Station(clock, tools.slots)
        self.external = Station(clock, roles.external_slots)
        self._external_s = roles.external_seconds_per_trajectory
        self.environments = Environments(clock, tools.environments, tools.prepare_slows_at)
        self._max_queued = tools.max_queued
        self._keep_tasks = scenario.experience.staleness.action == "retry" or (
            scenario.rollout.admission.type == "over_sampling"
        )
        self._on_reward: Done = self._reward_done
        """Made once: a bound method is an object."""
        self._arrivals: Iterator[tuple[float, Task]] | None = None
        self.machine: SharedMachine | None = None
        """That engines and trainer share, if they slow each other down."""
        self.completed = 0
        """Tool calls, signal jobs and optimizer updates that are done."""

    def start(self) -> None:
        """Tasks that arrive by themselves begin to."""
        self._arrivals = self.workload.arrivals()
        self._next_arrival()

    def draw_task(self, a: do.DrawTask) -> None:
        task = self.workload.draw() if a.task < 0 else self.workload.again(a.task)
        now = self._agenda.now
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
                self._agenda.now,
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
            self.tell(said.TasksExhausted(self._agenda.now))
        else:
            self.clock.at(following[0], ARRIVE, self._arrive, following[1])

    def _arrive(self, task: Task) -> None:
        self._deliver(-1, task)
        self._next_arrival()

    def prepare_environment(self, a: do.PrepareEnvironment) -> None:
        c = self.store.open(a.trajectory, a.group, a.task, a.member)
        self.environments.prepare(a.trajectory, c.plan.prepare_s, self._environment_ready, a.trajectory)

    def _environment_ready(self, trajectory: int) -> None:
        self.tell(said.EnvironmentReady(self._agenda.now, trajectory))

    def release_environment(self, a: do.ReleaseEnvironment) -> None:
        self.environments.release(a.trajectory, self.store.conversation(a.trajectory).plan.release_s)

    def run_tool(self, a: do.RunTool) -> None:
        if self._max_queued is not None and self.tools.taken and self.tools.queued >= self._max_queued:
            self.tell(said.ToolFinished(self._agenda.now, a.trajectory, 0, True, "queue"))
            return
        seconds = self.store.conversation(a.trajectory).plan.tool_s[a.turn]
        self.tools.submit(seconds, self._tool_done, (a.trajectory, a.turn))

    def _tool_done(self, arg: tuple[int, int]) -> None:
        trajectory, turn = arg
        self.completed += 1
        c = self.store.find(trajectory)
        if c is None:
            return
        tokens = c.plan.observation_tokens[turn]
        self.store.observed(c, tokens)
        self.tell(said.ToolFinished(self._agenda.now, trajectory, tokens))

    # --- signals and training -----------------------------------------------------------------------------------------

    def compute_signals(self, a: do.ComputeSignals) -> None:
        signal: str
        trajectories: tuple[int, ...]
        pool: int
        signal, trajectories, pool = fields_of(a)
        if pool >= 0:
            lengths = [self.store.conversation(t).prompt_tokens for t in trajectories]
            seconds = self.trainer.forward_seconds(lengths)
            if self.machine is None:
                self.clock.at(self._agenda.now + seconds, COMPLETE, self._signals_done, a)
            else:
                self.machine.work(seconds, self._signals_done, a)
        elif signal == "reward":
            for t in trajectories:
                c = self.store.conversation(t)
                if c.reward_s <= 0 and not self.verifiers.slots:
                    self.tell(_SignalReady(self._agenda.now, "reward", (t,), (c.reward,)))
                else:
                    self.verifiers.submit(c.reward_s, self._on_reward, ((t,), (c.reward,)))
        else:
            for t in trajectories:
                self.external.submit(self._external_s, self._external_done, (signal, t))

    def _signals_done(self, a: do.ComputeSignals) -> None:
        self.completed += 1
        self.tell(_SignalReady(self._agenda.now, a.signal, a.trajectories))

    def _reward_done(self, arg: tuple[Any, Any]) -> None:
        """`arg`: the trajectory and its reward, each as the event has it."""
        self.tell(_SignalReady(self._agenda.now, "reward", arg[0], arg[1]))

    def _external_done(self, arg: tuple[str, int]) -> None:
        self.tell(_SignalReady(self._agenda.now, arg[0], (arg[1],)))

    def train(self, a: do.Train) -> None:
        lengths = [x.prompt_tokens + x.output_tokens + x.observation_tokens for x in a.experiences]
        each = self.trainer.update_seconds(lengths, a.updates)
        if self.machine is not None:
            self.machine.work(each[0], self._go_on, (a.batch, 0, each))
            return
        end = self._agenda.now
        for update, seconds in enumerate(each):
            end += seconds
            self.clock.at(end, COMPLETE, self._step_finished, (a.batch, update, update + 1 == a.updates))

    def _go_on(self, arg: tuple[int, int, list[float]]) -> None:
        """An update is done, on a shared machine: the next one begins."""
        batch, update, each = arg
        following = update + 1
        if self.machine is not None and following < len(each):
            self.machine.work(each[following], self._go_on, (batch, following, each))
        self._step_finished((batch, update, following == len(each)))

    def _step_finished(self, arg: tuple[int, int, bool]) -> None:
        batch, update, last = arg
        self.completed += 1
        if last:
            self._before_step()
        self.tell(said.TrainStepFinished(self._agenda.now, batch, update))

    def retire(self, a: do.Retire) -> None:
        again = self._keep_tasks and a.outcome != "trained" and a.reason != "redundant"
        self.store.retire(a.trajectories, a.group, keep_task=again)
