"""Every section a scenario may name becomes an environment that poses tasks and shows answers to them."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from real.environments import environment
from real.models.tokenizer import CharTokenizer
from testbed.scenario.environment import ArithmeticTasks, CalculatorTasks, Gsm8kTasks, ReasoningGymTasks, WorkspaceTasks

pytestmark = pytest.mark.backend("CORE")

SECTIONS = [
    ArithmeticTasks(),
    CalculatorTasks(),
    Gsm8kTasks(),
    ReasoningGymTasks(dataset="chain_sum"),
    WorkspaceTasks(),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.type)
def test_a_section_becomes_an_environment(section: BaseModel) -> None:
    tokenizer = CharTokenizer()
    env = environment(section, tokenizer=tokenizer, members=4, seed=3, num_tasks=2, max_response_length=9)
    task, second = env.draw(), env.draw()
    assert task is not None
    assert second is not None
    assert env.draw() is None
    assert (task.index, second.index, task.members) == (0, 1, 0)
    assert task.blocks == env.again(0).blocks
    assert len(task.blocks) == -(-len(task.prompt_ids) // task.block_tokens)
    limits = env.limits(task, 0, 0, len(task.prompt_ids))
    assert (limits.max_new_tokens, limits.ignore_eos, limits.finish_reason) == (9, False, "")
    assert env.arrivals() is None
    stream = env.demonstrations(3)
    assert stream is not None
    shown = next(stream)
    assert shown.ids[: len(task.prompt_ids)] == task.prompt_ids, "the same seed poses the same first task"
    assert not any(shown.trained[: len(task.prompt_ids)])
    assert shown.trained[len(task.prompt_ids)]
    assert (shown.ids[-1], shown.trained[-1]) == (tokenizer.eos_id, True)


def test_environments_of_different_types_seeds_and_groups_have_different_fingerprints() -> None:
    made = [
        environment(section, tokenizer=CharTokenizer(), members=members, seed=seed).fingerprint
        for section in SECTIONS
        for members, seed in ((4, 0), (4, 1), (8, 0))
    ]
    assert len(set(made)) == len(made)
