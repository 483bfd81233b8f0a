"""What a workload hands out: tasks, and for every member of the group the plan of what its trajectory will do.

Responsible for the data types, content ids and the bookkeeping of live tasks. It refuses to know distributions,
files and engines.

Content is written as runs `(content_id, start, length)`: tokens start .. start + length - 1 of the endless text
`content_id`. Equal runs are equal tokens, and that is all a prefix cache needs. Id ranges, so that nothing is ever
equal by accident:

- prompts, shared prefixes and recorded prompt blocks have negative ids (`SYSTEM_PROMPT`, then `prompt_content`);
- outputs have non-negative ids, one per (trajectory, turn), chosen by the driver; an observation continues the text
  of the output in front of it (`extend`).

Ids of routing blocks (`Task.blocks`) are compared with each other only, never with content ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct

Run = tuple[int, int, int]
"""(content_id, start, length)."""

SYSTEM_PROMPT = -1
"""Content id of the system prompt that all tasks share."""

BLOCK_TOKENS = 512
"""Tokens of a routing block, unless a shared prefix or a journal says otherwise; the Mooncake traces' block size."""


def prompt_content(number: int) -> int:
    """Content id of the number-th prompt or recorded block (0, 1, ...)."""
    return -2 - number


def extend(
    prompt: tuple[Run, ...], output_content: int, output_tokens: int, observation_tokens: int
) -> tuple[Run, ...]:
    """The next turn's prompt: this turn's prompt, its output, and the observation, which continues the output's
    text."""
    return (*prompt, (output_content, 0, output_tokens + observation_tokens))


class Plan(Struct, gc=False):
    """What one trajectory will do, whatever the layout: k turns, decided in advance."""

    output_tokens: tuple[int, ...]
    """k values >= 1, all within the cap."""
    stops: tuple[bool, ...]
    """k values: ended by a stop token; False: by the cap."""
    tool_s: tuple[float, ...]
    """k - 1 values, seconds of the tool call after each turn but the last."""
    observation_tokens: tuple[int, ...]
    """k - 1 values >= 0: tokens that tool call answers with."""
    reward: float
    reward_s: float
    """Seconds of verification on a free verifier."""
    prepare_s: float = 0.0
    """Seconds to prepare this trajectory's environment (if the task has one)."""
    release_s: float = 0.0
    """Seconds to reclaim it."""


class Task(Struct, gc=False):
    """One problem: its prompt, and one plan per member of the group."""

    index: int
    """0, 1, 2, ... in the order of the data source."""
    prompt: tuple[Run, ...]
    prompt_tokens: int
    """Sum of the runs' lengths."""
    blocks: tuple[int, ...]
    """Prefix block ids of the prompt, for routing; equal leading ids are a shared prefix."""
    block_tokens: int
    environment: bool
    """Whether trajectories need a tool environment."""
    plans: list[Plan]


class Workload(Protocol):
    """Where tasks come from. The same scenario section, group size and seed give the same tasks in the same order,
    whatever the layout and the order of events."""

    fingerprint: str
    """Equal for equal workloads: a hash of configuration, seed, group size and data."""
    kinds: dict[str, str]
    """What the numbers rest on: `prompts`, `reply_lengths`, `tools`, `rewards`, `arrivals` -> measured | calibrated
    | assumed."""

    def draw(self) -> Task | None:
        """The next task; None when the data source has no more."""

    def again(self, index: int) -> Task:
        """A task drawn before, for a retry: the same plans. Raises KeyError if it was released or never drawn."""

    def arrivals(self) -> Iterator[tuple[float, Task]] | None:
        """(seconds, task) in the order of time, if tasks arrive by themselves; else None and the core draws them."""

    def release(self, index: int) -> None:
        """No retry will come: forget the task."""


class TaskStream:
    """A Workload over an iterator of tasks. Holds only tasks that are drawn and not released."""

    def __init__(
        self, tasks: Iterator[Task], times: Iterator[float] | None, fingerprint: str, kinds: dict[str, str]
    ) -> None:
        self.fingerprint = fingerprint
        self.kinds = kinds
        self._tasks = tasks
        self._times = times
        self._live: dict[int, Task] = {}

    def draw(self) -> Task | None:
        task = next(self._tasks, None)
        if task is not None:
            self._live[task.index] = task
        return task

    def again(self, index: int) -> Task:
        try:
            return self._live[index]
        except KeyError:
            raise KeyError(f"task {index} is not live: never drawn, or released") from None

    def release(self, index: int) -> None:
        self._live.pop(index, None)

    def arrivals(self) -> Iterator[tuple[float, Task]] | None:
        return None if self._times is None else self._arriving(self._times)

    def _arriving(self, times: Iterator[float]) -> Iterator[tuple[float, Task]]:
        while (task := self.draw()) is not None:
            yield next(times), task
