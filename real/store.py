"""The real experience store: token ids, masks, log-probabilities and version spans of live trajectories.

Responsible for token-in token-out: the prompt of a turn is exactly the ids of everything before it, never text that was
tokenised again. Nothing is kept of a trajectory that was retired. It refuses to know engines, time and losses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from real.engines.client import Generated
from real.environments.base import Environment, RealTask, ToolCall
from real.records import Record, Span


class Conversation:
    """One live trajectory: all its ids so far, and per response token what the engine said."""

    __slots__ = (
        "call",
        "experts",
        "extra",
        "finish_reason",
        "group",
        "ids",
        "known_tokens",
        "log_probs",
        "mask",
        "member",
        "old_log_probs",
        "outputs",
        "partial",
        "prompt_tokens",
        "reference_log_probs",
        "reward",
        "spans",
        "task",
        "trajectory",
        "turns",
    )

    def __init__(self, trajectory: int, group: int, task: RealTask, member: int) -> None:
        self.trajectory = trajectory
        self.group = group
        self.task = task
        self.member = member
        self.ids: list[int] = list(task.prompt_ids)
        self.prompt_tokens = len(self.ids)
        """Of the task: where the response begins."""
        self.known_tokens = 0
        """Leading tokens of the next prompt whose KV this trajectory has computed before."""
        self.mask: list[bool] = []
        self.log_probs: list[float] = []
        self.spans: list[Span] = []
        self.turns: list[tuple[int, int]] = []
        self.outputs: list[list[int]] = []
        self.partial = 0
        """Tokens of the last turn, if it was taken back and goes on; 0: it is whole."""
        self.experts: NDArray[np.int32] | None = None
        self.finish_reason = ""
        self.call: ToolCall | None = None
        """What its last turn asked of a tool."""
        self.reward = 0.0
        self.extra: dict[str, NDArray[Any]] = {}
        """Further signals, by name."""
        self.old_log_probs: NDArray[np.float32] | None = None
        self.reference_log_probs: NDArray[np.float32] | None = None

    def answered(self, g: Generated, spans: tuple[Span, ...], *, whole: bool = True) -> None:
        """A turn is over, or was taken back and is to go on (not `whole`). `spans` count from the first token of `g`,
        which follows what the turn had generated before."""
        start = len(self.mask)
        # The last token was never an input, unless it is a stop token: SGLang's overlapped schedule sees that one a
        # step late, after it has been fed back.
        fed_back = len(g.output_ids) - (g.finish_reason != "stop")
        self.known_tokens = len(self.ids) + max(fed_back, 0)
        self.ids += g.output_ids
        self.mask += [True] * len(g.output_ids)
        self.log_probs += g.log_probs
        if self.partial:
            self.outputs[-1] += g.output_ids
            self.turns[-1] = (self.turns[-1][0], len(self.mask))
        else:
            self.outputs.append(list(g.output_ids))
            self.turns.append((start, len(self.mask)))
        self.partial = 0 if whole else self.partial + len(g.output_ids)
        for version, first, end in spans:
            last = self.spans[-1] if self.spans else (-1, 0, 0)
            if last[0] == version and last[2] == start + first:
                self.spans[-1] = (version, last[1], start + end)
            else:
                self.spans.append((version, start + first, start + end))
        self.experts = g.routed_experts
        self.finish_reason = g.finish_reason

    def observed(self, ids: list[int]) -> None:
        """A tool answered: context that carries no loss."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)

    def record(self, masked_tokens: int = 0) -> Record:
        """What a trainer needs. `masked_tokens`: so many actor tokens, those of the oldest versions, carry no loss.

        Raises `real.records.RecordError` if the parts disagree.
        """
        mask = np.array(self.mask, dtype=np.bool_)
        record = Record(
            trajectory=self.trajectory,
            group=self.group,
            task=self.task.index,
            prompt_tokens=self.prompt_tokens,
            token_ids=np.array(self.ids, dtype=np.int32),
            loss_mask=mask,
            generation_log_probs=np.array(self.log_probs, dtype=np.float32),
            spans=tuple(self.spans),
            reward=self.reward,
            finish_reason=self.finish_reason,
            old_log_probs=self.old_log_probs,
            reference_log_probs=self.reference_log_probs,
            routed_experts=self.experts,
            turns=tuple(self.turns),
            extra=dict(self.extra),
        ).check()
        for _, start, end in sorted(self.spans):
            if masked_tokens <= 0:
                break
            mask[start:end] = False
            masked_tokens -= end - start
        return record


class ExperienceStore:
    """Conversations by trajectory; tasks while a group of theirs lives."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tasks: dict[int, RealTask] = {}
        self._users: dict[int, set[int]] = {}
        self._left: dict[int, int] = {}
        self._task_of: dict[int, int] = {}
        self._kept: set[int] = set()
        self._conversations: dict[int, Conversation] = {}

    def add_task(self, task: RealTask) -> None:
        self._tasks[task.index] = task

    def bind(self, group: int, task: int, members: int) -> None:
        """This group of so many trajectories works on that task."""
        if group not in self._task_of:
            self._task_of[group] = task
            self._left[group] = members
            self._users.setdefault(task, set()).add(group)

    def open(self, trajectory: int, group: int, task: int, member: int, members: int) -> Conversation:
        """The trajectory's conversation, made on first use."""
        c = self._conversations.get(trajectory)
        if c is None:
            self.bind(group, task, members)
            c = self._conversations[trajectory] = Conversation(trajectory, group, self._tasks[task], member)
        return c

    def find(self, trajectory: int) -> Conversation | None:
        return self._conversations.get(trajectory)

    def __getitem__(self, trajectory: int) -> Conversation:
        return self._conversations[trajectory]

    def retire(self, trajectories: tuple[int, ...], group: int, *, keep_task: bool) -> None:
        """Forget trajectories; with the last of a group its task, unless a retry may come (`keep_task`, of any
        member)."""
        for t in trajectories:
            self._conversations.pop(t, None)
        if group not in self._task_of:
            return
        if keep_task:
            self._kept.add(group)
        self._left[group] -= len(trajectories)
        if self._left[group] > 0:
            return
        task = self._task_of.pop(group)
        del self._left[group]
        users = self._users[task]
        users.discard(group)
        kept = group in self._kept
        self._kept.discard(group)
        if not users:
            del self._users[task]
            if not kept:
                del self._tasks[task]
                self._environment.release(task)
