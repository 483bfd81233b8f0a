"""What an update reports of teacher and critic, and what of it a batch's figures keep."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from real.learning.options import LIMITS, LossOptions
from real.records import Record
from real.trainer.options import SignalOptions
from real.trainer.rank import TrainerRank
from real.trainer.signals import teacher_values, with_advantages
from real.trainer.stats import CriticStats, StepStats, batch_figures, batch_ratios
from tests.real.trainer.conftest import make_record, random_records
from tests.real.trainer.test_roles import connected

DISTILLATION = SignalOptions("distillation")


def taught(student: list[float], teacher: list[float]) -> Record:
    """Three actor tokens with an observation in the middle that counts in nothing."""
    mask = [True, False, True, True]
    of_student, of_teacher = (
        np.array([p[0], -50.0, p[1], p[2]], np.float32)
        for p in ([math.log(x) for x in student], [math.log(x) for x in teacher])
    )
    record = make_record(0, [1, 2, 3, 4, 5], 1, mask, generation_log_probs=np.where(mask, of_student, 0).astype("f4"))
    record.extra |= teacher_values(record, of_teacher)
    return record


def test_op_02_the_distance_to_the_teacher_is_over_the_students_own_tokens(dense_model: Path) -> None:
    """The seeds' 0.2 against 0.4 and 0.4 against 0.2: -ln 2 and ln 2, and a third of 0.5 against 0.25."""
    record = taught([0.2, 0.4, 0.5], [0.4, 0.2, 0.25])
    stats = connected(dense_model).train_update(with_advantages([record], "population", DISTILLATION), 0, 0)
    assert stats.teacher_kl == pytest.approx(math.log(2) / 3, rel=1e-5)
    # k3 = q/p - 1 - ln(q/p) with p the student's
    k3 = [q / p - 1 - math.log(q / p) for p, q in ((0.2, 0.4), (0.4, 0.2), (0.5, 0.25))]
    assert stats.teacher_kl_k3 == pytest.approx(sum(k3) / 3, rel=1e-5)


def test_the_students_side_is_recomputed_where_it_was(dense_model: Path) -> None:
    record = taught([0.2, 0.4, 0.5], [0.4, 0.2, 0.25])
    record.old_log_probs = np.log(np.array([0.1, 1.0, 0.1, 0.1], np.float32))
    stats = connected(dense_model).train_update(with_advantages([record], "population", DISTILLATION), 0, 0)
    assert stats.teacher_kl == pytest.approx(sum(math.log(0.1 / q) for q in (0.4, 0.2, 0.25)) / 3, rel=1e-5)
    signal = with_advantages([record], "population", DISTILLATION)[0].extra["advantages"]
    assert stats.teacher_kl == pytest.approx(-signal[record.loss_mask].mean(), rel=1e-5), "the signal, sign turned"


def test_without_teachers_there_is_no_distance_to_one(dense_model: Path) -> None:
    rank = connected(dense_model)
    stats = rank.train_update(with_advantages(random_records(2), "population"), 0, 0)
    assert stats.teacher_kl is None and stats.teacher_kl_k3 is None
    mixed = [taught([0.2, 0.4, 0.5], [0.4, 0.2, 0.25]), make_record(1, [1, 2], 1, [True])]
    ready = with_advantages([replace(r, group=i) for i, r in enumerate(mixed)], "population")
    assert connected(dense_model, max_tokens_per_gpu=1).train_update(ready, 0, 0).teacher_kl == pytest.approx(
        math.log(2) / 3, rel=1e-5
    ), "over the tokens that have one"


STATS = StepStats(
    batch=0,
    update=0,
    loss=1.0,
    grad_norm=2.0,
    clip_share=0.1,
    mean_ratio=1.0,
    mismatch_kl=0.5,
    reference_kl=0.0,
    sequences=2,
    tokens=10,
    input_tokens=20,
    micro_batches=1,
    seconds=0.1,
)


@pytest.mark.backend("CORE")
def test_qm_03_a_batch_keeps_both_differences_apart_or_says_their_sum() -> None:
    apart = [replace(STATS, engine_kl=0.01, update_kl=x, grad_norm=g) for x, g in ((0.0, 2.0), (0.3, 4.0))]
    found = batch_figures([(s, None) for s in apart], LossOptions())
    assert found["engine_kl"] == pytest.approx(0.01) and found["update_kl"] == pytest.approx(0.15)
    assert found["grad_norm"] == 3.0 and "mismatch_kl" not in found
    together = batch_figures([(STATS, None)], LossOptions())
    assert together["mismatch_kl"] == 0.5 and not {"engine_kl", "update_kl"} & set(together)


