"""The calculator and its process: results, refusals, limits, and that none outlives its trajectory or its run."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from real.environments.base import RealTask, ToolCall
from real.environments.calculator import Calculator
from real.environments.calculator_process import Calculator as Evaluator
from real.models.tokenizer import CharTokenizer
from tests.support.tito import drift, next_prompt


def env_with(**options: object) -> Calculator:
    defaults = {"tokenizer": CharTokenizer(), "members": 2, "seed": 0}
    return Calculator(**defaults | options)  # type: ignore[arg-type]


def drawn(env: Calculator) -> RealTask:
    task = env.draw()
    assert task is not None
    return task


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.backend("CORE")
@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*7", "84"),
        (" (2+3)*-4 ", "-20"),
        ("7/2", "3.5"),
        ("7//2+2**5%5", "5"),
        ("1/0", "error: division by zero"),
        ("2+", "error: not an expression"),
        ("", "error: not an expression"),
        ("__import__('os').getpid()", "error: not arithmetic"),
        ("(1).real", "error: not arithmetic"),
        ("'a'*9", "error: not arithmetic"),
        ("True+1", "error: not arithmetic"),
        ("[1][0]", "error: not arithmetic"),
        ("(-8)**0.5", "error: not a real number"),
        ("10**40", "error: result too long"),
        ("1e308*10**400", "error: too large"),
        ("1+" * 150 + "1", "error: too long"),
        ("1\x00", "error: "),
    ],
)
def test_expressions(expression: str, result: str) -> None:
    assert Evaluator()(expression).startswith(result)


@pytest.mark.backend("CORE")
def test_ap_02_the_last_result_is_kept_and_an_error_does_not_touch_it() -> None:
    calculator = Evaluator()
    assert [calculator(e) for e in ("6*7", "1/0", "ans+1", "ans*2")] == ["42", "error: division by zero", "43", "86"]


@pytest.mark.backend("CORE")
@pytest.mark.parametrize(
    ("output", "call"),
    [
        ("<tool>7*8</tool>", "7*8"),
        ("think <tool>7*8</tool><eos>", "7*8"),
        ("<tool><tool>1+1</tool>", "1+1"),
        ("<tool>7*8", None),
        ("7*8</tool>", None),
        ("<tool>7*8</tool>56<eos>", None),
        ("56<eos>", None),
        ("", None),
    ],
)
def test_only_an_output_that_ends_with_a_call_is_followed_by_a_tool(output: str, call: str | None) -> None:
    env = env_with(max_turns=2)
    task = drawn(env)
    found = env.after_turn(task, 0, 0, CharTokenizer().encode(output))
    assert found == (None if call is None else ToolCall(0, call))
    assert env.after_turn(task, 0, 1, CharTokenizer().encode(output)) is None, "max_turns"


@pytest.mark.backend("CORE")
def test_er_04_in_a_tool_trajectory_all_but_the_actors_tokens_are_masked() -> None:
    tokenizer = CharTokenizer()
    env = env_with(operations=2, max_turns=3, operators=("+",), max_operand=9)
    stream = env.demonstrations(5)
    assert stream is not None
    shown = next(stream)
    text = tokenizer.decode(shown.ids)
    inside, expected = False, []
    prompt = text.index("=") + 1
    assert text[:prompt].isprintable()
    for at, token in enumerate(shown.ids):  # prompt, then everything from <obs> to </obs>
        inside |= token == tokenizer.obs_id
        expected.append(at >= prompt and not inside)
        inside &= token != tokenizer.obs_end_id
    assert list(shown.trained) == expected
    assert tokenizer.decode([i for i, t in zip(shown.ids, shown.trained, strict=True) if t]).count("<tool>") == 2


def test_a_calculator_is_light_because_every_trajectory_starts_one() -> None:
    program = "import sys, real.environments.calculator_process; print(*sorted(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()
    assert not {"pydantic", "testbed", "numpy", "torch", "transformers"} & set(loaded)


def test_er_13_and_ap_02_three_turns_in_one_process_with_an_unbroken_prefix() -> None:
    """The dialogue an actor would have; every prompt begins with all ids before it, and the process stays."""
    tokenizer = CharTokenizer()

    async def dialogue() -> None:
        env = env_with(operations=2, max_turns=3)
        task = drawn(env)
        assert task.environment
        await env.prepare(task, (7, 0))
        (pid,) = env.processes()
        prompt, outputs = list(task.prompt_ids), []
        steps = task.payload
        for turn in range(3):
            text = f"<tool>{steps[turn][0]}</tool>" if turn < 2 else f"{steps[-1][1]}<eos>"
            output = tokenizer.encode(text)
            outputs.append(output)
            call = env.after_turn(task, 0, turn, output)
            if call is None:
                break
            observation = await env.run_tool(task, (7, 0), call)
            assert observation == tokenizer.encode(f"<obs>{steps[turn][1]}</obs>")
            following = next_prompt(prompt, output, observation)
            assert drift([*prompt, *output], following) == 0
            prompt = following
            assert env.processes() == [pid]
        assert turn == 2
        response = [*prompt[len(task.prompt_ids) :], *outputs[-1]]
        assert await env.reward(task, 0, task.prompt_ids, response, outputs) == 1.0
        await env.release_member(task, (7, 0))
        assert not alive(pid)
        await env.close()

    asyncio.run(dialogue())


def test_ap_03_release_and_close_leave_no_process() -> None:
    async def run() -> None:
        env = env_with()
        task = drawn(env)
        for who in ((1, 0), (2, 1), (3, 1)):  # 3: a retry of member 1 that begins before trajectory 2 is gone
            await env.prepare(task, who)
        first, second, third = env.processes()
        await env.release_member(task, (2, 1))
        assert [alive(p) for p in (first, second, third)] == [True, False, True]
        assert await env.run_tool(task, (3, 1), ToolCall(0, "2+3")) == CharTokenizer().encode("<obs>5</obs>")
        await env.close()
        assert not any(map(alive, (first, second, third)))
        await env.release_member(task, (3, 1))  # after everything is gone: nothing to do

    asyncio.run(run())


def test_a_tool_that_takes_too_long_is_killed_and_the_next_call_works() -> None:
    async def run() -> None:
        env = env_with(tool_time_limit_s=0.3)
        task = drawn(env)
        await env.prepare(task, (7, 0))
        (pid,) = env.processes()
        slow = await env.run_tool(task, (7, 0), ToolCall(0, "3**(7**12)"))
        assert CharTokenizer().decode(slow) == "<obs>error: time limit</obs>"
        assert not alive(pid)
        assert CharTokenizer().decode(await env.run_tool(task, (7, 0), ToolCall(1, "1+1"))) == "<obs>2</obs>"
        await env.close()

    asyncio.run(run())


def test_a_call_that_is_given_up_does_not_answer_the_next_one() -> None:
    async def run() -> None:
        env = env_with(tool_time_limit_s=60.0)
        task = drawn(env)
        await env.prepare(task, (7, 0))
        given_up = asyncio.create_task(env.run_tool(task, (7, 0), ToolCall(0, "3**(7**12)")))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert CharTokenizer().decode(await env.run_tool(task, (7, 0), ToolCall(1, "20+1"))) == "<obs>21</obs>"
        await env.close()

    asyncio.run(run())


def test_ap_03_release_in_the_middle_of_calls_starts_nothing_anew() -> None:
    async def run() -> None:
        env = env_with(tool_time_limit_s=60.0)
        task = drawn(env)
        await env.prepare(task, (7, 0))
        helper = env._helpers[7, 0]
        calls = [asyncio.create_task(env.run_tool(task, (7, 0), ToolCall(0, "3**(7**12)"))) for _ in range(3)]
        await asyncio.sleep(0)
        await env.release_member(task, (7, 0))
        answers = await asyncio.gather(*calls)
        assert {CharTokenizer().decode(a) for a in answers} == {"<obs>error: the calculator died</obs>"}
        assert helper.pid is None

    asyncio.run(run())


def test_the_calculator_dies_with_a_run_that_is_killed() -> None:
    """Also while it works: the parent gets SIGKILL in the middle of a call that would take minutes."""
    program = """
import asyncio
from real.environments.base import ToolCall
from real.environments.calculator import Calculator
from real.models.tokenizer import CharTokenizer

async def run():
    env = Calculator(tokenizer=CharTokenizer(), members=1, seed=0, tool_time_limit_s=600.0)
    task = env.draw()
    await env.prepare(task, (7, 0))
    call = asyncio.create_task(env.run_tool(task, (7, 0), ToolCall(0, "3**(7**12)")))
    await asyncio.sleep(0)
    print(*env.processes(), flush=True)
    await call

asyncio.run(run())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        handle = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
    try:
        ended, _, _ = select.select([handle], [], [], 30)
        assert ended, "the calculator outlived its run"
    finally:
        os.close(handle)
