"""What an experience record is, keeps apart and refuses. That learning reads it as meant is shown where learning is
tested (`trainer`, `learning`), and how it is put together beside the store (`test_store`)."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from real.experience_files import read_records, write_records
from real.learning.log_probs import chosen_log_probs
from real.records import Record, RecordError
from real.trainer.packing import Row, pack
from real.trainer.trainer import with_advantages
from tests.real.test_store import answered, three_turns


def record(**changes: Any) -> Record:
    """Prompt 5 6 7; the actor says 101 202, a tool 20 21, the actor 30 31. Under v3, then v4."""
    values: dict[str, Any] = {
        "trajectory": 0,
        "group": 4,
        "task": 9,
        "prompt_tokens": 3,
        "token_ids": np.array([5, 6, 7, 101, 202, 20, 21, 30, 31], np.int32),
        "loss_mask": np.array([1, 1, 0, 0, 1, 1], np.bool_),
        "generation_log_probs": np.log(np.float32([0.5, 0.5, 1, 1, 0.5, 0.5])),
        "spans": ((3, 0, 2), (3, 4, 5), (4, 5, 6)),
        "turns": ((0, 2), (4, 6)),
        "finish_reason": "stop",
        "reward": 1.0,
    }
    return Record(**(values | changes))


def test_er_01_a_record_has_no_place_for_text_and_training_reads_none() -> None:
    """Its one word is how it ended; without it the learner's rows are the same arrays."""
    r = record().check()
    assert [f.name for f in fields(Record) if isinstance(getattr(r, f.name), str)] == ["finish_reason"]
    with pytest.raises(TypeError, match="response"):
        record(response="AB")
    [row], [without] = pack([r], 64), pack([replace(r, finish_reason="")], 64)
    for name in (f.name for f in fields(Row)):
        assert np.array_equal(getattr(row, name), getattr(without, name)), name
    assert row.token_ids.tolist() == r.token_ids.tolist() and row.chosen.tolist() == [101, 202, 20, 21, 30, 31]


NEEDED = ("trajectory", "group", "task", "prompt_tokens", "token_ids", "loss_mask", "generation_log_probs", "spans")


def test_er_02_and_er_09_what_a_record_cannot_do_without() -> None:
    """Ids of tokens, mask, log-probs, versions, and the task's and the group's id as two fields."""
    needed = [f.name for f in fields(Record) if f.default is MISSING and f.default_factory is MISSING]
    assert tuple(needed) == NEEDED
    for name in NEEDED:
        with pytest.raises(TypeError, match=name):
            Record(**{k: v for k, v in vars(record()).items() if k != name})
    assert (record().group, record().task, record().reward) == (4, 9, 1.0)


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize(
    "name", ["loss_mask", "generation_log_probs", "old_log_probs", "reference_log_probs", "teacher"]
)
def test_er_03_no_field_may_be_off_by_one(name: str, off: int) -> None:
    values = np.zeros(6 + off, np.bool_ if name == "loss_mask" else np.float32)
    wrong = record(extra={name: values}) if name == "teacher" else record(**{name: values})
    with pytest.raises(RecordError, match=f"trajectory 0: {name} has {6 + off} entries for 6 response tokens"):
        wrong.check()


@pytest.mark.parametrize("positions", [7, 9])
def test_er_03_one_routing_entry_per_predicted_position(positions: int) -> None:
    record(routed_experts=np.zeros((8, 2, 2), np.int32)).check()
    with pytest.raises(RecordError, match=f"routed_experts has {positions} positions, not 8"):
        record(routed_experts=np.zeros((positions, 2, 2), np.int32)).check()


@pytest.mark.parametrize("prompt", [0, 10])
def test_er_03_a_prompt_is_some_of_the_tokens(prompt: int) -> None:
    with pytest.raises(RecordError, match=f"9 tokens with a prompt of {prompt}"):
        record(prompt_tokens=prompt).check()


def test_er_04_the_mask_is_true_where_a_version_chose_and_nowhere_else() -> None:
    r = record().check()
    chosen = {i for _, start, end in r.spans for i in range(start, end)}
    assert chosen == set(np.flatnonzero(r.loss_mask)) == {0, 1, 4, 5}
    for flipped in range(6):
        mask = r.loss_mask.copy()
        mask[flipped] ^= True
        with pytest.raises(RecordError, match="partition"):
            replace(r, loss_mask=mask).check()


