"""Grade-school word problems (a packaged sample of GSM8K), verified by math-verify in a process of its own.

Refuses to know how answers are generated."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from real.environments.base import RealTask, TextEnvironment
from real.environments.verifier import Verifier
from real.errors import RealError
from real.models.tokenizer import Tokenizer

_CALCULATION = re.compile(r"<<[^>]*>>")
"""The data set's calculator marks; no reader needs them."""


class Gsm8k(TextEnvironment):
    """The sample in an order that depends on the seed, again and again in new orders until `num_tasks`.

    Reward 1 if math-verify finds the published answer's value in the reply, else 0."""

    kind = "gsm8k"

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        members: int,
        seed: int,
        split: Literal["train", "test"] = "train",
        num_tasks: int | None = None,
        max_response_length: int = 256,
        prompt_template: str = "Question: {question}\nAnswer: ",
    ) -> None:
        super().__init__(
            {"split": split},
            tokenizer=tokenizer,
            members=members,
            seed=seed,
            num_tasks=num_tasks,
            max_response_length=max_response_length,
            prompt_template=prompt_template,
        )
        if importlib.util.find_spec("math_verify") is None:
            raise RealError("tasks of type gsm8k need a package: pip install math-verify==0.9.0")
        self._items = read_sample(split)
        self._order: tuple[tuple[int, int], Any] = ((-1, -1), None)
        self._verifier = Verifier()

    def item(self, seed: int, index: int) -> tuple[str, Any]:
        times, at = divmod(index, len(self._items))
        if self._order[0] != (seed, times):
            self._order = (seed, times), np.random.default_rng((seed, times)).permutation(len(self._items))
        row = self._items[self._order[1][at]]
        return row["question"], row["answer"]

    def pieces(self, payload: Any) -> list[tuple[Sequence[int], bool]]:
        return super().pieces(_CALCULATION.sub("", payload))

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        return await self._verifier.score({"gold": final_number(task.payload), "answer": self.final_text(outputs)})

    async def open(self) -> None:
        await self._verifier.open()

    async def close(self) -> None:
        await self._verifier.close()


def read_sample(split: str) -> list[dict[str, str]]:
    """Rows `question`, `answer`, `split` of the packaged sample."""
    text = files("testbed").joinpath("data/tasks/gsm8k_sample.jsonl").read_text(encoding="utf-8")
    return [row for row in map(json.loads, text.splitlines()) if row["split"] == split]


def final_number(answer: str) -> str:
    """What follows `####`, without thousands separators."""
    return answer.rpartition("####")[2].strip().replace(",", "")
