"""GSM8K and reasoning-gym: tasks, their verifiers in a process of their own, and refusals."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace

import pytest

from real.environments import environment
from real.environments.base import Environment, RealTask
from real.environments.gsm8k import Gsm8k, final_number, read_sample
from real.environments.helper import Helper
from real.environments.reasoning_gym import ReasoningGym
from real.errors import RealError
from real.models.tokenizer import CharTokenizer


def chain_sum(**options: object) -> ReasoningGym:
    defaults = {"dataset": "chain_sum", "tokenizer": CharTokenizer(), "members": 2, "seed": 4}
    return ReasoningGym(**defaults | options)  # type: ignore[arg-type]


async def score(env: Environment, task: RealTask, text: str) -> float:
    output = [*CharTokenizer().encode(text), CharTokenizer.eos_id]
    return await env.reward(task, 0, task.prompt_ids, output, [output])


def drawn(env: Environment) -> RealTask:
    task = env.draw()
    assert task is not None
    return task


def test_gsm8k_rewards_the_published_answer_in_any_form() -> None:
    async def run() -> None:
        env = Gsm8k(tokenizer=CharTokenizer(), members=2, seed=0, split="test")
        await env.open()
        first = drawn(env)
        by_question = {row["question"]: row["answer"] for row in read_sample("test")}
        asked = CharTokenizer().decode(first.prompt_ids).removeprefix("Question: ").removesuffix("\nAnswer: ")
        matching = [a for q, a in by_question.items() if CharTokenizer().decode(CharTokenizer().encode(q)) == asked]
        assert matching == [first.payload]
        large = RealTask(99, (1,), (), 16, False, 0, "so 3 * 400 =\n#### 1,200")
        assert await score(env, first, f"so it is {final_number(first.payload)}.") == 1.0
        assert await score(env, first, "no idea") == 0.0
        for text in ("1200", "$1,200", "The answer is \\boxed{1200}", "1200.0"):
            assert await score(env, large, text) == 1.0, text
        for text in ("1201", "12 00x", ""):
            assert await score(env, large, text) == 0.0, text
        await env.close()

    asyncio.run(run())


@pytest.mark.backend("CORE")
def test_gsm8k_goes_through_the_whole_sample_before_it_repeats() -> None:
    env = Gsm8k(tokenizer=CharTokenizer(), members=2, seed=0, split="test")
    first, second = ([drawn(env).payload for _ in range(100)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(row["answer"] for row in read_sample("test"))
    assert first != second
    assert len(read_sample("train")) == 400
    assert all(final_number(row["answer"]).lstrip("-").isdigit() for s in ("train", "test") for row in read_sample(s))


def test_reasoning_gym_scores_by_its_own_rule() -> None:
    async def run() -> None:
        env = chain_sum(dataset_config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
        for _ in range(5):
            task = drawn(env)
            question = CharTokenizer().decode(task.prompt_ids)
            a, sign, b = question.split(":")[1].split("=")[0].split()
            right = int(a) + int(b) if sign == "+" else int(a) - int(b)
            assert await score(env, task, f" {right} ") == 1.0
            assert await score(env, task, f"{right + 1}") == 0.0
            assert await score(env, task, "") == 0.0
        await env.close()

    asyncio.run(run())


def test_a_verifier_that_fails_on_an_answer_gives_no_reward(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        env = chain_sum()
        task = drawn(env)
        beyond = RealTask(0, task.prompt_ids, (), 16, False, 0, (None, "1"))
        assert await score(env, beyond, "1") == 0.0
        assert "was not scored" in caplog.text
        assert await score(env, task, task.payload[1]) == 1.0, "the next answer is scored"
        await env.close()

    asyncio.run(run())


@pytest.mark.backend("CORE")
def test_a_wrong_data_set_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(RealError, match=r"no data set 'chain_summ'; nearest: chain_sum"):
        chain_sum(dataset="chain_summ")
    with pytest.raises(RealError, match=r"'chain_sum' refuses its dataset_config: .*has no option 'terms'"):
        chain_sum(dataset_config={"terms": 2})


@pytest.mark.backend("CORE")
@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [("gsm8k", "math_verify", "math-verify"), ("reasoning_gym", "reasoning_gym", "reasoning-gym")],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, kind: str, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    options = {"dataset": "chain_sum"} if kind == "reasoning_gym" else {}
    config = SimpleNamespace(type=kind, model_dump=lambda exclude: options)
    with pytest.raises(RealError, match=f"pip install {package}"):
        environment(config, tokenizer=CharTokenizer(), members=1, seed=0)


def test_a_helper_that_does_not_start_says_why() -> None:
    async def run() -> None:
        with pytest.raises(RealError, match=r"no_such_module"):
            await Helper("real.environments.no_such_module").start()

    asyncio.run(run())


def test_scoring_runs_beside_the_event_loop() -> None:
    """Other work goes on between a question to the verifier and its answer, and the verifier is another process."""

    async def run() -> None:
        env = chain_sum()
        task = drawn(env)
        await env.open()
        assert env._verifier._helper.pid != os.getpid()
        waiting = [asyncio.create_task(score(env, task, text)) for text in (task.payload[1], "wrong")]
        await asyncio.sleep(0)
        assert not any(w.done() for w in waiting)
        assert await asyncio.gather(*waiting) == [1.0, 0.0]
        pid = env._verifier._helper.pid
        await env.close()
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(run())
