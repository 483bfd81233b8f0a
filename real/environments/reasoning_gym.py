"""Any of reasoning-gym's seeded generators, scored by the generator itself in a process of its own.

Refuses to know what the puzzles are."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from real.environments.base import RealTask, TextEnvironment
from real.environments.verifier import Verifier
from real.errors import RealError
from real.models.tokenizer import Tokenizer

ENDLESS = 1_000_000
"""Size of a data set without an end; then it begins again."""


class ReasoningGym(TextEnvironment):
    """`dataset` and its own options `dataset_config`; the reward is its `score_answer`, in [0, 1]."""

    kind = "reasoning_gym"

    def __init__(
        self,
        *,
        dataset: str,
        tokenizer: Tokenizer,
        members: int,
        seed: int,
        dataset_config: Mapping[str, Any] | None = None,
        num_tasks: int | None = None,
        max_response_length: int = 64,
        prompt_template: str = "{question}\nAnswer: ",
    ) -> None:
        super().__init__(
            {"dataset": dataset, "dataset_config": dict(dataset_config or {})},
            tokenizer=tokenizer,
            members=members,
            seed=seed,
            num_tasks=num_tasks,
            max_response_length=max_response_length,
            prompt_template=prompt_template,
        )
        self._dataset = dataset
        self._options = {**(dataset_config or {}), "size": num_tasks or ENDLESS}
        self._data = {seed: _create(dataset, {**self._options, "seed": seed})}
        self._verifier = Verifier(dataset, json.dumps({**self._options, "seed": seed}))

    def item(self, seed: int, index: int) -> tuple[str, Any]:
        if seed not in self._data:
            self._data[seed] = _create(self._dataset, {**self._options, "seed": seed})
        entry = self._data[seed][index % self._options["size"]]
        return entry["question"], (index % self._options["size"], entry["answer"])

    def pieces(self, payload: Any) -> list[tuple[Sequence[int], bool]]:
        return super().pieces(payload[1])

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        return await self._verifier.score({"index": task.payload[0], "answer": self.final_text(outputs)})

    async def open(self) -> None:
        await self._verifier.open()

    async def close(self) -> None:
        await self._verifier.close()


def _create(dataset: str, options: dict[str, Any]) -> Any:
    """Raises RealError for a name or an option that reasoning-gym does not have."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        raise RealError("tasks of type reasoning_gym need a package: pip install reasoning-gym==0.1.25") from None
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=3) or sorted(DATASETS)[:3]
        raise RealError(
            f"reasoning-gym has no data set {dataset!r}; nearest: {', '.join(near)} ({len(DATASETS)} in all)"
        )
    try:
        return reasoning_gym.create_dataset(dataset, **options)
    except (TypeError, ValueError, AssertionError) as error:
        said = str(error).replace("__init__() got an unexpected keyword argument", "has no option")
        raise RealError(f"reasoning-gym data set {dataset!r} refuses its dataset_config: {said}") from None
