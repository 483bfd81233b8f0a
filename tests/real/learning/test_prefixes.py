"""MOPD^2's starts: which tokens a history holds, and which it never does."""

from __future__ import annotations

import numpy as np
import pytest

from real.errors import RealError
from real.learning.prefixes import SourceDialogue, dialogue_of, require_fresh_turn, starts
from real.records import Record, RecordError
from tests.real.trainer.conftest import make_record

PROMPT = (1, 2, 3)
TURNS = ((10, 11, 12), (20, 21), (30, 31, 32), (40,))
"""Each with the observation at its end."""
SOURCE = SourceDialogue("s", PROMPT, TURNS, "math")
Y1, Y2 = [77, 78], [88]


def answered(history: tuple[int, ...], y: list[int], trajectory: int = 0, turns: int = 1) -> Record:
    """The student's fresh turn from a history."""
    cuts = (*((i, i + 1) for i in range(turns - 1)), (turns - 1, len(y)))
    return make_record(trajectory, [*history, *y], len(history), [True] * len(y), turns=cuts)


def test_op_10_full_rollouts_and_single_turns_from_intermediate_histories() -> None:
    full, _, h1, h2 = starts(SOURCE)
    assert (full.token_ids, full.max_turns) == (PROMPT, None)
    assert (h1.token_ids, h1.max_turns) == ((1, 2, 3, 10, 11, 12, 20, 21), 1)  # P + 2 source turns -> turn 3
    assert (h2.token_ids, h2.max_turns) == ((1, 2, 3, 10, 11, 12, 20, 21, 30, 31, 32), 1)  # P + 3 -> turn 4
    assert [s.source_turns for s in starts(SOURCE, [2, 3])] == [2, 3]


def test_op_11_y1_is_in_no_other_history_and_the_two_do_not_wait_for_each_other() -> None:
    h1, h2 = starts(SOURCE, [2, 3])
    assert starts(SOURCE, [3, 2]) == [h2, h1], "neither start is made from the other"
    assert h2.token_ids == h1.token_ids + TURNS[2]
    first, second = answered(h1.token_ids, Y1, 0), answered(h2.token_ids, Y2, 1)
    assert require_fresh_turn(first, h1) is first and require_fresh_turn(second, h2) is second
    assert not set(Y1) & set(second.token_ids.tolist())
    # A fourth turn after the student's own third is another thing, and is refused as h2's.
    chained = answered((*h1.token_ids, *Y1), Y2)
    with pytest.raises(RecordError, match="trajectory 0, from s after 3 source turns: its prompt is not that history"):
        require_fresh_turn(chained, h2)


def test_op_10_one_turn_and_no_more() -> None:
    (h1,) = starts(SOURCE, [2])
    with pytest.raises(RecordError, match="2 turns where one was to be made"):
        require_fresh_turn(answered(h1.token_ids, Y1, turns=2), h1)
    (full,) = starts(SOURCE, [0])
    require_fresh_turn(answered(full.token_ids, Y1, turns=2), full)


def test_op_13_the_fresh_turn_alone_carries_loss() -> None:
    (h1,) = starts(SOURCE, [2])
    record = require_fresh_turn(answered(h1.token_ids, Y1), h1)
    loss_at = [record.prompt_tokens + int(t) for t in np.flatnonzero(record.loss_mask)]
    assert record.token_ids[loss_at].tolist() == Y1
    assert loss_at == [8, 9]  # positions 0 .. 7 are P and the source's turns
    # A record whose prompt ends earlier would have source tokens on its response side.
    with pytest.raises(RecordError, match="its prompt is not that history"):
        require_fresh_turn(answered(h1.token_ids[:-2], [*h1.token_ids[-2:], *Y1]), h1)


def test_op_12_every_start_keeps_its_sources_teacher() -> None:
    other = SourceDialogue("t", PROMPT, TURNS, "chat")
    assert [s.teacher for source in (SOURCE, other) for s in starts(source, [0, 2])] == ["math", "math", "chat", "chat"]
    with pytest.raises(RealError, match="source dialogue s: no teacher is assigned to it"):
        SourceDialogue("s", PROMPT, TURNS, "")


def test_op_10_a_recorded_rollout_is_a_source() -> None:
    """Two calls with tool results behind them, then a last one: turns are cut where calls began."""
    mask = [True, True, False, True, False, False, True]
    rollout = make_record(3, [1, 2, 10, 11, 12, 20, 21, 22, 30], 2, mask, turns=((0, 2), (3, 4), (6, 7)))
    source = dialogue_of(rollout, "r", "code")
    assert source == SourceDialogue("r", (1, 2), ((10, 11, 12), (20, 21, 22), (30,)), "code")
    assert starts(source, [2])[0].token_ids == (1, 2, 10, 11, 12, 20, 21, 22)
    with pytest.raises(RecordError, match="trajectory 4 has no turns"):
        dialogue_of(make_record(4, [1, 2], 1, [True]), "r", "code")


def test_a_history_that_the_source_does_not_go_on_from_is_refused() -> None:
    for n in (-1, 4):
        with pytest.raises(RealError, match=f"a fresh turn can follow 0 to 3 of its turns, not {n}"):
            starts(SOURCE, [n])
    with pytest.raises(RealError, match="it needs a prompt and turns that are not empty"):
        SourceDialogue("s", PROMPT, ((1,), ()), "math")
