"""Token ids in, token ids out: how a turn's prompt follows from the last one, and how far another one drifts from it.

Refuses to know text."""

from __future__ import annotations

from collections.abc import Sequence


def next_prompt(prompt: Sequence[int], output: Sequence[int], observation: Sequence[int]) -> list[int]:
    """The next turn's prompt: what the engine was given, what it sampled, what the tool answered, as they were."""
    return [*prompt, *output, *observation]


def drift(before: Sequence[int], prompt: Sequence[int]) -> int:
    """How many of `before`'s tokens (a turn's prompt and output) the next `prompt` does not begin with, counted from
    the first difference; 0 is what TITO promises."""
    same = next(
        (i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), min(len(before), len(prompt))
    )
    return len(before) - same
