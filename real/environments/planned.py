"""No text at all: carries out the plans of a scenario's workload with real tokens, so that a run can be compared with
its simulation.

Prompts are a function of content runs: equal runs are equal tokens. Reply lengths are forced, tool and verifier times
are slept, rewards are the plan's. Refuses to know what tokens mean."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from real.environments.base import Demonstration, RealTask, ToolCall, TurnLimits, Who
from real.models.tokenizer import Tokenizer
from testbed.scenario.environment import PLANNED
from testbed.workloads import Plan, Run, Task, Workload

_OBSERVATION = 2**40
"""Content ids from here on are observations; prompts have negative ones."""


def content_tokens(content: int, start: int, length: int, vocab_size: int) -> NDArray[np.int64]:
    """Tokens start .. start + length - 1 of the endless text `content`, in [0, vocab_size).

    t(c, p) = (h(c div V, p) + c) mod V with a hash h: contents of one block of V consecutive ids (c div V equal)
    differ at *every* position, so a radix cache cannot take one prompt's first token for another's. Contents of
    different blocks agree at a position with probability 1/V.
    """
    block, offset = divmod(content, vocab_size)
    position = np.arange(start, start + length, dtype=np.uint64)
    with np.errstate(over="ignore"):  # splitmix64's finaliser; wrapping is meant
        x = position * np.uint64(0x9E3779B97F4A7C15) + np.uint64(block % 2**64) * np.uint64(0xD1B54A32D192ED03)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return ((x % np.uint64(vocab_size)).astype(np.int64) + offset) % vocab_size


def run_tokens(runs: Sequence[Run], vocab_size: int) -> tuple[int, ...]:
    """The tokens of content runs, one behind the other."""
    return tuple(t for run in runs for t in content_tokens(*run, vocab_size).tolist())


class Planned:
    """An `Environment` over a `Workload`. Observations are texts of their own, one per (task, member, turn)."""

    def __init__(self, workload: Workload, *, tokenizer: Tokenizer) -> None:
        self._workload = workload
        self._vocab_size = tokenizer.vocab_size
        self.fingerprint = workload.fingerprint
        self.kinds = workload.kinds

    def draw(self) -> RealTask | None:
        task = self._workload.draw()
        return None if task is None else self._real(task)

    def again(self, index: int) -> RealTask:
        return self._real(self._workload.again(index))

    def release(self, index: int) -> None:
        self._workload.release(index)

    def arrivals(self) -> Iterator[tuple[float, RealTask]] | None:
        times = self._workload.arrivals()
        return None if times is None else ((t, self._real(task)) for t, task in times)

    def _real(self, task: Task) -> RealTask:
        ids = run_tokens(task.prompt, self._vocab_size)
        return RealTask(
            task.index,
            ids,
            task.blocks,
            task.block_tokens,
            task.environment,
            len(task.plans),
            tuple(task.plans),
            PLANNED,
        )

    def demonstrations(self, seed: int) -> Iterator[Demonstration] | None:
        return None

    def limits(self, task: RealTask, member: int, turn: int, context_tokens: int) -> TurnLimits:
        plan = _plan(task, member)
        return TurnLimits(
            plan.output_tokens[turn], ignore_eos=True, finish_reason="stop" if plan.stops[turn] else "length"
        )

    def after_turn(self, task: RealTask, member: int, turn: int, output_ids: list[int]) -> ToolCall | None:
        return ToolCall(turn, "") if turn + 1 < len(_plan(task, member).output_tokens) else None

    async def run_tool(self, task: RealTask, who: Who, call: ToolCall) -> list[int]:
        _, member = who
        plan = _plan(task, member)
        await asyncio.sleep(plan.tool_s[call.turn])
        content = _OBSERVATION + ((task.index * len(task.payload) + member) << 16) + call.turn
        return list(run_tokens([(content, 0, plan.observation_tokens[call.turn])], self._vocab_size))

    def tool_fault(self, task: RealTask, who: Who) -> str:
        return ""

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        plan = _plan(task, member)
        await asyncio.sleep(plan.reward_s)
        return plan.reward

    async def open(self) -> None:
        pass

    async def prepare(self, task: RealTask, who: Who) -> None:
        await asyncio.sleep(_plan(task, who[1]).prepare_s)

    async def release_member(self, task: RealTask, who: Who) -> None:
        await asyncio.sleep(_plan(task, who[1]).release_s)

    async def close(self) -> None:
        pass


def _plan(task: RealTask, member: int) -> Plan:
    plan: Plan = task.payload[member]
    return plan
