"""Two ranks in two processes (gloo): FSDP2 changes where things are computed, not what."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from real.learning.options import LossOptions
from real.trainer.local import ProcessRank, local_ranks
from real.trainer.options import CriticOptions, SignalOptions, TrainerOptions
from real.trainer.rank import TrainerRank
from real.trainer.trainer import RankHandle, Trainer, TrainerError
from tests.real.trainer.conftest import random_records
from tests.real.trainer.test_routing_replay import routed_at_random
from tests.support.real_rig import scoring_model

T = TypeVar("T")
LOSS = LossOptions(kl_coef=0.1)
SIGNALS = SignalOptions("group", lambd=0.9)
"""The critic is trained beside a group baseline: what it learns does not depend on what the actor reads."""


class WatchedRank(TrainerRank):
    """Remembers the whole gradient of its last update."""

    def connect(self, host: str, port: int) -> None:
        super().connect(host, port)
        self.watch()

    def restore(self, folder: str | Path) -> dict[str, Any]:
        position = super().restore(folder)
        self.watch()
        return position

    def watch(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

        def keep(*_: object) -> None:
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None
                self.gradients[name] = parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]

        self.optimizer.register_step_pre_hook(keep)

    def last_gradients(self) -> dict[str, torch.Tensor]:
        return self.gradients


class Place:
    """A process's rank, which can be replaced by the rank of another model: starting processes is what takes long."""

    def __init__(self, world: int, number: int) -> None:
        torch.set_num_threads(1)
        self.world, self.number = world, number

    def build(self, options: TrainerOptions) -> None:
        self.rank = WatchedRank(self.number, self.world, options)

    def __getattr__(self, method: str) -> Any:
        return getattr(self.rank, method)


def wait(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 300)

    return asyncio.run(bounded())


@pytest.fixture(scope="module")
def places() -> Iterator[tuple[Sequence[RankHandle], Sequence[RankHandle]]]:
    """One place here, two in processes."""
    found = [local_ranks(partial(Place, world), world) for world in (1, 2)]
    yield found[0], found[1]
    for handles in found:
        for handle in handles:
            handle.close()


Worlds = tuple[Trainer, Trainer]


