"""Replies that call a tool in text: `<tool>...</tool>` at a turn's end, answered by `<obs>...</obs>`.

Responsible for when a turn ends, what counts as a call, and how call and observation are written. It refuses to know
tools.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from real.environments.base import RealTask, TextEnvironment, ToolCall, TurnLimits
from real.models.tokenizer import Tokenizer

_CALL = re.compile(r"<tool>((?:(?!<tool>).)*)</tool>\s*$", re.DOTALL)


class TaggedCalls(TextEnvironment):
    """A turn whose output ends with a call is followed by an observation, at most `max_turns` - 1 times. Every task
    holds an environment. `config` and `others` as `TextEnvironment` takes them."""

    def __init__(self, config: dict[str, Any], *, max_turns: int, tokenizer: Tokenizer, **others: Any) -> None:
        super().__init__({**config, "max_turns": max_turns}, tokenizer=tokenizer, **others)
        self._max_turns = max_turns
        end = tokenizer.encode("</tool>")
        self._stop = (tokenizer.eos_id, end[0]) if len(end) == 1 else (tokenizer.eos_id,)

    def make(self, index: int) -> RealTask:
        return dataclasses.replace(super().make(index), environment=True)

    def limits(self, task: RealTask, member: int, turn: int, context_tokens: int) -> TurnLimits:
        return TurnLimits(self._max_response_length, stop_token_ids=self._stop)

    def after_turn(self, task: RealTask, member: int, turn: int, output_ids: list[int]) -> ToolCall | None:
        found = _CALL.search(self.final_text([output_ids]))
        return ToolCall(turn, found[1]) if found and turn + 1 < self._max_turns else None

    def observation(self, text: str) -> list[int]:
        return self.ids(f"<obs>{text}</obs>")

    def called(self, text: str, result: str) -> list[tuple[Sequence[int], bool]]:
        """A call and its observation, as `pieces` has them."""
        return [(self.ids(f"<tool>{text}</tool>"), True), (self.observation(result), False)]
