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
from real.trainer.signals import teacher_values, with_advantages
from real.trainer.stats import CriticStats, StepStats, batch_figures
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
