"""The simulated experience store: what belongs to a trajectory beyond the core's light metadata.

Its task and plan, the content of its conversation as runs, and the tokens whose KV it has computed before. Nothing is
kept of a trajectory that was retired. It refuses to know engines and time.
"""

from __future__ import annotations

from testbed.fields import fields_of
from testbed.numbered import Numbered
from testbed.workloads import Plan, Run, Task, Workload


class Conversation:
    """One live trajectory: its plan, and the next prompt as runs."""

    __slots__ = (
        "content",
        "done",
        "known_tokens",
        "output_content",
        "output_tokens",
        "plan",
        "prompt_tokens",
        "reward",
        "reward_s",
        "said",
        "stops",
    )

    def __init__(self, plan: Plan, content: tuple[Run, ...], prompt_tokens: int) -> None:
        self.plan = plan
        self.output_tokens: tuple[int, ...]
        self.stops: tuple[bool, ...]
        self.reward: float
        self.reward_s: float
        self.output_tokens, self.stops, _, _, self.reward, self.reward_s, _, _ = fields_of(plan)
        """The plan's, which every turn asks for."""
        self.content = content
        self.prompt_tokens = prompt_tokens
        self.known_tokens = 0
        """Leading tokens of the next prompt whose KV this trajectory has computed before."""
        self.output_content = -1
        self.said = 0
        """Tokens of the last output and of what a tool answered; they become part of `content` with the next turn."""
        self.done = 0
        """Tokens of this turn that it had generated when it was taken back."""


class ExperienceStore:
    """Conversations by trajectory; tasks while a group of theirs lives."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._tasks: dict[int, Task] = {}
        self._task_of: dict[int, int] = {}
        self._retired: dict[int, int] = {}
        self._kept: set[int] = set()
        """Groups whose task may be drawn again: a member was not trained."""
        self._users: dict[int, int] = {}
        self._conversations: Numbered[Conversation] = Numbered()
        self._contents = 0
        """Contents of outputs so far."""

    def conversation(self, trajectory: int) -> Conversation:
        """The conversation of a live trajectory. Raises KeyError if it has none."""
        return self._conversations[trajectory]

    def find(self, trajectory: int) -> Conversation | None:
        """As `conversation`; None if it has none."""
        return self._conversations.get(trajectory)

    def add_task(self, task: Task) -> None:
        self._tasks[task.index] = task

    def planned(self, task: int) -> list[tuple[int, float]]:
        """(output tokens, reward) of each member of a live task."""
        return [(sum(plan.output_tokens), plan.reward) for plan in self._tasks[task].plans]

    def bind(self, group: int, task: int) -> None:
        """This group works on that task."""
        if group not in self._task_of:
            self._task_of[group] = task
            self._users[task] = self._users.get(task, 0) + 1

    def open(self, trajectory: int, group: int, task: int, member: int) -> Conversation:
        """The trajectory's conversation, made on first use."""
        c = self._conversations.get(trajectory)
        if c is None:
            if group not in self._task_of:
                self.bind(group, task)
            t = self._tasks[task]
            c = self._conversations[trajectory] = Conversation(t.plans[member], t.prompt, t.prompt_tokens)
        return c

    def begin_turn(self, trajectory: int, group: int, task: int, member: int) -> Conversation:
        """The trajectory's conversation, with fresh content for the output of a turn that is sent (or sent again)."""
        c = self._conversations.get(trajectory)
        if c is None:
            c = self.open(trajectory, group, task, member)
        elif c.said:
            # the observation continues the text of the output in front of it
            c.content = (*c.content, (c.output_content, 0, c.said))
            c.said = 0
        c.output_content = self._contents
        self._contents += 1
        return c

    def answered(self, c: Conversation, output_tokens: int, fed_back: int) -> None:
        """A turn is over and another follows; `fed_back` of its output tokens have their KV computed (the last one may
        not)."""
        c.known_tokens = c.prompt_tokens + fed_back
        c.said = output_tokens
        c.prompt_tokens += output_tokens

    def cut_short(self, c: Conversation, output_tokens: int) -> None:
        """A turn was taken back and keeps what it has generated; the KV of the last token is not computed."""
        self.answered(c, output_tokens, output_tokens - 1)
        c.done += output_tokens

    def observed(self, c: Conversation, tokens: int) -> None:
        """A tool answered."""
        c.said += tokens
        c.prompt_tokens += tokens

    def retire(self, trajectories: tuple[int, ...], group: int, *, keep_task: bool) -> None:
        """Forget trajectories; with the last of a group its task, unless a retry may come (`keep_task`, of any
        member)."""
        for t in trajectories:
            self._conversations.pop(t)
        index = self._task_of.get(group)
        if index is None:
            return
        if keep_task:
            self._kept.add(group)
        gone = self._retired.get(group, 0) + len(trajectories)
        if gone < len(self._tasks[index].plans):
            self._retired[group] = gone
            return
        self._retired.pop(group, None)
        keep_task = group in self._kept
        self._kept.discard(group)
        del self._task_of[group]
        users = self._users[index] - 1
        if users:
            self._users[index] = users
            return
        del self._users[index]
        if not keep_task:
            del self._tasks[index]
            self._workload.release(index)
