"""The facade, over ranks that only note what they are asked (no model, no process)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from real.errors import RealError, UpdateFailed
from real.learning.options import LossOptions
from real.records import Record, RecordError
from real.trainer.stats import Moved
from real.trainer.trainer import Trainer, TrainerError, with_advantages
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
        if method == "log_probs":
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
