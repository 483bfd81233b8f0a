"""Sums of two whole numbers: `3+5=` asks for `8`. The smallest task on which a policy can be seen to learn.

Refuses to know how answers are generated."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from real.environments.base import RealTask, TextEnvironment
from real.models.tokenizer import Tokenizer

Operator = Literal["+", "-", "*"]
APPLY: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Arithmetic(TextEnvironment):
    """Operands are uniform on 0 .. `max_operand`, operators uniform on `operators`.

    Reward 1 if the reply is the answer and nothing else (`answer="exact"`), or if the last whole number in it is
    (`"last_number"`, for models that answer in sentences); else 0."""

    kind = "arithmetic"

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        members: int,
        seed: int,
        max_operand: int = 9,
        operators: Sequence[Operator] = ("+",),
        num_tasks: int | None = None,
        max_response_length: int = 8,
        prompt_template: str = "{question}",
        answer: Literal["exact", "last_number"] = "exact",
    ) -> None:
        super().__init__(
            {"max_operand": max_operand, "operators": list(operators), "answer": answer},
            tokenizer=tokenizer,
            members=members,
            seed=seed,
            num_tasks=num_tasks,
            max_response_length=max_response_length,
            prompt_template=prompt_template,
        )
        self._max_operand, self._operators, self._answer = max_operand, tuple(operators), answer

    def item(self, seed: int, index: int) -> tuple[str, Any]:
        draw = np.random.default_rng((seed, index))
        a, b = draw.integers(0, self._max_operand + 1, 2).tolist()
        sign = self._operators[draw.integers(len(self._operators))]
        return f"{a}{sign}{b}=", APPLY[sign](a, b)

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        text = self.final_text(outputs)
        if self._answer == "last_number":
            text = (re.findall(r"-?\d+", text) or [""])[-1]
        return float(text == str(task.payload))
