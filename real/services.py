"""What a real run has besides engines and weights: data source, tools, environments, verifiers, trainer.

Each action becomes a task, each result an event. It refuses to know engines and versions, except that engines report
their load before a batch's last update is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from real.environments.base import Environment, RealTask
from real.environments.sandbox import ToolLost
from real.learning.critic import VALUES
from real.records import Record
from real.store import Conversation, ExperienceStore
from real.together import Together
from real.trainer.trainer import CriticStats, StepStats, TeacherValues, Trainer
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
LOG_PROBS = {"old_log_probs": ("actor", "old_log_probs"), "reference": ("reference", "reference_log_probs")}
"""Signal of the training pool -> (model that computes it, field of the conversation)."""


class Slots:
    """At most `n` at once; 0 means as many as come. `most_waiting`: so many may wait for one."""

    def __init__(self, n: int, most_waiting: int | None = None) -> None:
        self._semaphore = asyncio.Semaphore(n) if n else None
        self._free_or_waiting = None if most_waiting is None or not n else n + most_waiting
        self._asked = 0

    def one(self) -> AbstractAsyncContextManager[Any]:
        return self._semaphore if self._semaphore is not None else nullcontext()

    @asynccontextmanager
    async def one_of_few(self) -> AsyncIterator[bool]:
        """As `one`, and whether it was got: False, at once, if too many wait already."""
        if self._asked == self._free_or_waiting:
            yield False
            return
        self._asked += 1
        try:
            async with self.one():
                yield True
        finally:
            self._asked -= 1


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
        self._environments = asyncio.Semaphore(workload.tools.environments or 2**31)
        self.drawn = 0
        """Tasks taken from the data source."""
        self._held: set[int] = set()
        """Trajectories that occupy an environment."""
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
        self.spawn(self._prepare(a))

    async def _prepare(self, a: do.PrepareEnvironment) -> None:
        c = self.store.open(a.trajectory, a.group, a.task, a.member, self._members)
        await self._environments.acquire()
        self._held.add(a.trajectory)
        await self.environment.prepare(c.task, (a.trajectory, c.member))
        self.tell(said.EnvironmentReady(self.now(), a.trajectory))

    def release_environment(self, a: do.ReleaseEnvironment) -> None:
        c = self.store[a.trajectory]
        self.spawn(self._release(c.task, (a.trajectory, c.member)))

    async def _release(self, task: RealTask, who: tuple[int, int]) -> None:
        await self.environment.release_member(task, who)
        if who[0] in self._held:
            self._held.discard(who[0])
            self._environments.release()

    def run_tool(self, a: do.RunTool) -> None:
        self.spawn(self._run_tool(a))

    async def _run_tool(self, a: do.RunTool) -> None:
        c = self.store[a.trajectory]
        who, fault = (a.trajectory, c.member), ""
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
        if self.store.find(a.trajectory) is not c:
            return
        if ids is None:
            self.tell(said.ToolFinished(self.now(), a.trajectory, 0, True, fault))
            return
        c.observed(ids)
        self.tell(said.ToolFinished(self.now(), a.trajectory, len(ids), False, fault))

    # --- signals and training -----------------------------------------------------------------------------------------

    def compute_signals(self, a: do.ComputeSignals) -> None:
        if a.signal == "teacher":
            self.spawn(self._teach(a))
        elif a.signal == "critic":
            self.spawn(self._values(a))
        elif a.pool >= 0:
            self.spawn(self._log_probs(a))
        else:
            for trajectory in a.trajectories:
                self.spawn(self._reward(trajectory))

    async def _reward(self, trajectory: int) -> None:
        c = self.store[trajectory]
        async with self._verifiers.one():
            reward = await self._score(c)
        if self.store.find(trajectory) is c:
            c.reward = reward
            self.tell(said.SignalReady(self.now(), "reward", (trajectory,), (reward,)))

    async def _score(self, c: Conversation) -> float:
        """By the reward model if there is one, else by the environment."""
        if self._scoring is not None:
            return await self._scoring.ask(c.record())
        response = c.ids[c.prompt_tokens :]
        return await self.environment.reward(c.task, c.member, list(c.task.prompt_ids), response, c.outputs)

    async def _log_probs(self, a: do.ComputeSignals) -> None:
        model, name = LOG_PROBS[a.signal]
        conversations = [self.store[t] for t in a.trajectories]
        values = await self.trainer.log_probs([c.record() for c in conversations], model)
        for c, v in zip(conversations, values, strict=True):
            setattr(c, name, v)
        self.tell(said.SignalReady(self.now(), a.signal, a.trajectories))

    async def _teach(self, a: do.ComputeSignals) -> None:
        """Each record by the teacher of its task, on exactly the ids that the student saw."""
        conversations = [self.store[t] for t in a.trajectories]
        asked = [self._teaching.ask((c.record(), self._teacher_of(c.task))) for c in conversations]
        for c, values in zip(conversations, await asyncio.gather(*asked), strict=True):
            c.extra |= {name: value.copy() for name, value in values.items()}
        self.tell(said.SignalReady(self.now(), a.signal, a.trajectories))

    async def _taught(self, asked: list[tuple[Record, str]]) -> list[TeacherValues]:
        return await self.trainer.teacher_log_probs([record for record, _ in asked], [name for _, name in asked])

    async def _values(self, a: do.ComputeSignals) -> None:
        conversations = [self.store[t] for t in a.trajectories]
        for c, values in zip(
            conversations, await self.trainer.values([c.record() for c in conversations]), strict=True
        ):
            c.extra[VALUES] = values.copy()  # what came from another process is read-only
        self.tell(said.SignalReady(self.now(), a.signal, a.trajectories))

    def train(self, a: do.Train) -> None:
        self.spawn(self._train(a))

    async def _train(self, a: do.Train) -> None:
        records = [self.store[x.trajectory].record(x.masked_tokens) for x in a.experiences]
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
