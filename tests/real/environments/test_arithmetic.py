"""Sums: what is asked, what counts as right, what is shown."""

from __future__ import annotations

import asyncio
import itertools
import re

import pytest

from real.environments.arithmetic import Arithmetic
from real.environments.base import prefix_blocks
from real.models.tokenizer import CharTokenizer

pytestmark = pytest.mark.backend("CORE")


def sums(tokenizer: CharTokenizer, **options: object) -> Arithmetic:
    return Arithmetic(**{"tokenizer": tokenizer, "members": 4, "seed": 1} | options)  # type: ignore[arg-type]


def score(env: Arithmetic, index: int, reply: str, ended: bool = True) -> float:
    task = env.again(index)
    output = [*CharTokenizer().encode(reply), *([CharTokenizer.eos_id] if ended else [])]
    return asyncio.run(env.reward(task, 0, task.prompt_ids, output, [output]))


def test_tasks_are_sums_in_range_and_only_their_answer_is_rewarded(tokenizer: CharTokenizer) -> None:
    env = sums(tokenizer, max_operand=9, operators=("+", "-", "*"))
    signs = set()
    for index in range(60):
        task = env.draw()
        assert task is not None
        assert task.index == index
        a, sign, b = re.fullmatch(r"(\d)([-+*])(\d)=", tokenizer.decode(task.prompt_ids)).groups()  # type: ignore[union-attr]
        signs.add(sign)
        right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert score(env, index, str(right)) == 1.0
        assert score(env, index, f" {right}\n") == 1.0
        assert score(env, index, str(right + 1)) == 0.0
        assert score(env, index, f"{right} {right}") == 0.0
        assert score(env, index, "") == 0.0
    assert signs == {"+", "-", "*"}


def test_an_answer_in_a_sentence_counts_only_if_asked_for(tokenizer: CharTokenizer) -> None:
    for answer, wanted in (("exact", 0.0), ("last_number", 1.0)):
        env = sums(tokenizer, answer=answer)
        task = env.draw()
        assert task is not None
        assert score(env, 0, f"The sum is {task.payload}.", ended=False) == wanted
        assert score(env, 0, "no idea") == 0.0


def test_the_seed_decides_the_tasks(tokenizer: CharTokenizer) -> None:
    one, two, other = sums(tokenizer), sums(tokenizer), sums(tokenizer, seed=2)
    drawn = [[env.draw() for _ in range(20)] for env in (one, two, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert one.fingerprint != sums(tokenizer, max_operand=8).fingerprint


def test_tasks_end_and_a_released_one_is_gone(tokenizer: CharTokenizer) -> None:
    env = sums(tokenizer, num_tasks=2)
    first = env.draw()
    assert env.again(0) is first
    assert env.draw() is not None
    assert env.draw() is None
    env.release(0)
    with pytest.raises(KeyError, match="task 0 is not live"):
        env.again(0)


def test_demonstrations_are_right_and_only_the_answer_is_trained(tokenizer: CharTokenizer) -> None:
    stream = sums(tokenizer, max_operand=99).demonstrations(3)
    assert stream is not None
    for shown in itertools.islice(stream, 50):
        trained = [i for i, t in zip(shown.ids, shown.trained, strict=True) if t]
        question = [i for i, t in zip(shown.ids, shown.trained, strict=True) if not t]
        a, b = tokenizer.decode(question).rstrip("=").split("+")
        assert tokenizer.decode(trained) == f"{int(a) + int(b)}<eos>"


def test_equal_blocks_are_equal_prefixes() -> None:
    text = list(range(40))
    assert len(prefix_blocks(text)) == 3
    assert prefix_blocks(text)[:2] == prefix_blocks(text[:32])
    assert prefix_blocks(text)[2] != prefix_blocks(text[:39])[2]
    changed = [99, *text[1:]]
    assert not set(prefix_blocks(text)) & set(prefix_blocks(changed))
