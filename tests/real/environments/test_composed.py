"""Mixtures: which part a task is of, and that nothing of one part depends on another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from real.environments import Environment, RealTask, environment
from real.environments.base import ToolCall
from real.environments.composed import Composed, Inner, Mixture
from real.models.tokenizer import CharTokenizer
from testbed.scenario.environment import MixtureTasks

pytestmark = pytest.mark.backend("CORE")

PLUS: dict[str, Any] = {"name": "plus", "share": 3.0, "environment": {"type": "arithmetic", "operators": ["+"]}}
MINUS: dict[str, Any] = {"name": "minus", "environment": {"type": "arithmetic", "operators": ["-"], "max_operand": 4}}
TOOL: dict[str, Any] = {"name": "tool", "environment": {"type": "calculator", "operators": ["*"]}}


AFTER_A_DRAW = ("limits", "after_turn", "prepare", "run_tool", "reward", "release_member", "release")


def mixed(*parts: dict[str, Any], seed: int = 3, **options: Any) -> Composed:
    section = MixtureTasks.model_validate({"type": "mixture", "tasks": parts})
    made = environment(section, tokenizer=CharTokenizer(), members=2, seed=seed, **options)
    assert isinstance(made, Mixture)
    return made


def drawn(env: Environment, n: int) -> list[RealTask]:
    tasks = [task for _ in range(n) if (task := env.draw()) is not None]
    assert len(tasks) == n
    return tasks


def questions(tasks: Sequence[RealTask], kind: str = "") -> list[str]:
    return [CharTokenizer().decode(t.prompt_ids) for t in tasks if kind in ("", t.kind)]


def test_each_task_is_of_the_part_that_seed_and_index_choose() -> None:
    tasks = drawn(mixed(PLUS, MINUS), 2000)
    assert [t.index for t in tasks] == list(range(2000))
    assert questions(tasks) == questions(drawn(mixed(PLUS, MINUS), 2000)), "the same seed, the same tasks"
    assert questions(tasks) != questions(drawn(mixed(PLUS, MINUS, seed=4), 2000))
    for task in tasks:
        assert task.kind == ("plus" if "+" in CharTokenizer().decode(task.prompt_ids) else "minus")
    plus = sum(t.kind == "plus" for t in tasks)
    assert abs(plus - 1500) < 4 * (2000 * 0.75 * 0.25) ** 0.5, "shares 3 : 1"


def test_parts_keep_their_own_indices_and_do_not_depend_on_each_other() -> None:
    both, alone = drawn(mixed(PLUS, MINUS), 400), drawn(mixed(PLUS), 400)
    inner = [t.payload.task.index for t in both if t.kind == "plus"]
    assert inner == list(range(len(inner)))
    assert questions(both, "plus") == questions(alone)[: len(inner)], "another part changes nothing in this one"
    twins = drawn(mixed({**PLUS, "share": 1.0}, {**PLUS, "name": "again", "share": 1.0}), 400)
    a, b = questions(twins, "plus"), questions(twins, "again")
    assert a[:50] != b[:50], "equal parts pose different tasks"


def test_a_part_hears_of_its_own_tasks_alone() -> None:
    heard: list[tuple[str, str, int]] = []

    class Listening:
        fingerprint, kinds = "f", {"rewards": "measured"}

        def __init__(self, name: str) -> None:
            self.name, self.n = name, 0

        def draw(self) -> RealTask:
            self.n += 1
            return RealTask(self.n - 1, (1,), (), 16, True, 0, self.name)

        def __getattr__(self, method: str) -> Any:
            def call(task: Any, *_: Any) -> Any:
                heard.append((self.name, method, task if isinstance(task, int) else task.index))
                return f"{self.name} {method}"

            async def wait(task: Any, *_: Any) -> Any:
                return call(task)

            return wait if method in ("run_tool", "reward", "prepare", "release_member") else call

    parts: dict[str, Any] = {"a": Listening("a"), "b": Listening("b")}
    env = Mixture(parts, [1.0, 1.0], seed=0, num_tasks=20)
    tasks = drawn(env, 20)
    assert env.draw() is None, "num_tasks"

    async def everything(task: RealTask) -> None:
        who = (task.index, 0)
        assert env.limits(task, 0, 0, 1) == f"{task.kind} limits"
        assert env.after_turn(task, 0, 0, []) == f"{task.kind} after_turn"
        await env.prepare(task, who)
        assert await env.run_tool(task, who, ToolCall(0, "")) == f"{task.kind} run_tool"
        assert await env.reward(task, 0, [], [], []) == f"{task.kind} reward"
        await env.release_member(task, who)
        assert env.again(task.index) is task
        env.release(task.index)

    for task in tasks:
        heard.clear()
        asyncio.run(everything(task))
        assert {(name, index) for name, _, index in heard} == {(task.kind, task.payload.task.index)}
        assert [m for _, m, _ in heard] == [*AFTER_A_DRAW]
        with pytest.raises(KeyError, match=f"task {task.index} is not live"):
            env.again(task.index)


def test_demonstrations_are_mixed_as_the_tasks_are() -> None:
    env = mixed(PLUS, TOOL)
    stream = env.demonstrations(3)
    assert stream is not None
    for task, shown in zip(drawn(env, 50), islice(stream, 50), strict=True):
        assert shown.ids[: len(task.prompt_ids)] == task.prompt_ids
        assert not any(shown.trained[: len(task.prompt_ids)]) and shown.trained[len(task.prompt_ids)]
        assert task.environment == (task.kind == "tool"), "only the calculator's tasks need a process"


def test_the_fingerprint_is_of_all_that_decides_the_tasks() -> None:
    made = [
        mixed(PLUS, MINUS),
        mixed(MINUS, PLUS),
        mixed(PLUS, {**MINUS, "share": 2.0}),
        mixed(PLUS, {**MINUS, "name": "less"}),
        mixed(PLUS, {**MINUS, "environment": {"type": "arithmetic", "operators": ["-"]}}),
        mixed(PLUS, MINUS, seed=4),
        mixed(PLUS, MINUS, num_tasks=5),
        mixed(PLUS, MINUS, max_response_length=3),
    ]
    assert len({env.fingerprint for env in made}) == len(made)
    assert mixed(PLUS, MINUS).fingerprint == made[0].fingerprint


def test_a_mixture_ends_with_the_first_part_that_ends() -> None:
    class Short:
        fingerprint, left = "", 2

        def __init__(self) -> None:
            self.kinds: dict[str, str] = {}

        def draw(self) -> RealTask | None:
            self.left -= 1
            return RealTask(0, (1,), (), 16, False, 0, None) if self.left >= 0 else None

    only: dict[str, Any] = {"a": Short()}
    env = Mixture(only, [1.0], seed=0, num_tasks=None)
    assert isinstance(drawn(env, 2)[1].payload, Inner)
    assert env.draw() is None
