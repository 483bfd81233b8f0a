"""Token-in token-out bookkeeping of the real experience store: ids, masks, spans, and what a record refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.engines.answers import Generated
from real.environments.base import RealTask
from real.records import Record, RecordError
from real.store import Conversation, ExperienceStore

pytestmark = pytest.mark.backend("CORE")


def task(prompt: tuple[int, ...] = (5, 6, 7), index: int = 0) -> RealTask:
    return RealTask(index, prompt, (), 16, False, 0, None)


def generated(ids: list[int], spans: tuple[tuple[str, int, int], ...]) -> Generated:
    return Generated(
        output_ids=ids,
        log_probs=[-0.5 - i / 100 for i in range(len(ids))],
        spans=spans,
        cached_tokens=0,
        prompt_tokens=0,
        finish_reason="stop",
        routed_experts=None,
        started_t=None,
        first_token_t=None,
        retractions=0,
    )


def answered(c: Conversation, ids: list[int], *spans: tuple[int, int, int]) -> None:
    c.answered(generated(ids, tuple((str(v), a, b) for v, a, b in spans)), spans)


def three_turns() -> Conversation:
    c = Conversation(1, 0, task(), 0)
    answered(c, [10, 11], (3, 0, 2))
    c.observed([20, 21, 22])
    answered(c, [12], (3, 0, 1))
    c.observed([23])
    answered(c, [13, 14, 15], (3, 0, 1), (4, 1, 3))
    return c


def test_er_13_each_prompt_begins_with_all_ids_before_it() -> None:
    c = Conversation(1, 0, task(), 0)
    prompts = [list(c.ids)]
    for turn in range(3):
        answered(c, [10 + turn, 40 + turn], (0, 0, 2))
        c.observed([90 + turn])
        prompts.append(list(c.ids))
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
    assert prompts[-1] == [5, 6, 7, 10, 40, 90, 11, 41, 91, 12, 42, 92]


def test_er_04_only_actor_tokens_carry_loss_and_er_18_turns_are_kept() -> None:
    record = three_turns().record()
    assert record.token_ids.tolist() == [5, 6, 7, 10, 11, 20, 21, 22, 12, 23, 13, 14, 15]
    assert record.loss_mask.tolist() == [True] * 2 + [False] * 3 + [True] + [False] + [True] * 3
    assert record.turns == ((0, 2), (5, 6), (7, 10))
    assert np.flatnonzero(record.generation_log_probs == 0).tolist() == [2, 3, 4, 6]


def test_er_08_versions_are_a_history_of_spans_that_partition_the_actor_tokens() -> None:
    record = three_turns().record()
    assert record.spans == ((3, 0, 2), (3, 5, 6), (3, 7, 8), (4, 8, 10))
    versions = [v for v, _, _ in record.spans]
    assert (min(versions), max(versions)) == (3, 4)
    with pytest.raises(RecordError, match="partition"):
        Record(**{**vars(record), "spans": ((4, 0, 10),)}).check()


@pytest.mark.parametrize("name", ["loss_mask", "generation_log_probs", "old_log_probs"])
def test_er_03_a_field_off_by_one_is_refused(name: str) -> None:
    fields: dict[str, Any] = vars(three_turns().record())
    fields[name] = np.zeros(9, dtype=fields["loss_mask"].dtype if name == "loss_mask" else np.float32)
    with pytest.raises(RecordError, match=f"{name} has 9 entries for 10"):
        Record(**fields).check()


def test_er_03_routed_experts_have_one_entry_per_predicted_position() -> None:
    fields: dict[str, Any] = vars(three_turns().record())
    Record(**{**fields, "routed_experts": np.zeros((12, 2, 2), np.int32)}).check()
    with pytest.raises(RecordError, match="13 positions, not 12"):
        Record(**{**fields, "routed_experts": np.zeros((13, 2, 2), np.int32)}).check()


def test_masked_tokens_are_those_of_the_oldest_versions() -> None:
    c = three_turns()
    assert c.record(4).loss_mask.tolist() == [False] * 8 + [True] * 2
    assert c.record(0).loss_mask.sum() == 6


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6))
def test_any_dialogue_gives_a_record_that_agrees_with_itself(turns: list[tuple[int, int, int]]) -> None:
    c = Conversation(1, 0, task(), 0)
    outputs, observed = 0, 0
    for version, (tokens, observation, step) in enumerate(turns):
        cut = min(step, tokens)
        spans = [(version, 0, cut), (version + 1, cut, tokens)]
        answered(c, list(range(tokens)), *((v, a, b) for v, a, b in spans if b > a))
        c.observed([1] * observation)
        outputs, observed = outputs + tokens, observed + observation
    record = c.record()
    assert record.loss_mask.sum() == outputs and record.response_tokens == outputs + observed
    assert sum(end - start for _, start, end in record.spans) == outputs


class Releases:
    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, index: int) -> None:
        self.released.append(index)


def test_a_task_lives_as_long_as_a_group_of_it_or_a_retry_may_need_it() -> None:
    environment = Releases()
    store = ExperienceStore(environment)  # type: ignore[arg-type]
    for index in (0, 1):
        store.add_task(task(index=index))
    for t, (group, index) in enumerate([(0, 0), (0, 0), (1, 1), (1, 1)]):
        store.open(t, group, index, t % 2, 2)
    store.retire((0,), 0, keep_task=False)
    assert environment.released == [] and store.find(0) is None and store.find(1) is not None
    store.retire((1,), 0, keep_task=False)
    assert environment.released == [0]
    store.retire((2, 3), 1, keep_task=True)
    assert environment.released == [0]
    store.open(4, 2, 1, 0, 1)
    store.retire((4,), 2, keep_task=False)
    assert environment.released == [0, 1]


def test_a_turn_that_was_taken_back_goes_on_and_is_one_turn() -> None:
    """Two parts under two versions: one turn, one output, spans of both, and a record that holds together."""
    c = Conversation(1, 0, task(), 0)
    c.answered(generated([10, 11], (("3", 0, 2),)), ((3, 0, 2),), whole=False)
    assert c.partial == 2 and c.ids == [5, 6, 7, 10, 11]
    c.answered(generated([12], (("4", 0, 1),)), ((4, 0, 1),), whole=True)
    assert (c.partial, c.outputs, c.turns) == (0, [[10, 11, 12]], [(0, 3)])
    c.observed([20])
    answered(c, [13], (4, 0, 1))
    record = c.record()
    assert c.outputs == [[10, 11, 12], [13]] and record.turns == ((0, 3), (4, 5))
    assert record.spans == ((3, 0, 2), (4, 2, 3), (4, 4, 5))
    assert record.loss_mask.tolist() == [True, True, True, False, True]
