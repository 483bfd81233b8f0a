"""A program's tools, with the processes themselves and no engine: runaway, silent, greedy and dying calls are bounded,
named, and leave neither processes nor files."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from real.environments.base import RealTask, ToolCall
from real.environments.sandbox import MARK, Limits, Sandbox, ToolLost, ToolResult
from real.environments.workspace import SOLUTION, Workspace
from real.models.tokenizer import CharTokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")

QUICK = Limits(time_s=3.0, memory_bytes=256 * 2**20, output_bytes=200, workspace_bytes=4 * 2**20, processes=8)


def running(mark: str) -> list[int]:
    """Processes that carry a program's mark."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def called(*codes: str, limits: Limits = QUICK) -> list[ToolResult]:
    """Results of these calls of one program; afterwards nothing of it is left."""

    async def go() -> tuple[list[ToolResult], Path, list[int]]:
        program = Sandbox(limits)
        try:
            results = [await program.run(code) for code in codes]
            between = running(program.mark)
        finally:
            await program.close()
        return results, program.folder, [*between, *running(program.mark)]

    results, folder, left = asyncio.run(go())
    assert not left, "no process outlives its call"
    assert not folder.exists()
    return results


def test_files_stay_from_call_to_call_and_variables_do_not() -> None:
    first, second, third = called("open('a','w').write('7'); x = 1", "print(open('a').read())", "print(x)")
    assert (first.text, first.fault) == ("", "") and (second.text, second.fault) == ("7", "")
    assert third.fault == "error" and "NameError" in third.text


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
        "input(); import sys; sys.stdin.read(); import threading; threading.Event().wait()",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\ntime.sleep(1000)",
    ],
    ids=["runaway", "never answers", "deaf to signals", "waits for input", "fled to a session of its own"],
)
def test_ap_06_a_call_that_does_not_end_is_ended(code: str) -> None:
    limits = Limits(time_s=0.7)
    began = time.monotonic()
    (result,) = called(code, limits=limits)
    if "input()" in code:
        assert result.fault == "error", "there is no input: it is told so at once"
    else:
        assert result.fault == "time" and result.seconds >= 0.7
    assert time.monotonic() - began < 20


def test_ap_03_what_a_call_leaves_running_goes_with_it() -> None:
    """A daemon that forked twice, with a session and an environment of its own."""
    daemon = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execve(sys.executable, [sys.executable, '-c', 'import time; time.sleep(987)'], {})\n"
        "    os._exit(0)\n"
        "time.sleep(0.3)\n"
        "print('gone on')"
    )
    (result,) = called(daemon)
    assert (result.text, result.fault) == ("gone on", "")
    commands = [Path(f"/proc/{p}/cmdline") for p in os.listdir("/proc") if p.isdigit()]
    assert not [c for c in commands if c.exists() and b"time.sleep(987)" in c.read_bytes()]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("print('x' * 100_000)", "output"),
        ("while True: print('more and more')", "output"),
        ("open('big', 'wb').write(bytes(10_000_000))", "space"),
        ("for i in range(100): open(f'{i}', 'wb').write(bytes(1_000_000))", "space"),
        ("for i in range(100_000): open(f'{i}', 'w').close()", "space"),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(2**20))", "space"),
        ("x = bytearray(2**30)", "memory"),
        (
            "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        x = b'1' * (100 * 2**20)\n"
            "        time.sleep(9)\n"
            "time.sleep(9)",
            "memory",
        ),
        (
            "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        time.sleep(9)\n        os._exit(0)\n"
            "time.sleep(9)",
            "processes",
        ),
        ("import os; os.kill(os.getpid(), 9)", "died"),
        ("import os; os.kill(os.getppid(), 9); import time; time.sleep(9)", "died"),
        ("raise SystemExit(3)", "error"),
        ("1 +", "error"),
        ("print(open('/nowhere').read())", "error"),
    ],
    ids=[
        "prints too much",
        "prints without end",
        "one large file",
        "many files that are large together",
        "very many files",
        "gigabytes",
        "memory at once",
        "memory of many processes",
        "many processes",
        "kills itself",
        "kills its supervisor",
        "exit code",
        "no Python",
        "exception",
    ],
)
def test_a_call_that_passes_a_limit_is_ended_and_its_result_says_which(code: str, fault: str) -> None:
    result, after = called(code, "print('still here')", limits=Limits(3.0, 256 * 2**20, 200, 4 * 2**20, 1000, 8))
    assert result.fault == fault and len(result.text) <= 200
    if fault == "space":
        assert after.fault in ("", "space"), "a full workspace stays full"
    else:
        assert (after.text, after.fault) == ("still here", "")


def test_a_program_that_ends_while_its_tool_runs_is_gone_at_once() -> None:
    async def go() -> tuple[ToolResult, bool, list[int]]:
        program = Sandbox(Limits(time_s=60.0))
        call = asyncio.create_task(program.run("open('a','w').write('1'); import time; time.sleep(60)"))
        while not (program.folder / "a").exists():
            await asyncio.sleep(0.01)
        await program.close()
        return await call, program.folder.exists(), running(program.mark)

    result, there, left = asyncio.run(go())
    assert result.fault == "died" and not there and not left


