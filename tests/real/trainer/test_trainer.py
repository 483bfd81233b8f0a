"""The facade, over ranks that only note what they are asked (no model, no process)."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest

from real.errors import RealError, UpdateFailed
from real.learning.distillation import require_same_context
from real.learning.options import LossOptions
from real.records import Record, RecordError
from real.trainer.options import SignalOptions
from real.trainer.signals import teacher_values, with_advantages, with_returns
from real.trainer.stats import Moved
from real.trainer.trainer import Trainer, TrainerError
from tests.real.trainer.conftest import make_record, random_records

pytestmark = pytest.mark.backend("CORE")


class NotingRank:
    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failure = failure

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))
        if self.failure is not None:
            raise self.failure
        if method in ("log_probs", "values"):
            return [np.full(r.response_tokens, r.trajectory, np.float32) for r in args[0]]
        return Moved(10, 0.5) if method in ("offload", "onload") else None


def trained(ranks: list[NotingRank]) -> list[Record]:
    return [r for rank in ranks for _, (records, *_) in rank.calls for r in records]


def test_updates_share_out_the_batch_and_groups_stay_whole() -> None:
    records = random_records(12)
    seen: list[list[int]] = []
    for update in range(3):
        ranks = [NotingRank(), NotingRank()]
        asyncio.run(Trainer(ranks, LossOptions()).train_update(records, 5, update, 3))
        assert all(call[1][1:] == (5, update) for rank in ranks for call in rank.calls)
        seen.append(sorted(r.trajectory for r in trained(ranks)))
        loads = [sum(len(r.token_ids) for r in rank.calls[0][1][0]) for rank in ranks]
        assert max(loads) - min(loads) <= max(len(r.token_ids) for r in records)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_lm_16_one_advantage_on_every_actor_token_of_a_response() -> None:
    mask = [True, True, False, True]
    group = [make_record(i, [1, 2, 3, 4, 5], 1, mask, group=0, reward=r) for i, r in enumerate([1.0, 1.0, 0.0, 0.0])]
    ranks = [NotingRank(), NotingRank()]
    asyncio.run(Trainer(ranks, LossOptions()).train_update(group, 0, 0, 1))
    found = {r.trajectory: r.extra["advantages"].tolist() for r in trained(ranks)}
    assert found == {0: [1, 1, 0, 1], 1: [1, 1, 0, 1], 2: [-1, -1, 0, -1], 3: [-1, -1, 0, -1]}
    assert all("advantages" not in r.extra for r in group), "the caller's records stay as they are"


def test_er_09_two_groups_of_one_task_are_two_comparisons() -> None:
    records = [
        make_record(i, [1, 2], 1, [True], task=7, group=g, reward=r)
        for i, (g, r) in enumerate([(0, 1.0), (0, 0.0), (1, 0.4), (1, 0.2)])
    ]
    found = [float(r.extra["advantages"][0]) for r in with_advantages(records, "population")]
    assert found == pytest.approx([1, -1, 1, -1])


@pytest.mark.parametrize("status", ["aborted", "failed"])
def test_er_12_an_aborted_response_does_not_enter_a_mean(status: str) -> None:
    records = random_records(2)
    records[1].finish_reason = status
    with pytest.raises(RecordError, match=f"trajectory 1 {status}"):
        with_advantages(records, "population")


def test_log_probs_come_back_in_the_callers_order() -> None:
    records = random_records(7)
    trainer = Trainer([NotingRank(), NotingRank(), NotingRank()], LossOptions())
    found = asyncio.run(trainer.log_probs(records))
    assert [(len(v), v[0]) for v in found] == [(r.response_tokens, r.trajectory) for r in records]


def test_op_12_each_record_is_scored_by_its_teacher_once() -> None:
    records, names = random_records(6), ["a", "b", "a", "a", "b", "a"]
    ranks = [NotingRank(), NotingRank()]
    found = asyncio.run(Trainer(ranks, LossOptions()).teacher_log_probs(records, names))
    asked = [(model, r.trajectory) for rank in ranks for _, (share, model) in rank.calls for r in share]
    assert sorted(asked) == sorted((f"teacher:{n}", i) for i, n in enumerate(names))
    for record, values in zip(records, found, strict=True):
        assert values["teacher_log_probs"].tolist() == [record.trajectory] * record.response_tokens
        require_same_context(replace(record, extra=dict(values)))


def test_op_04_both_updates_of_a_batch_read_the_same_signal() -> None:
    """The student's side is the records', of before the batch; no rank is asked for new log-probs between updates."""
    records = random_records(4)
    trainer = Trainer([rank := NotingRank()], LossOptions(), SignalOptions("distillation"))
    taught = asyncio.run(trainer.teacher_log_probs(records, ["a"] * 4))
    rank.calls.clear()
    ready = [replace(r, extra=dict(t)) for r, t in zip(records, taught, strict=True)]
    for update in range(2):
        asyncio.run(trainer.train_update(ready, 0, update, 2))
    assert [method for method, _ in rank.calls] == ["train_update"] * 2
    for record in trained([rank]):
        expected = np.where(record.loss_mask, record.trajectory - record.generation_log_probs, 0)
        assert record.extra["advantages"] == pytest.approx(expected)


def test_a_critics_update_gets_returns_and_the_callers_records_stay() -> None:
    records = [make_record(i, [1, 2, 3], 1, [True, True], reward=float(i)) for i in range(4)]
    ranks = [NotingRank(), NotingRank()]
    trainer = Trainer(ranks, LossOptions(), SignalOptions("critic", gamma=0.5))
    for record, values in zip(records, asyncio.run(trainer.values(records)), strict=True):
        record.extra["values"] = values
    asyncio.run(trainer.train_critic(records, 2, 0, 1))
    calls = [(args[1:], r) for rank in ranks for m, args in rank.calls if m == "train_critic" for r in args[0]]
    assert len(calls) == 4
    for where, record in calls:
        assert where == (2, 0)
        assert record.extra["returns"].tolist() == [record.reward / 2, record.reward]
    assert all("returns" not in r.extra for r in records)


PRODUCERS: dict[str, Callable[[Record], None]] = {
    "verifier": lambda r: setattr(r, "reward", 1.0),
    "trainer": lambda r: setattr(r, "old_log_probs", np.float32([-1, -2])),
    "reference": lambda r: setattr(r, "reference_log_probs", np.float32([-3, -4])),
    "teacher": lambda r: r.extra.update(teacher_values(r, np.float32([-1, -1]))),
    "critic": lambda r: r.extra.update(values=np.float32([0.5, 0.5])),
}


def test_er_10_a_record_is_the_same_in_whatever_order_its_parts_arrive() -> None:
    found = []
    for order in permutations(PRODUCERS):
        record = make_record(1, [1, 2, 3], 1, [True, True], reward=0.0)
        for producer in order:
            PRODUCERS[producer](record)
        ready = with_advantages([record.check()], "population", SignalOptions("distillation"))[0]
        (ready,) = with_returns([ready], SignalOptions())
        fields = {k: v for k, v in vars(ready).items() if k != "extra"} | ready.extra
        found.append({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()})
    assert len(found) == 120
    assert all(f == found[0] for f in found)
    assert found[0]["advantages"] == [0, 1] and found[0]["returns"] == [1, 1]


def test_er_10_every_per_token_field_declares_its_producer() -> None:
    source = ast.parse(inspect.getsource(Record)).body[0]
    assert isinstance(source, ast.ClassDef)
    said = {
        before.target.id: after.value.value.removeprefix("[T - 1, layers, top_k]; ").removeprefix("[R]; ")
        for before, after in pairwise(source.body)
        if isinstance(before, ast.AnnAssign)
        and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
    producers = ("engine", "environment", "verifier", "execution manager", "trainer")
    for name in (
        "loss_mask",
        "generation_log_probs",
        "spans",
        "reward",
        "finish_reason",
        "old_log_probs",
        "reference_log_probs",
        "routed_experts",
        "turns",
    ):
        assert said[name].lower().startswith(producers), name


def test_moved_bytes_add_up_and_the_slowest_counts() -> None:
    trainer = Trainer([NotingRank(), NotingRank()], LossOptions())
    assert asyncio.run(trainer.offload()) == Moved(20, 0.5)


def test_a_rank_that_fails_is_named_without_waiting_for_the_others() -> None:
    class Waiting(NotingRank):
        async def call(self, method: str, *args: Any) -> Any:
            await asyncio.Event().wait()

    trainer = Trainer([Waiting(), NotingRank(RuntimeError("connection closed by peer"))], LossOptions())
    says = "trainer rank 1 of 2 failed in train_update: RuntimeError: connection closed by peer"
    with pytest.raises(TrainerError, match=says):
        asyncio.run(asyncio.wait_for(trainer.train_update(random_records(4), 0, 0, 1), 10))


@pytest.mark.parametrize("failure", [RealError("trainer: no"), RecordError("off by one"), UpdateFailed("copy", "no")])
def test_what_a_rank_says_plainly_passes_through(failure: Exception) -> None:
    with pytest.raises(type(failure), match=str(failure)):
        asyncio.run(Trainer([NotingRank(failure)], LossOptions()).call_all("publish", "send"))


def test_collective_calls_keep_one_order_on_all_ranks() -> None:
    ranks = [NotingRank(), NotingRank()]
    trainer = Trainer(ranks, LossOptions())

    async def both() -> None:
        await asyncio.gather(
            trainer.call_all("offload"), trainer.log_probs(random_records(2)), trainer.call_all("onload")
        )

    asyncio.run(both())
    assert [[m for m, _ in rank.calls] for rank in ranks] == [["offload", "log_probs", "onload"]] * 2
