"""Sums of the numbers in a file, with Python to call: a program that owns files and runs code.

`sum numbers.txt=`, `<tool>print(sum(map(int,open("numbers.txt"))))</tool>`, `<obs>42</obs>`, `42`. One workspace per
trajectory, from `prepare` to `release_member`; each call runs in processes of its own, under limits (`sandbox`). A call
that passes one is answered with an error that names it, and counted. Refuses to rebuild anything from text: a turn's
observation is ids that follow the ids that were sampled (TITO)."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from real.environments.base import RealTask, ToolCall, Who
from real.environments.sandbox import Limits, Sandbox, ToolLost
from real.environments.tagged import TaggedCalls
from real.models.tokenizer import Tokenizer

FILE = "numbers.txt"
SOLUTION = f'print(sum(map(int,open("{FILE}"))))'


class Workspace(TaggedCalls):
    """`numbers` numbers, uniform on 0 .. `max_operand`, one a line. The prompt does not show them.

    A turn whose output ends with a call is followed by an observation of at most `tool_output_bytes`, at most
    `max_turns` - 1 times. Reward 1 if the last turn is the sum and nothing else; else 0."""

    kind = "workspace"

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        members: int,
        seed: int,
        numbers: int = 4,
        max_operand: int = 9,
        max_turns: int = 3,
        tool_time_limit_s: float = 5.0,
        tool_memory_mb: int = 512,
        tool_output_bytes: int = 200,
        workspace_mb: int = 64,
        num_tasks: int | None = None,
        max_response_length: int = 64,
        prompt_template: str = "{question}",
    ) -> None:
        limits = Limits(
            time_s=tool_time_limit_s,
            memory_bytes=tool_memory_mb * 2**20,
            output_bytes=tool_output_bytes,
            workspace_bytes=workspace_mb * 2**20,
        )
        super().__init__(
            {
                "numbers": numbers,
                "max_operand": max_operand,
                "limits": dataclasses.astuple(limits),
            },
            max_turns=max_turns,
            tokenizer=tokenizer,
            members=members,
            seed=seed,
            num_tasks=num_tasks,
            max_response_length=max_response_length,
            prompt_template=prompt_template,
        )
        self.limits_of_calls = limits
        self._numbers, self._max_operand = numbers, max_operand
        self._root: Path | None = None
        self._programs: dict[Who, Sandbox] = {}
        self._faults: dict[Who, str] = {}
        self.faults: Counter[str] = Counter()
        """Calls that passed a limit or died, by which."""

    def item(self, seed: int, index: int) -> tuple[str, Any]:
        draw = np.random.default_rng((seed, index))
        return f"sum {FILE}=", draw.integers(0, self._max_operand + 1, self._numbers).tolist()

    def pieces(self, payload: Any) -> list[tuple[Sequence[int], bool]]:
        answer = str(sum(payload))
        return (
            [*self.called(SOLUTION, answer), *super().pieces(answer)] if self._max_turns > 1 else super().pieces(answer)
        )

    async def prepare(self, task: RealTask, who: Who) -> None:
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="programs-"))
        program = self._programs[who] = Sandbox(self.limits_of_calls, self._root)
        program.write(FILE, "".join(f"{n}\n" for n in task.payload))

    async def run_tool(self, task: RealTask, who: Who, call: ToolCall) -> list[int]:
        """Raises `ToolLost` if the trajectory was not prepared, is released, or its workspace is gone."""
        program = self._programs.get(who)
        if program is None:
            raise ToolLost(f"trajectory {who[0]} has no workspace")
        result = await program.run(call.text)
        self._faults[who] = result.fault
        if result.fault and result.fault != "error":
            self.faults[result.fault] += 1
            return self.observation(f"error: {result.fault}")
        return self.observation(result.text)

    def tool_fault(self, task: RealTask, who: Who) -> str:
        return self._faults.get(who, "")

    async def release_member(self, task: RealTask, who: Who) -> None:
        self._faults.pop(who, None)
        if (program := self._programs.pop(who, None)) is not None:
            await program.close()

    def folders(self) -> list[Path]:
        """Workspaces that exist."""
        return [] if self._root is None else sorted(self._root.iterdir())

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        return float(self.final_text(outputs) == str(sum(task.payload)))

    async def close(self) -> None:
        while self._programs:
            await self._programs.popitem()[1].close()
        if self._root is not None:
            self._root.rmdir()
            self._root = None
