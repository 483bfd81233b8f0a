"""Ids are handed on as they were sampled; text that comes back as other ids is what goes wrong otherwise."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.models.tokenizer import CharTokenizer
from tests.support.tito import drift, next_prompt

pytestmark = pytest.mark.backend("CORE")


class MergingTokenizer:
    """101 is "A", 202 is "B", and "AB" is one piece, 303: the smallest tokenizer whose text does not lead back."""

    pieces: ClassVar = {101: "A", 202: "B", 303: "AB", 7: "?"}
    eos_id, vocab_size = 0, 304

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            best = max((p for p in self.pieces.items() if text.startswith(p[1])), key=lambda p: len(p[1]))
            ids.append(best[0])
            text = text[len(best[1]) :]
        return ids


def test_er_13_text_leads_back_to_other_ids_and_tito_does_not() -> None:
    tokenizer, prompt, sampled, observation = MergingTokenizer(), [7], [101, 202], [7]
    assert tokenizer.decode(sampled) == "AB"
    assert tokenizer.encode("AB") == [303]
    by_text = tokenizer.encode(tokenizer.decode([*prompt, *sampled]))
    assert by_text == [7, 303]
    by_ids = next_prompt(prompt, sampled, observation)
    assert by_ids == [7, 101, 202, 7]
    assert drift([*prompt, *sampled], by_ids) == 0
    assert drift([*prompt, *sampled], [*by_text, *observation]) == 2


def test_er_13_our_own_tokenizer_can_drift_too() -> None:
    spelled = [ord(c) for c in "<tool>"]
    assert CharTokenizer().decode(spelled) == "<tool>"
    assert CharTokenizer().encode("<tool>") == [CharTokenizer.tool_id] != spelled


def test_er_14_a_template_that_drops_earlier_thinking_is_seen_as_a_broken_prefix() -> None:
    tokenizer = CharTokenizer()
    prompt, output = tokenizer.encode("2+2="), tokenizer.encode("[two and two]4")
    observation = tokenizer.encode("ok?")
    dropped = tokenizer.encode("2+2=4ok?")
    assert drift([*prompt, *output], next_prompt(prompt, output, observation)) == 0
    assert drift([*prompt, *output], dropped) == len(output)


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_drift_is_zero_exactly_for_a_prefix(before: list[int], prompt: list[int]) -> None:
    assert (drift(before, prompt) == 0) == (prompt[: len(before)] == before)
