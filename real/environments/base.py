"""What a real run asks of its environment: tasks as token ids, what follows a turn, tools, rewards.

Responsible for the Protocol, the few types that cross it, and what all environments that pose questions in text have in
common. Everything that leaves here is token ids. Refuses to know engines, the core and the trainer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from real.models.tokenizer import Tokenizer

BLOCK_TOKENS = 16
"""Tokens of a routing block of a text task; short, because the tasks are."""


Who = tuple[int, int]
"""(trajectory, member of its group): whose environment it is. A retry is another trajectory of the same member."""


@dataclass(frozen=True)
class RealTask:
    """One problem. The fields are those of `TaskArrived`, the prompt as ids."""

    index: int
    """0, 1, 2, ... in the order of the data source."""
    prompt_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    """Prefix block ids for routing; equal leading ids are a shared prefix."""
    block_tokens: int
    environment: bool
    """Whether trajectories need `prepare` and `release_member`."""
    members: int
    """Trajectories wanted; 0: the algorithm's."""
    payload: Any
    """The environment's own."""
    kind: str = ""
    """Family of the task: the environment's type, or the name of a mixture's part. Teachers are assigned to it."""


@dataclass(frozen=True)
class TurnLimits:
    """How one model call may end."""

    max_new_tokens: int
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    """What the end counts as, where a plan says it; empty: what the engine says."""


@dataclass(frozen=True)
class ToolCall:
    turn: int
    text: str
    """What the policy wrote between the delimiters."""


@dataclass(frozen=True)
class Demonstration:
    """A trajectory to learn from: [T] ids, and [T] whether the actor would have chosen the token."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]

    @classmethod
    def of(cls, pieces: Sequence[tuple[Sequence[int], bool]]) -> Demonstration:
        """Joined from (ids, trained) pieces."""
        return cls(tuple(i for ids, _ in pieces for i in ids), tuple(trained for ids, trained in pieces for _ in ids))


class Environment(Protocol):
    """One data source with its tools and verifier. Methods that may wait are coroutines; the others return at once."""

    fingerprint: str
    """Equal for equal tasks in equal order."""
    kinds: dict[str, str]
    """What the numbers rest on, with the keys of `testbed.workloads.Workload.kinds`."""

    async def open(self) -> None:
        """Start helper processes (optional: they start when first needed). Raises RealError if they cannot."""

    def draw(self) -> RealTask | None:
        """The next task; None when there is no more."""

    def again(self, index: int) -> RealTask:
        """A task drawn before, for a retry. Raises KeyError if it was released or never drawn."""

    def release(self, index: int) -> None:
        """No retry will come."""

    def arrivals(self) -> Iterator[tuple[float, RealTask]] | None:
        """(seconds since the start, task), if tasks arrive by themselves; else None."""

    def demonstrations(self, seed: int) -> Iterator[Demonstration] | None:
        """Endless correct trajectories, the same for the same seed; None if the environment knows none."""

    def limits(self, task: RealTask, member: int, turn: int, context_tokens: int) -> TurnLimits:
        """For the call of `turn` (0 is the first) with `context_tokens` of prompt."""

    def after_turn(self, task: RealTask, member: int, turn: int, output_ids: list[int]) -> ToolCall | None:
        """None: the trajectory is over."""

    async def run_tool(self, task: RealTask, who: Who, call: ToolCall) -> list[int]:
        """The observation, delimiters included. The next prompt is the last one, its output and this, as ids. Raises
        `ToolLost` if the trajectory cannot go on."""

    def tool_fault(self, task: RealTask, who: Who) -> str:
        """Which limit the trajectory's last tool call passed (`time`, `memory`, ...); empty: none."""

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        """`response_ids`: all after the prompt, observations included; `outputs`: the actor's, one a turn."""

    async def prepare(self, task: RealTask, who: Who) -> None: ...

    async def release_member(self, task: RealTask, who: Who) -> None: ...

    async def close(self) -> None:
        """Stop everything that was started."""


