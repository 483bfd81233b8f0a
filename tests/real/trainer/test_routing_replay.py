"""Routing replay in the trainer: packed rows against transformers with a router that is written out here, one sequence
at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from real.errors import RealError
from real.records import Record
from real.trainer.options import TrainerOptions
from real.trainer.packing import EMPTY_ROW, pack, row_experts
from real.trainer.rank import TrainerRank
from real.trainer.signals import with_advantages
from tests.real.trainer import plain
from tests.real.trainer.conftest import make_record, random_records

LAYERS, TOP_K, EXPERTS = 2, 2, 4


def connected(folder: Path, *, replay: bool = True, **options: object) -> TrainerRank:
    settings = TrainerOptions(str(folder), use_rollout_routing_replay=replay, **options)  # type: ignore[arg-type]
    rank = TrainerRank(0, 1, settings)
    rank.connect(*rank.address())
    return rank


def routed_at_random(records: Sequence[Record], seed: int = 0) -> list[Record]:
    """As if an engine had run any two experts."""
    rng = np.random.default_rng(seed)

    def experts(tokens: int) -> np.ndarray:
        return np.argsort(rng.random((tokens - 1, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.int32)

    return [replace(r, routed_experts=experts(len(r.token_ids))).check() for r in records]


def routed_by(model: Any, records: Sequence[Record]) -> list[Record]:
    """The experts that `model` itself runs, as an engine would record them."""
    found = []
    for record in records:
        ids = torch.from_numpy(record.token_ids.astype("int64"))[None]
        with torch.no_grad():
            logits = model(input_ids=ids, output_router_logits=True).router_logits
        chosen = torch.stack([x.topk(TOP_K).indices for x in logits], dim=1)[:-1]
        found.append(replace(record, routed_experts=chosen.numpy().astype(np.int32)))
    return found


class Told(torch.nn.Module):
    """A router that runs what it is told, with gates exp(s_i) / sum of exp(s_j) over those."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.experts = torch.zeros(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        powers = logits.gather(1, self.experts).exp()
        return logits, powers / powers.sum(1, keepdim=True), self.experts


def told_log_probs(model: Any, record: Record) -> Tensor:
    """[R]; the last position has no record and nothing reads it, so that any experts do."""
    routed = record.routed_experts
    assert routed is not None
    whole = torch.from_numpy(np.concatenate([routed, routed[:1]]).astype("int64"))
    for layer, block in enumerate(model.model.layers):
        if not isinstance(block.mlp.gate, Told):
            block.mlp.gate = Told(block.mlp.gate.weight)
        block.mlp.gate.experts = whole[:, layer]
    return plain.log_probs(model, record)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.backend("CORE")
def test_experts_of_a_row_by_hand() -> None:
    """Two sequences, and the second has no record: each sequence's last position has none either."""
    a = make_record(0, [10, 11, 12], 1, [True, True], routed_experts=np.array([[[0, 1]], [[2, 3]]], np.int32))
    (row,) = pack([a, make_record(1, [20, 21], 1, [True])], 8)
    assert row_experts(row, [a, make_record(1, [20, 21], 1, [True])], 1, 2)[:, 0].tolist() == [
        [0, 1],
        [2, 3],
        [-1, -1],
        [-1, -1],
        [-1, -1],
    ]
    assert row_experts(EMPTY_ROW, [], 1, 2).tolist() == [[[-1, -1]]]


# --- passes -----------------------------------------------------------------------------------------------------------


def test_er_15_scoring_runs_the_recorded_experts_in_packed_rows(moe_model: Path) -> None:
    rank = connected(moe_model, max_tokens_per_gpu=64)
    records = routed_at_random(random_records(7))
    model = plain.load(moe_model)
    for record, values in zip(records, rank.log_probs(records), strict=True):
        assert values == pytest.approx(told_log_probs(model, record).detach().numpy(), abs=1e-5)
    # The frozen reference is another model: it routes by itself.
    free = connected(moe_model, replay=False, max_tokens_per_gpu=64).log_probs(records)
    for own, values in zip(free, rank.log_probs(records, "reference"), strict=True):
        assert values == pytest.approx(own, abs=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(free, rank.log_probs(records), strict=True)) > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_er_15_the_experts_are_handed_what_was_recorded(moe_model: Path, dtype: str) -> None:
    """Read where experts run, inside mixed precision: equal log-probs could also mean that no choice differed."""
    rank = connected(moe_model, dtype=dtype)
    (record,) = routed_at_random(random_records(1))
    assert record.routed_experts is not None
    handed: list[np.ndarray] = []
    for block in rank.model.model.layers:
        block.mlp.experts.register_forward_pre_hook(lambda _, args: handed.append(np.sort(args[1].numpy(), -1)))
    rank.log_probs([record])
    for layer in range(LAYERS):
        assert np.array_equal(handed[layer][:-1], np.sort(record.routed_experts[:, layer], -1))