@pytest.fixture(scope="module", params=["dense_model", "moe_model"])
def worlds(
    request: pytest.FixtureRequest,
    places: tuple[Sequence[RankHandle], Sequence[RankHandle]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Worlds:
    """(one rank, two ranks) of the same model; tests run in order and leave both with the same updates behind them."""
    # Gradients are left unclipped, so that those of both worlds can be compared as they are.
    model = str(request.getfixturevalue(request.param))
    options = TrainerOptions(
        model,
        lr=1e-3,
        max_grad_norm=1e9,
        max_tokens_per_gpu=48,
        loss=LOSS,
        critic=CriticOptions(lr=1e-3),
        teachers={"same": model},
        reward_model=str(scoring_model(Path(model), tmp_path_factory.mktemp("scorer") / "model")),
        use_rollout_routing_replay=request.param == "moe_model",
        timeout_s=120,
    )
    pair = Trainer(places[0], LOSS, SIGNALS), Trainer(places[1], LOSS, SIGNALS)
    for trainer in pair:
        wait(trainer.call_all("build", options))
        wait(trainer.connect())
    return pair


def scored(trainer: Trainer, seed: int = 0) -> list[Any]:
    """Seven records in groups of two and one of one: the shares of two ranks are uneven, in micro-batches too."""
    records = random_records(7, seed)
    for record, values in zip(records, wait(trainer.log_probs(records, "reference")), strict=True):
        record.reference_log_probs = values
    return records


def test_log_probs_agree(worlds: Worlds) -> None:
    one, two = worlds
    records = random_records(7)
    for a, b in zip(wait(one.log_probs(records)), wait(two.log_probs(records)), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("worlds", ["moe_model"], indirect=True)
def test_er_15_recorded_experts_run_on_every_rank(worlds: Worlds) -> None:
    one, two = worlds
    records = routed_at_random(random_records(7))
    free, found = wait(one.log_probs(random_records(7))), wait(two.log_probs(records))
    for a, b in zip(wait(one.log_probs(records)), found, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert max(np.abs(a - b).max() for a, b in zip(free, found, strict=True)) > 0.01


def test_gradients_and_statistics_agree(worlds: Worlds) -> None:
    one, two = worlds
    records = scored(one)
    a = wait(one.train_update(records, 0, 0, 1))
    b = wait(two.train_update(records, 0, 0, 1))
    assert (a.tokens, a.sequences, a.input_tokens) == (b.tokens, b.sequences, b.input_tokens)
    for name in ("loss", "grad_norm", "clip_share", "mean_ratio", "mismatch_kl"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5, abs=1e-7), name
    assert sum(a.ratio_counts.values()) == sum(b.ratio_counts.values()) == a.tokens
    moved = sum(abs(a.ratio_counts.get(k, 0) - b.ratio_counts.get(k, 0)) for k in a.ratio_counts | b.ratio_counts)
    assert moved <= 2, "rounding may carry one token over an edge, from one bin to the next"
    whole = wait(one.call(0, "last_gradients"))
    shared, same = wait(two.call_all("last_gradients"))
    largest = max(float(g.abs().max()) for g in whole.values())
    for name, gradient in whole.items():
        assert (gradient - shared[name]).abs().max().item() <= 1e-6 * largest, name
        assert torch.equal(shared[name], same[name]), name


def test_a_rank_without_records_takes_part(worlds: Worlds) -> None:
    records = scored(worlds[0])[:1]
    a, b = (wait(c.log_probs(records))[0] for c in worlds)
    assert a == pytest.approx(b, abs=1e-5)
    # A group of one has no advantage: the gradient is the reference's pull alone.
    first, second = (wait(c.train_update(records, 0, 0, 1)) for c in worlds)
    assert first.grad_norm > 1e-3
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
    assert first.reference_kl == pytest.approx(second.reference_kl, rel=1e-4)


def test_critics_and_teachers_agree(worlds: Worlds) -> None:
    found = []
    for trainer in worlds:
        records, numbers = random_records(7), []
        for update in range(2):
            for record, values in zip(records, wait(trainer.values(records)), strict=True):
                record.extra["values"] = values
            stats = wait(trainer.train_critic(records, 0, update, 2))
            numbers += [stats.loss, stats.grad_norm, stats.explained_variance, stats.clip_share, float(stats.tokens)]
        taught = wait(trainer.teacher_log_probs(records, ["same"] * 7))
        found.append((numbers, [r.extra["values"] for r in records], [t["teacher_log_probs"] for t in taught]))
    (a, values_a, taught_a), (b, values_b, taught_b) = found
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    for one, two in zip([*values_a, *taught_a], [*values_b, *taught_b], strict=True):
        assert one == pytest.approx(two, abs=1e-4)
    assert max(np.abs(v).max() for v in values_a) > 1e-4, "the second values are of a critic that has learnt"


def test_reward_models_agree(worlds: Worlds) -> None:
    records = random_records(7)
    one, two = (wait(trainer.rewards(records)) for trainer in worlds)
    assert one == pytest.approx(two, abs=1e-4) and np.std(one) > 0.01


@pytest.mark.parametrize("worlds", ["moe_model"], indirect=True)
def test_er_16_an_update_with_recorded_experts_agrees(worlds: Worlds) -> None:
    records = routed_at_random(scored(worlds[0]))
    records[2].routed_experts = None
    without = len(records[2].token_ids) - 1
    a, b = (wait(c.train_update(records, 0, 0, 1)) for c in worlds)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
    assert a.fallback_positions == b.fallback_positions == without
    assert a.replayed_positions == b.replayed_positions == sum(len(r.token_ids) - 1 for r in records) - without


def test_snapshots_are_on_rank_0_or_everywhere(worlds: Worlds) -> None:
    _, two = worlds
    first, second = wait(two.call_all("full_state"))
    assert second is None
    everywhere = wait(two.call_all("full_state", True))
    assert all(torch.equal(first[n], state[n]) for state in everywhere for n in first)


def test_offload_moves_every_shard_once(worlds: Worlds) -> None:
    one, two = worlds
    before = wait(two.log_probs(random_records(3)))
    whole, shards = wait(one.offload()).bytes, wait(two.offload()).bytes
    assert whole <= shards < 1.2 * whole  # shards are padded to equal size
    assert wait(two.onload()).bytes == shards
    wait(one.onload())
    after = wait(two.log_probs(random_records(3)))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_checkpoint_restores_bit_for_bit_and_across_world_sizes(worlds: Worlds, tmp_path: Path) -> None:
    one, two = worlds
    records = scored(one, seed=3)
    wait(two.save(tmp_path / "two", {"next": 4}))
    expected = wait(two.train_update(records, 1, 0, 1))
    weights = wait(two.call_all("full_state"))[0]
    assert wait(two.restore(tmp_path / "two")) == {"next": 4}
    again = wait(two.train_update(records, 1, 0, 1))
    assert (again.loss, again.grad_norm) == (expected.loss, expected.grad_norm)
    state = wait(two.call_all("full_state"))[0]
    assert all(torch.equal(state[n], w) for n, w in weights.items())
    # One rank continues what two began.
    assert wait(one.restore(tmp_path / "two")) == {"next": 4}
    alone = wait(one.train_update(records, 1, 0, 1))
    assert alone.loss == pytest.approx(expected.loss, rel=1e-5)
    state = wait(one.call_all("full_state"))[0]
    assert all(torch.allclose(state[n], w, atol=1e-5) for n, w in weights.items())


@pytest.mark.parametrize("worlds", ["moe_model"], indirect=True)  # the last to use the processes
def test_a_rank_that_dies_is_named(worlds: Worlds, places: tuple[Sequence[RankHandle], Sequence[RankHandle]]) -> None:
    _, two = worlds
    victim = places[1][1]
    assert isinstance(victim, ProcessRank) and victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    with pytest.raises(TrainerError, match=r"trainer rank [01] of 2 failed in log_probs"):
        wait(two.log_probs(random_records(4)))
    with pytest.raises(
        TrainerError, match=r"rank 1 of 2 failed in address: RankLost: its process ended \(exit code -9\)"
    ):
        wait(two.call(1, "address"))