@pytest.mark.backend("CORE")
@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (LossOptions(), {"clip_share", "effective_sample_size"}),
        (LossOptions(loss_type="policy_gradient"), set()),
        (LossOptions(loss_type="importance"), {"effective_sample_size"}),
        (LossOptions(denominator="recomputed"), {"clip_share"}),
        (
            LossOptions(denominator="decoupled", limits=LIMITS["tis"]),
            {"clip_share", "effective_sample_size", "truncated_share", "masked_share"},
        ),
        (LossOptions(kl_coef=0.1), {"clip_share", "effective_sample_size", "reference_kl"}),
    ],
)
def test_only_figures_that_mean_something_under_the_loss(loss: LossOptions, names: set[str]) -> None:
    assert set(batch_figures([(STATS, None)], loss)) == names | {"grad_norm", "mismatch_kl"}


@pytest.mark.backend("CORE")
def test_a_batch_has_the_critics_figures_and_the_share_of_positions_without_a_record() -> None:
    critic = CriticStats(0, 0, loss=0.2, grad_norm=1.0, clip_share=0.0, explained_variance=0.75, tokens=10, seconds=0.1)
    stats = replace(STATS, replayed_positions=30, fallback_positions=10)
    found = batch_figures([(stats, critic), (stats, replace(critic, explained_variance=0.25))], LossOptions())
    assert (found["value_loss"], found["value_grad_norm"]) == (pytest.approx(0.2), 1.0)
    assert found["explained_variance"] == 0.5 and found["fallback_share"] == 0.25


# --- histograms of ratios ---------------------------------------------------------------------------------------------


def apart(rank: TrainerRank, factors: list[list[float]]) -> list[Record]:
    """Records whose generation log-probs are those of this very actor, each token's divided by its factor."""
    records = random_records(len(factors))
    for record, now, row in zip(records, rank.log_probs(records), factors, strict=True):
        record.generation_log_probs = now.copy()
        of_actor = np.flatnonzero(record.loss_mask)
        shift = np.resize(np.array(row, np.float32), len(of_actor))
        record.generation_log_probs[of_actor] -= np.log(shift)
    return records


def test_rp_11_an_update_counts_its_tokens_by_ratio(dense_model: Path) -> None:
    """ln 1.2 lies in bin 27, -ln 2 in bin -31 (`tests/metrics/test_ratios.py`)."""
    rank = connected(dense_model)
    records = apart(rank, [[1.2], [0.5]])
    tokens = [int(r.loss_mask.sum()) for r in records]
    stats = rank.train_update(with_advantages(records, "population"), 0, 0)
    assert stats.ratio_counts == {-31: tokens[1], 27: tokens[0]}
    assert sum(stats.ratio_counts.values()) == stats.tokens
    assert stats.engine_ratio_counts == {}, "without recomputed log-probs the two differences are not known apart"


def test_rp_11_with_old_log_probs_the_engine_has_a_histogram_of_its_own(dense_model: Path) -> None:
    rank = connected(dense_model, loss=LossOptions(denominator="recomputed"), max_tokens_per_gpu=8)
    records = apart(rank, [[1.2], [2.0]])
    for record, old in zip(records, rank.log_probs(records), strict=True):
        record.old_log_probs = old
    tokens = [int(r.loss_mask.sum()) for r in records]
    stats = rank.train_update(with_advantages(records, "population"), 0, 0)
    assert stats.ratio_counts == {0: sum(tokens)}, "a batch's first update: the trainer is still what it was"
    assert stats.engine_ratio_counts == {27: tokens[0], 31: tokens[1]}


@pytest.mark.backend("CORE")
def test_rp_11_a_batch_has_the_tokens_of_all_its_updates() -> None:
    first = replace(STATS, ratio_counts={0: 8, 27: 2})
    assert batch_ratios([first, replace(STATS, ratio_counts={-31: 1, 0: 9})]) == {"ratio": {-31: 1, 0: 17, 27: 2}}
    known_apart = replace(first, engine_ratio_counts={0: 10})
    assert batch_ratios([known_apart, known_apart])["engine_ratio"] == {0: 20}


@pytest.mark.backend("CORE")
@pytest.mark.parametrize(
    ("loss", "clip"),
    [
        (LossOptions(), (0.8, 1.2)),
        (LossOptions(loss_type="gspo", eps_clip=0.0003, eps_clip_high=0.0004), (0.9997, 1.0004)),
        (LossOptions(loss_type="importance"), None),
    ],
)
def test_where_a_loss_clips(loss: LossOptions, clip: tuple[float, float] | None) -> None:
    assert loss.clip == (clip if clip is None else pytest.approx(clip))