def test_er_15_its_own_choices_replayed_change_nothing(moe_model: Path) -> None:
    records = routed_by(plain.load(moe_model), random_records(5))
    replayed = connected(moe_model, max_tokens_per_gpu=64).log_probs(records)
    for a, b in zip(replayed, connected(moe_model, replay=False).log_probs(records), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_er_16_an_updates_gradient_is_that_of_the_told_router(moe_model: Path) -> None:
    rank = connected(moe_model, lr=1e-30, max_grad_norm=1e9, max_tokens_per_gpu=64)
    records = routed_at_random(random_records(6))
    found: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        found.update({n: p.grad.full_tensor().clone() for n, p in rank.model.named_parameters()})  # type: ignore

    rank.optimizer.register_step_pre_hook(keep)
    stats = rank.train_update(with_advantages(records, "population"), 0, 0)

    model, terms = plain.load(moe_model), []
    for record, advantage in zip(records, [-1, 1] * 3, strict=True):
        ratio = (told_log_probs(model, record) - torch.from_numpy(record.generation_log_probs)).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        terms.append(loss[torch.from_numpy(record.loss_mask)])
    torch.cat(terms).mean().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for layer in range(LAYERS):
        for name in (f"model.layers.{layer}.mlp.gate.weight", f"model.layers.{layer}.mlp.experts.down_proj"):
            want = expected[name]
            assert want is not None and want.abs().max() > 1e-4 * largest
            assert (found[name] - want).abs().max() <= 1e-5 * largest, name
    positions = sum(len(r.token_ids) - 1 for r in records)
    assert (stats.replayed_positions, stats.fallback_positions) == (positions, 0)


def test_positions_without_a_record_fall_back_and_are_counted(moe_model: Path) -> None:
    """The first record has none at all; of the second two positions are missing."""
    rank = connected(moe_model, max_tokens_per_gpu=64)
    records = routed_by(plain.load(moe_model), random_records(4))
    records[0].routed_experts = None
    assert records[1].routed_experts is not None
    records[1].routed_experts[:2] = -1
    own = connected(moe_model, replay=False).log_probs(records)
    for a, b in zip(rank.log_probs(records), own, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    stats = rank.train_update(with_advantages(records, "population"), 0, 0)
    missing = len(records[0].token_ids) - 1 + 2
    assert stats.fallback_positions == missing
    assert stats.replayed_positions == sum(len(r.token_ids) - 1 for r in records) - missing


def test_without_replay_nothing_is_replayed_or_counted(moe_model: Path) -> None:
    rank = connected(moe_model, replay=False)
    stats = rank.train_update(with_advantages(routed_at_random(random_records(2)), "population"), 0, 0)
    assert (stats.replayed_positions, stats.fallback_positions) == (0, 0)


def test_qm_11_replay_narrows_the_gap_of_a_router_that_differs(moe_model: Path) -> None:
    """Generation and training differ in what their routers see, as two engines do, enough to change some choices."""
    records = random_records(8)
    engine = plain.load(moe_model)
    with torch.no_grad():
        for block in engine.model.layers:
            weight = block.mlp.gate.weight
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    generated = [plain.log_probs(engine, r).detach().numpy() for r in records]
    records = routed_by(engine, records)
    trainer = routed_by(plain.load(moe_model), records)
    differing = np.mean(
        [
            (np.sort(a.routed_experts, -1) != np.sort(b.routed_experts, -1)).any(-1).mean()  # type: ignore[arg-type]
            for a, b in zip(records, trainer, strict=True)
        ]
    )
    assert 0.005 < differing < 0.3

    def gap(replay: bool) -> float:
        """k3 estimate of KL(generation || trainer)."""
        found = connected(moe_model, replay=replay).log_probs(records)
        d = np.concatenate(generated) - np.concatenate(found)
        return float(np.mean(np.exp(-d) - 1 + d))

    assert 0 < gap(True) < gap(False)


def test_records_of_another_model_and_models_without_experts_are_refused(moe_model: Path, dense_model: Path) -> None:
    rank = connected(moe_model)
    (record,) = routed_at_random(random_records(1))
    assert record.routed_experts is not None
    wrong = replace(record, routed_experts=record.routed_experts[:, :1])
    with pytest.raises(RealError, match="trainer: trajectory 0: routed experts of 1 layers and top 2"):
        rank.log_probs([wrong])
    with pytest.raises(RealError, match="leave use_rollout_routing_replay off for dense models"):
        connected(dense_model)