def prefix_blocks(ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> tuple[int, ...]:
    """One 63-bit id per started block, of all ids up to its end: equal ids are equal prefixes."""
    digest, blocks = hashlib.blake2b(digest_size=8), []
    for start in range(0, len(ids), block_tokens):
        digest.update(b"".join(i.to_bytes(4, "little") for i in ids[start : start + block_tokens]) + b"/")
        blocks.append(int.from_bytes(digest.digest(), "little") >> 1)
    return tuple(blocks)


class LiveTasks:
    """Tasks by index: draws them in order and keeps those that are not released."""

    def __init__(self, num_tasks: int | None) -> None:
        self._num_tasks = num_tasks
        self._drawn = 0
        self._live: dict[int, RealTask] = {}

    def make(self, index: int) -> RealTask | None:
        """None: there is no more."""
        raise NotImplementedError

    def draw(self) -> RealTask | None:
        if self._num_tasks is not None and self._drawn >= self._num_tasks:
            return None
        task = self.make(self._drawn)
        if task is not None:
            self._live[self._drawn] = task
            self._drawn += 1
        return task

    def again(self, index: int) -> RealTask:
        try:
            return self._live[index]
        except KeyError:
            raise KeyError(f"task {index} is not live: never drawn, or released") from None

    def release(self, index: int) -> None:
        self._live.pop(index, None)


class TextEnvironment(LiveTasks):
    """Questions in text with one answer each, put to the policy by a template; one turn unless a subclass says more.

    `config` are the options that decide the tasks, for the fingerprint. `prompt_template` holds `{question}`; special
    tokens in it become their ids, so a chat format is a template like any other."""

    kind: ClassVar[str]
    """The section's `type`."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        tokenizer: Tokenizer,
        members: int,
        seed: int,
        num_tasks: int | None,
        max_response_length: int,
        prompt_template: str,
    ) -> None:
        super().__init__(num_tasks)
        self.tokenizer = tokenizer
        self.seed = seed
        self._max_response_length = max_response_length
        self._template = prompt_template
        everything = [type(self).__name__, config, members, seed, num_tasks, max_response_length, prompt_template]
        self.fingerprint = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]
        self.kinds = dict.fromkeys(("prompts", "reply_lengths", "tools", "rewards"), "measured")
        self.kinds["arrivals"] = "assumed"

    def item(self, seed: int, index: int) -> tuple[str, Any]:
        """(question, what the verifier needs) of a task."""
        raise NotImplementedError

    def pieces(self, payload: Any) -> list[tuple[Sequence[int], bool]]:
        """A correct response to the task, as `Demonstration.of` takes it."""
        return [(self.ids(str(payload)), True), ((self.tokenizer.eos_id,), True)]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def final_text(self, outputs: list[list[int]]) -> str:
        """The last turn's output up to its end token, without blanks around it."""
        last = outputs[-1]
        end = last.index(self.tokenizer.eos_id) if self.tokenizer.eos_id in last else len(last)
        return self.tokenizer.decode(last[:end]).strip()

    def make(self, index: int) -> RealTask:
        question, payload = self.item(self.seed, index)
        ids = tuple(self.ids(self._template.replace("{question}", question)))
        return RealTask(index, ids, prefix_blocks(ids), BLOCK_TOKENS, False, 0, payload, self.kind)

    def demonstrations(self, seed: int) -> Iterator[Demonstration] | None:
        return self._demonstrations(seed)

    def _demonstrations(self, seed: int) -> Iterator[Demonstration]:
        index = 0
        while True:
            question, payload = self.item(seed, index)
            prompt = self.ids(self._template.replace("{question}", question))
            yield Demonstration.of([(prompt, False), *self.pieces(payload)])
            index += 1

    def limits(self, task: RealTask, member: int, turn: int, context_tokens: int) -> TurnLimits:
        return TurnLimits(self._max_response_length)

    def after_turn(self, task: RealTask, member: int, turn: int, output_ids: list[int]) -> ToolCall | None:
        return None

    async def run_tool(self, task: RealTask, who: Who, call: ToolCall) -> list[int]:
        raise NotImplementedError(f"{type(self).__name__} has no tool")

    def tool_fault(self, task: RealTask, who: Who) -> str:
        return ""

    def arrivals(self) -> Iterator[tuple[float, RealTask]] | None:
        return None

    async def open(self) -> None:
        pass

    async def prepare(self, task: RealTask, who: Who) -> None:
        pass

    async def release_member(self, task: RealTask, who: Who) -> None:
        pass

    async def close(self) -> None:
        pass