def test_a_call_that_is_cancelled_leaves_nothing() -> None:
    """A run that ends cancels its tasks."""

    async def go() -> tuple[Path, str]:
        program = Sandbox(Limits(time_s=60.0))
        call = asyncio.create_task(program.run("open('a','w').write('1'); import time; time.sleep(60)"))
        while not (program.folder / "a").exists():
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not running(program.mark)
        await program.close()
        return program.folder, program.mark

    folder, mark = asyncio.run(go())
    assert not folder.exists() and not running(mark)


def test_files_that_nobody_may_read_are_removed_too() -> None:
    code = "import os; os.mkdir('d'); open('d/x','w').close(); os.chmod('d/x', 0); os.chmod('d', 0)"
    (result,) = called(code)
    assert result.fault == ""


# --- the environment --------------------------------------------------------------------------------------------------


def env_with(**options: Any) -> Workspace:
    return Workspace(tokenizer=CharTokenizer(), members=2, seed=0, **options)


def drawn(env: Workspace) -> RealTask:
    task = env.draw()
    assert task is not None and task.environment
    return task


def said(env: Workspace, ids: list[int]) -> str:
    return env.tokenizer.decode(ids)


def test_the_demonstrated_call_reads_the_file_and_the_answer_is_its_sum() -> None:
    env = env_with()
    task = drawn(env)

    async def go() -> tuple[str, float, list[Path]]:
        await env.prepare(task, (5, 0))
        ids = await env.run_tool(task, (5, 0), ToolCall(0, SOLUTION))
        answer = str(sum(task.payload))
        reward = await env.reward(task, 0, task.prompt_ids, [], [env.ids(answer)])
        await env.release_member(task, (5, 0))
        left = env.folders()
        await env.close()
        return said(env, ids), reward, left

    text, reward, left = asyncio.run(go())
    assert text == f"<obs>{sum(task.payload)}</obs>" and reward == 1.0 and not left


def test_ap_02_members_have_workspaces_of_their_own_that_outlive_their_calls() -> None:
    env = env_with()
    task = drawn(env)

    async def go() -> list[str]:
        for member in range(2):
            await env.prepare(task, (member, member))
        out = []
        for code in ("open('mine','w').write('0')", "import os; print(os.path.exists('mine'))"):
            for member in range(2):
                if member and "write" in code:
                    continue
                out.append(said(env, await env.run_tool(task, (member, member), ToolCall(0, code))))
        await env.close()
        return out

    assert asyncio.run(go()) == ["<obs></obs>", "<obs>True</obs>", "<obs>False</obs>"]


def test_ap_03_a_program_that_dies_while_it_is_paused_is_reported_and_reclaimed() -> None:
    """Its tool is killed from outside, then its workspace goes: the first is an error that it reads, the second its
    end; its neighbour does not notice."""
    env = env_with(tool_time_limit_s=60.0)
    task = drawn(env)

    async def go() -> tuple[str, str, str, list[Path]]:
        await env.prepare(task, (0, 0))
        await env.prepare(task, (1, 1))
        program = env._programs[0, 0]
        code = "open('a','w').write('1'); import time; time.sleep(60)"
        call = asyncio.create_task(env.run_tool(task, (0, 0), ToolCall(0, code)))
        while not (program.folder / "a").exists():
            await asyncio.sleep(0.01)
        assert program.pid is not None
        os.kill(program.pid, signal.SIGKILL)
        died = said(env, await call)
        fault = env.tool_fault(task, (0, 0))
        assert not running(program.mark)
        for file in program.folder.iterdir():
            file.unlink()
        program.folder.rmdir()
        with pytest.raises(ToolLost, match="workspace is gone"):
            await env.run_tool(task, (0, 0), ToolCall(1, "print(1)"))
        await env.release_member(task, (0, 0))
        other = said(env, await env.run_tool(task, (1, 1), ToolCall(0, "print(2)")))
        await env.release_member(task, (1, 1))
        left = env.folders()
        await env.close()
        return died, fault, other, left

    died, fault, other, left = asyncio.run(go())
    assert (died, fault, other, left) == ("<obs>error: died</obs>", "died", "<obs>2</obs>", [])
    assert env.faults == {"died": 1}


def test_a_trajectory_without_a_workspace_cannot_call() -> None:
    env = env_with()
    with pytest.raises(ToolLost, match="trajectory 3 has no workspace"):
        asyncio.run(env.run_tool(drawn(env), (3, 0), ToolCall(0, "print(1)")))


def test_only_a_call_at_the_end_of_a_turn_is_one() -> None:
    env = env_with(max_turns=2)
    task = drawn(env)
    call = env.after_turn(task, 0, 0, env.ids("let me see <tool>print(1)\nprint(2)</tool>"))
    assert call == ToolCall(0, "print(1)\nprint(2)")
    assert env.after_turn(task, 0, 1, env.ids("<tool>print(1)</tool>")) is None, "the last turn"
    assert env.after_turn(task, 0, 0, env.ids("12")) is None