def test_er_05_an_observation_stays_in_the_context_of_what_the_learner_scores() -> None:
    """A causal stand-in for a model: logits at t from the mean of all embeddings up to t. Another tool result changes
    the log-probs of the actor's later tokens, of no earlier one, and the number of loss terms stays."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(256, 16, generator=generator) for _ in range(2))

    def scored(r: Record) -> torch.Tensor:
        [row] = pack([r.check()], 64)
        context = embedding[torch.from_numpy(row.token_ids)].cumsum(0) / torch.arange(1, 10)[:, None]
        every = chosen_log_probs(context[torch.from_numpy(row.predictors)] @ head.T, torch.from_numpy(row.chosen))
        return every[torch.from_numpy(r.loss_mask)]

    other = record()
    other.token_ids[5] = 77
    before, after = scored(record()), scored(other)
    assert len(before) == len(after) == 4
    assert (before == after).tolist() == [True, True, False, False]


def test_er_06_recomputed_log_probs_are_a_field_beside_the_generated_ones() -> None:
    r = record().check()
    sampled = r.generation_log_probs.copy()
    both = replace(r, old_log_probs=np.log(np.full(6, 0.52, np.float32))).check()
    assert np.array_equal(both.generation_log_probs, sampled)
    assert both.old_log_probs is not None and np.exp(both.old_log_probs[0] - sampled[0]) == pytest.approx(1.04)


def test_er_08_versions_are_a_history_and_not_a_number() -> None:
    versions = [version for version, _, _ in record().check().spans]
    assert (min(versions), max(versions)) == (3, 4)
    with pytest.raises(TypeError):
        record(spans=4).check()


@pytest.mark.parametrize(
    ("spans", "what"),
    [
        (((4, 0, 6),), "partition"),  # one final version over everything, observations too
        (((3, 0, 2), (4, 5, 6)), "partition"),  # a token of nobody
        (((3, 0, 2), (3, 4, 6), (4, 5, 6)), "partition"),  # a token of two
        ((), "partition"),
        (((3, 0, 2), (4, 4, 7)), r"span \(4, 4, 7\) of 6"),
        (((3, 0, 2), (3, 4, 4), (4, 4, 6)), r"span \(3, 4, 4\)"),
        (((-1, 0, 2), (4, 4, 6)), r"span \(-1, 0, 2\)"),
    ],
)
def test_er_08_spans_must_partition_the_actor_tokens(spans: tuple[tuple[int, int, int], ...], what: str) -> None:
    with pytest.raises(RecordError, match=what):
        record(spans=spans).check()


@pytest.mark.parametrize("status", ["stop", "length", "aborted", "failed"])
def test_er_12_how_it_ended_travels_with_the_record_and_decides_whether_it_is_compared(
    status: str, tmp_path: Path
) -> None:
    held = [record(), record(trajectory=1, reward=0.0, finish_reason=status)]
    write_records(tmp_path / "e.parquet", held)
    found = list(read_records(tmp_path / "e.parquet"))
    assert [r.finish_reason for r in found] == ["stop", status]
    if status in ("aborted", "failed"):
        with pytest.raises(RecordError, match=f"trajectory 1 {status}"):
            with_advantages(found, "population")
    else:
        assert [float(r.extra["advantages"][0]) for r in with_advantages(found, "population")] == [1.0, -1.0]


def test_er_18_any_number_of_calls_and_observations_is_one_record(tmp_path: Path) -> None:
    """Seven calls of one to seven tokens, observations between them: each call's tokens are found by its boundaries."""
    conversation = three_turns()
    outputs = [[10, 11], [12], [13, 14, 15]]
    for turn in range(4, 8):
        conversation.observed([90] * turn)
        outputs.append([100 * turn + k for k in range(turn)])
        answered(conversation, outputs[-1], (turn, 0, turn))
    r = conversation.record()
    write_records(tmp_path / "e.parquet", [r])
    [found] = read_records(tmp_path / "e.parquet")
    for one in (r, found):
        response = one.token_ids[one.prompt_tokens :]
        assert [response[a:b].tolist() for a, b in one.turns] == outputs
        assert all(one.loss_mask[a:b].all() for a, b in one.turns)
        assert all(not one.loss_mask[b:a].any() for (_, b), (a, _) in pairwise(one.turns))
