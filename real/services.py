"""What a real run has besides engines and weights: data source, tools, environments, verifiers, trainer.

Each action becomes a task, each result an event. A task holds the conversations it was asked about from the moment of
the action on: what ends in the meantime is done to the end and not reported. It refuses to know engines and versions,
except that engines report their load before a batch's last update is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from real.environments.base import Environment, RealTask
from real.environments.sandbox import ToolLost
from real.learning.critic import VALUES
from real.records import Record
from real.slots import Places, Slots
from real.store import Conversation, ExperienceStore
from real.together import Together
from real.trainer.trainer import CriticStats, StepStats, TeacherValues, Trainer
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
LOG_PROBS = {"old_log_probs": ("actor", "old_log_probs"), "reference": ("reference", "reference_log_probs")}
"""Signal of the training pool -> (model that computes it, field of the conversation)."""


class Services:
    """`tell` hands an event to the core; `before_step` runs before the last update of that batch is reported; `trained`
    hears what each update of actor and critic did."""

    def __init__(
        self,
        scenario: Scenario,
        store: ExperienceStore,
        environment: Environment,
        trainer: Trainer,
        teacher_of: Callable[[RealTask], str],
        tell: Callable[[said.Event], None],
        spawn: Spawn,
        now: Callable[[], float],
        before_step: Callable[[int], Awaitable[None]],
        trained: Callable[[StepStats, CriticStats | None, do.Train, float], None],
    ) -> None:
        self.store = store
        self.environment = environment
        self.trainer = trainer
        self.tell = tell
        self.spawn = spawn
        self.now = now
        self._teacher_of = teacher_of
        self._critic = scenario.algorithm.needs_critic
        self._scoring = Together(trainer.rewards) if scenario.real.reward_model is not None else None
        self._teaching = Together(self._taught)
        self._before_step = before_step
        self._trained = trained
        self._members = scenario.members_started
        workload = scenario.workload
        self._verifiers = Slots(workload.rewards.servers)
        self._tools = Slots(workload.tools.slots, workload.tools.max_queued)
        self._places = Places(environment, workload.tools.environments)
        self.drawn = 0
        """Tasks taken from the data source."""
        self._keep_tasks = scenario.experience.staleness.action == "retry" or (
            scenario.rollout.admission.type == "over_sampling"
        )

    def start(self) -> None:
        """Tasks that arrive by themselves begin to."""
        arrivals = self.environment.arrivals()
        if arrivals is not None:
            self.spawn(self._arrive(arrivals))

    async def _arrive(self, arrivals: Any) -> None:
        for at, task in arrivals:
            await asyncio.sleep(max(at - self.now(), 0.0))
            self._deliver(-1, task)
        self.tell(said.TasksExhausted(self.now()))

    # --- tasks, tools, environments -----------------------------------------------------------------------------------

    def draw_task(self, a: do.DrawTask) -> None:
        task = self.environment.draw() if a.task < 0 else self.environment.again(a.task)
        self.drawn += a.task < 0
        if task is None:
            self.tell(said.TasksExhausted(self.now(), a.group))
        else:
            self._deliver(a.group, task)

    def _deliver(self, group: int, task: RealTask) -> None:
        self.store.add_task(task)
        if group >= 0:
            self.store.bind(group, task.index, task.members or self._members)
        self.tell(
            said.TaskArrived(
                self.now(),
                group,
                task.index,
                len(task.prompt_ids),
                task.blocks,
                task.block_tokens,
                task.environment,
                task.members,
            )
        )

    def prepare_environment(self, a: do.PrepareEnvironment) -> None:
        c = self.store.open(a.trajectory, a.group, a.task, a.member, self._members)

        def ready() -> None:
            self.tell(said.EnvironmentReady(self.now(), c.trajectory))

        self.spawn(self._places.prepare(c.task, (c.trajectory, c.member), ready))

    def release_environment(self, a: do.ReleaseEnvironment) -> None:
        self._places.release((a.trajectory, self.store[a.trajectory].member))

    def run_tool(self, a: do.RunTool) -> None:
        self.spawn(self._run_tool(self.store[a.trajectory]))

    async def _run_tool(self, c: Conversation) -> None:
        who, fault = (c.trajectory, c.member), ""
        ids: list[int] | None = None
        async with self._tools.one_of_few() as got:
            if not got:
                fault = "queue"
            else:
                try:
                    ids = await self.environment.run_tool(c.task, who, c.call)
                    fault = self.environment.tool_fault(c.task, who)
                except ToolLost:
                    fault = "died"
        if self.store.find(c.trajectory) is not c:
            return
        if ids is None:
            self.tell(said.ToolFinished(self.now(), c.trajectory, 0, True, fault))
            return
        c.observed(ids)
        self.tell(said.ToolFinished(self.now(), c.trajectory, len(ids), False, fault))

    # --- signals and training -----------------------------------------------------------------------------------------

    def compute_signals(self, a: do.ComputeSignals) -> None:
        conversations = [self.store[t] for t in a.trajectories]
        if a.signal == "teacher":
            self.spawn(self._teach(a, conversations))
        elif a.signal == "critic":
            self.spawn(self._values(a, conversations))
        elif a.pool >= 0:
            self.spawn(self._log_probs(a, conversations))
        else:
            for c in conversations:
                self.spawn(self._reward(c))

    async def _reward(self, c: Conversation) -> None:
        async with self._verifiers.one():
            reward = await self._score(c)
        if self.store.find(c.trajectory) is c:
            c.reward = reward
            self.tell(said.SignalReady(self.now(), "reward", (c.trajectory,), (reward,)))

    async def _score(self, c: Conversation) -> float:
        """By the reward model if there is one, else by the environment."""
        if self._scoring is not None:
            return await self._scoring.ask(c.record())
        response = c.ids[c.prompt_tokens :]
        return await self.environment.reward(c.task, c.member, list(c.task.prompt_ids), response, c.outputs)

    async def _log_probs(self, a: do.ComputeSignals, conversations: Sequence[Conversation]) -> None:
        model, name = LOG_PROBS[a.signal]
        values = await self.trainer.log_probs([c.record() for c in conversations], model)
        for c, v in zip(conversations, values, strict=True):
            setattr(c, name, v)
        self.tell(said.SignalReady(self.now(), a.signal, a.trajectories))

    async def _teach(self, a: do.ComputeSignals, conversations: Sequence[Conversation]) -> None:
        """Each record by the teacher of its task, on exactly the ids that the student saw."""
        asked = [self._teaching.ask((c.record(), self._teacher_of(c.task))) for c in conversations]
        for c, values in zip(conversations, await asyncio.gather(*asked), strict=True):
            c.extra |= {name: value.copy() for name, value in values.items()}
        self.tell(said.SignalReady(self.now(), a.signal, a.trajectories))

    async def _taught(self, asked: list[tuple[Record, str]]) -> list[TeacherValues]:
        return await self.trainer.teacher_log_probs([record for record, _ in asked], [name for _, name in asked])

    async def _values(self, a: do.ComputeSignals, conversations: Sequence[Conversation]) -> None:
        for c, values in zip(
            conversations, await self.trainer.values([c.record() for c in conversations]), strict=True
        ):
            c.extra[VALUES] = values.copy()  # what came from another process is read-only
        self.tell(said.SignalReady(self.now(), a.signal, a.trajectories))

    def train(self, a: do.Train) -> None:
        self.spawn(self._train(a, [self.store[x.trajectory].record(x.masked_tokens) for x in a.experiences]))

    async def _train(self, a: do.Train, records: list[Record]) -> None:
        for update in range(a.updates):
            started = self.now()
            stats = await self.trainer.train_update(records, a.batch, update, a.updates)
            critic = None
            if self._critic:
                critic = await self.trainer.train_critic(records, a.batch, update, a.updates)
            self._trained(stats, critic, a, self.now() - started)
            if update + 1 == a.updates:
                await self._before_step(a.batch)
            self.tell(said.TrainStepFinished(self.now(), a.batch, update))

    def retire(self, a: do.Retire) -> None:
        again = self._keep_tasks and a.outcome != "trained" and a.reason != "redundant"
        self.store.retire(a.trajectories, a.group, keep_task=again)
