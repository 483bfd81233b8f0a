"""Corrections in a whole update: what is measured stays what it is, whatever the loss does about it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from real.learning.options import LIMITS, LossOptions, WeightLimits
from real.records import Record
from real.trainer.rank import TrainerRank
from real.trainer.stats import StepStats
from tests.real.trainer import plain
from tests.real.trainer.conftest import make_record, random_records
from tests.real.trainer.test_rank import STILL, connected, ready

GAP = math.log(1.04)


def scored(rank: TrainerRank, records: list[Record], gap: float = GAP) -> list[Record]:
    """Old log-probs are the trainer's, generation log-probs those of an engine that is lower by `gap` everywhere."""
    for record, values in zip(records, rank.log_probs(records), strict=True):
        record.old_log_probs = values
        record.generation_log_probs = np.where(record.loss_mask, values - np.float32(gap), 0).astype(np.float32)
    return ready(records)


def one_update(folder: Path, records: list[Record], **loss: Any) -> StepStats:
    rank = connected(folder, loss=LossOptions(**loss), **STILL)
    return rank.train_update(scored(rank, records), 0, 0)


def test_qm_14_and_qm_01_staleness_zero_has_an_engine_gap_and_an_update_adds_its_own(dense_model: Path) -> None:
    rank = connected(dense_model, lr=1e-3, loss=LossOptions(denominator="decoupled"))
    records = scored(rank, random_records(4))
    first = rank.train_update(records, 0, 0)
    assert first.engine_log_ratio == pytest.approx(0.0392, abs=5e-5)
    assert first.engine_kl == pytest.approx(math.exp(GAP) - 1 - GAP, rel=1e-2)
    assert first.update_log_ratio == pytest.approx(0, abs=1e-6)
    assert first.update_kl == pytest.approx(0, abs=1e-6)
    now = rank.log_probs(records)
    moved = np.concatenate([(v - r.old_log_probs)[r.loss_mask] for v, r in zip(now, records, strict=True)])
    second = rank.train_update(records, 0, 1)
    assert second.engine_log_ratio == pytest.approx(first.engine_log_ratio)
    assert second.engine_kl == pytest.approx(first.engine_kl)
    assert second.update_log_ratio == pytest.approx(float(moved.mean()), abs=1e-6)
    assert second.update_kl is not None and second.update_kl > 1e-4


def test_qm_03_and_qm_04_correcting_and_limiting_leave_the_measured_gap(dense_model: Path) -> None:
    records = random_records(4)
    wide = WeightLimits("truncate", "token", (0.0, 1.02))
    none = one_update(dense_model, records, denominator="recomputed")
    corrected = one_update(dense_model, records, denominator="decoupled")
    limited = one_update(dense_model, records, denominator="decoupled", limits=wide)
    masked = one_update(dense_model, records, denominator="recomputed", limits=replace(wide, action="mask"))
    for stats in (none, corrected, limited, masked):
        assert stats.engine_log_ratio == pytest.approx(GAP, abs=1e-5)
    # A weight on every token: 1, 1.04, 1.02, 0.
    assert corrected.grad_norm / none.grad_norm == pytest.approx(1.04, rel=1e-5)
    assert limited.grad_norm / none.grad_norm == pytest.approx(1.02, rel=1e-5)
    assert masked.grad_norm == 0
    assert [s.truncated_share for s in (none, corrected, limited, masked)] == [0, 0, 1, 0]
    assert [s.masked_share for s in (none, corrected, limited, masked)] == [0, 0, 0, 1]
    assert [s.effective_sample_size for s in (none, corrected, limited, masked)] == pytest.approx([1, 1, 1, 0])


