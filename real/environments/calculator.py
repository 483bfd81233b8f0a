"""Chained sums with a calculator to call, the smallest agent: `7*8=`, `<tool>7*8</tool>`, `<obs>56</obs>`, `56`.

One calculator process per trajectory, alive from `prepare` to `release_member`. Refuses to rebuild anything from text:
a turn's observation is ids that follow the ids that were sampled (TITO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from real.environments.arithmetic import APPLY, Operator
from real.environments.base import RealTask, ToolCall, Who
from real.environments.helper import Helper, HelperDied, HelperTimeout
from real.environments.tagged import TaggedCalls
from real.models.tokenizer import Tokenizer


class Calculator(TaggedCalls):
    """`operations` operators join operands that are uniform on 0 .. `max_operand`, from left to right.

    A turn whose output ends with a call is followed by an observation, at most `max_turns` - 1 times. A bad expression
    and one that takes longer than `tool_time_limit_s` are answered with an error. Reward 1 if the last turn is the
    answer and nothing else; else 0."""

    kind = "calculator"

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        members: int,
        seed: int,
        max_operand: int = 9,
        operators: Sequence[Operator] = ("+", "-", "*"),
        operations: int = 1,
        max_turns: int = 3,
        tool_time_limit_s: float = 2.0,
        num_tasks: int | None = None,
        max_response_length: int = 24,
        prompt_template: str = "{question}",
    ) -> None:
        config = {"max_operand": max_operand, "operators": list(operators), "operations": operations}
        super().__init__(
            config,
            max_turns=max_turns,
            tokenizer=tokenizer,
            members=members,
            seed=seed,
            num_tasks=num_tasks,
            max_response_length=max_response_length,
            prompt_template=prompt_template,
        )
        self._max_operand, self._operators, self._operations = max_operand, tuple(operators), operations
        self._time_limit_s = tool_time_limit_s
        self._helpers: dict[Who, Helper] = {}

    def item(self, seed: int, index: int) -> tuple[str, Any]:
        draw = np.random.default_rng((seed, index))
        first, *operands = draw.integers(0, self._max_operand + 1, self._operations + 1).tolist()
        signs = [self._operators[i] for i in draw.integers(len(self._operators), size=self._operations)]
        question, value = str(first), first
        steps: list[tuple[str, str]] = []
        for sign, operand in zip(signs, operands, strict=True):
            question = f"({question}){sign}{operand}" if steps else f"{question}{sign}{operand}"
            result = APPLY[sign](value, operand)
            steps.append((f"{value}{sign}{operand}", str(result)))
            value = result
        return question + "=", steps

    def pieces(self, payload: Any) -> list[tuple[Sequence[int], bool]]:
        response: list[tuple[Sequence[int], bool]] = []
        for expression, result in payload[: self._max_turns - 1]:
            response += self.called(expression, result)
        return [*response, *super().pieces(payload[-1][1])]

    async def prepare(self, task: RealTask, who: Who) -> None:
        self._helpers[who] = Helper("real.environments.calculator_process")
        await self._helpers[who].start()

    async def run_tool(self, task: RealTask, who: Who, call: ToolCall) -> list[int]:
        """Raises KeyError if the trajectory was not prepared, or is released."""
        try:
            result = await self._helpers[who].ask(call.text, self._time_limit_s)
        except HelperTimeout:
            result = "error: time limit"
        except HelperDied:
            result = "error: the calculator died"
        return self.observation(result)

    async def release_member(self, task: RealTask, who: Who) -> None:
        if (helper := self._helpers.pop(who, None)) is not None:
            await helper.stop()

    def processes(self) -> list[int]:
        """Ids of the calculators that run."""
        return [helper.pid for helper in self._helpers.values() if helper.pid is not None]

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        return float(self.final_text(outputs) == task.payload[-1][1])

    async def close(self) -> None:
        while self._helpers:
            await self._helpers.popitem()[1].stop()