def test_qm_12_sequences_are_told_apart_inside_a_micro_batch(dense_model: Path) -> None:
    """Two sequences in one row; the engine of one is far off on the mean, so it is masked and the other stays: two
    actor tokens of seven. Denominators keep all seven."""
    rank = connected(dense_model, loss=LossOptions(denominator="decoupled", limits=LIMITS["seq_mask_tis"]), **STILL)
    records = scored(rank, [make_record(0, [1, 2, 3], 1, [True] * 2), make_record(1, range(10, 16), 1, [True] * 5)], 0)
    records[1].generation_log_probs = records[1].generation_log_probs - np.float32(0.02)
    stats = rank.train_update(records, 0, 0)
    assert stats.micro_batches == 1
    assert stats.masked_share == pytest.approx(5 / 7)
    assert stats.effective_sample_size == pytest.approx(2 / 7, rel=1e-5)
    # Ratio 1 and weight 1 on two tokens of advantage -1, over seven.
    assert stats.loss == pytest.approx(2 / 7, rel=1e-5)


def test_qm_12_normalised_weights_are_those_of_the_whole_update(dense_model: Path) -> None:
    """Each record in a micro-batch of its own, with weights 1 and 3: 0.5 and 1.5 by their common mean."""
    limits = WeightLimits(normalise=True)
    rank = connected(
        dense_model, max_tokens_per_gpu=1, loss=LossOptions(denominator="decoupled", limits=limits), **STILL
    )
    records = scored(rank, [make_record(i, [1, 2, 3 + i], 1, [True] * 2) for i in range(2)], 0)
    records[1].generation_log_probs = records[1].generation_log_probs - np.float32(math.log(3))
    stats = rank.train_update(records, 0, 0)
    assert stats.micro_batches == 2
    assert stats.loss == pytest.approx((2 * 0.5 * 1 + 2 * 1.5 * -1) / 4, rel=1e-5)  # advantages -1 and +1
    assert stats.effective_sample_size == pytest.approx((0.5 + 1.5) ** 2 / (2 * (0.25 + 2.25)), rel=1e-5)


def test_gspo_in_a_micro_batch_is_the_written_out_sequence_ratio(dense_model: Path) -> None:
    records = ready(random_records(4))
    options = LossOptions(loss_type="gspo", aggregation="seq-mean-token-mean", eps_clip=1.0, eps_clip_high=1e6)
    rank = connected(dense_model, max_tokens_per_gpu=10_000, loss=options, **STILL)
    found = rank.train_update(records, 0, 0)
    model, terms = plain.load(dense_model), []
    for record, advantage in zip(records, [-1, 1] * 2, strict=True):
        mask = torch.from_numpy(record.loss_mask)
        log_ratio = (plain.log_probs(model, record) - torch.from_numpy(record.generation_log_probs))[mask]
        terms.append(-advantage * log_ratio.mean().exp())
    loss = torch.stack(terms).mean()
    loss.backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert (found.loss, found.grad_norm) == pytest.approx((loss.item(), norm), rel=1e-5)


def test_rollout_mean_joins_the_records_of_a_trajectory(dense_model: Path) -> None:
    """Trajectory 0 came in two records (2 and 4 actor tokens), trajectory 1 in one; all ratios are 1."""
    rank = connected(dense_model, loss=LossOptions(aggregation="rollout-mean"), **STILL)
    parts = [
        make_record(0, [1, 2, 3], 1, [True] * 2),
        make_record(0, [1, 2, 3, 4, 5], 1, [True] * 4),
        make_record(1, [1, 2], 1, [True]),
    ]
    records = scored(rank, parts, 0)
    for record, value in zip(records, (3.0, -2.0, 5.0), strict=True):
        record.extra["advantages"] = np.full(record.response_tokens, value, np.float32)
    expected = -((2 * 3.0 + 4 * -2.0) / 6 + 5.0) / 2
    assert rank.train_update(records, 0, 0).loss == pytest.approx(expected, rel=1e-5)


def test_without_old_log_probs_the_two_differences_are_not_told_apart(dense_model: Path) -> None:
    stats = connected(dense_model, **STILL).train_update(ready(random_records(2)), 0, 0)
    assert (stats.engine_log_ratio, stats.engine_kl, stats.update_log_ratio, stats.update_kl) == (None,) * 4
