"""A teacher's signal on the student's own path: the seeds' numbers, contexts by name, and who teaches whom."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from real.errors import RealError
from real.learning.distillation import (
    assigned_teacher,
    context_hashes,
    require_same_context,
    teacher_signal,
)
from real.records import Record, RecordError
from real.trainer.options import SignalOptions
from real.trainer.signals import teacher_values, with_advantages
from tests.real.trainer.conftest import make_record

P, U, A, B, C, D = [11, 12], 1, 2, 3, 4, 5
STUDENT, TEACHER = [0.5, 0.2, 0.4], [0.5, 0.4, 0.2]
"""Of u, b and d in the contexts P, P+u and P+u+b."""
LN2 = math.log(2)


def ids(*tokens: int) -> np.ndarray:
    return np.array([*P, *tokens], dtype=np.int32)


def path(reward: float = 0.0, trajectory: int = 0, mask: tuple[bool, ...] = (True,) * 3) -> Record:
    """The student's u, b, d, with what the teacher said about it."""
    generated = np.where(mask, np.log(STUDENT), 0).astype(np.float32)
    record = make_record(
        trajectory, ids(U, B, D).tolist(), 2, list(mask), reward=reward, generation_log_probs=generated, group=0
    )
    record.extra |= teacher_values(record, np.log(TEACHER).astype(np.float32))
    return record


def test_op_02_the_signal_of_b_and_of_d() -> None:
    teacher, student = (torch.tensor(p, dtype=torch.float64).log() for p in (TEACHER, STUDENT))
    assert teacher_signal(teacher, student).tolist() == pytest.approx([0, 0.693147, -0.693147], abs=1e-6)


def test_op_04_the_signal_is_fixed_for_the_update() -> None:
    teacher, student = (torch.tensor(p).log().requires_grad_() for p in (TEACHER, STUDENT))
    assert not teacher_signal(teacher, student).requires_grad
    # The current policy moves between the updates of a batch; what the signal is made of does not.
    (first,) = with_advantages([path()], "population", SignalOptions("distillation"))
    (second,) = with_advantages([path()], "population", SignalOptions("distillation"))
    assert np.array_equal(first.extra["advantages"], second.extra["advantages"])


def test_op_02_recomputed_log_probs_keep_the_engine_difference_out_of_the_signal() -> None:
    record = path()
    record.old_log_probs = np.log([0.5, 0.1, 0.4]).astype(np.float32)
    (ready,) = with_advantages([record], "population", SignalOptions("distillation"))
    assert ready.extra["advantages"].tolist() == pytest.approx([0, 2 * LN2, -LN2])


def test_op_05_added_to_a_task_advantage() -> None:
    """Rewards 1 and 0 are advantages +1 and -1."""
    won, lost = with_advantages([path(1.0, 0), path(0.0, 1)], "population", SignalOptions("group_with_distillation"))
    assert won.extra["advantages"].tolist() == pytest.approx([1, 1.693147, 0.306853], abs=1e-5)
    assert lost.extra["advantages"].tolist() == pytest.approx([-1, -0.306853, -1.693147], abs=1e-5)
    half = with_advantages(
        [path(1.0, 0), path(0.0, 1)], "population", SignalOptions("group_with_distillation", opd_kl_coef=0.5)
    )
    assert half[0].extra["advantages"][1] == pytest.approx(1 + LN2 / 2)


@pytest.mark.parametrize("reward", [0.0, 1.0, math.nan])
def test_op_05_used_alone_no_reward_is_read(reward: float) -> None:
    (ready,) = with_advantages([path(reward)], "population", SignalOptions("distillation"))
    assert ready.extra["advantages"].tolist() == pytest.approx([0, LN2, -LN2])


def test_op_13_observations_carry_no_signal() -> None:
    (ready,) = with_advantages([path(mask=(True, False, True))], "population", SignalOptions("distillation"))
    assert ready.extra["advantages"].tolist() == pytest.approx([0, 0, -LN2])


def test_op_06_eight_failures_have_no_group_signal_and_one_success_gives_one() -> None:
    def advantages(rewards: list[float], signals: SignalOptions) -> list[list[float]]:
        records = [path(r, i) for i, r in enumerate(rewards)]
        return [r.extra["advantages"].tolist() for r in with_advantages(records, "population", signals)]

    group = SignalOptions("group")
    assert advantages([0.0] * 8, group) == [[0, 0, 0]] * 8
    mixed = advantages([1.0] + [0.0] * 7, group)
    assert mixed[0] == pytest.approx([2.6458] * 3, abs=1e-4)
    assert all(a == pytest.approx([-0.37796] * 3, abs=1e-4) for a in mixed[1:])
    # No group signal is not no signal: the same eight failures teach through a teacher.
    assert advantages([0.0] * 8, SignalOptions("group_with_distillation"))[3] == pytest.approx([0, LN2, -LN2])


def test_op_01_the_third_context_follows_the_students_path() -> None:
    def name(*tokens: int) -> int:
        return int.from_bytes(
            hashlib.blake2b(np.array([*P, *tokens], "<i8").tobytes(), digest_size=8).digest(), "little"
        )

    student, answer = context_hashes(ids(U, B, D), 2), context_hashes(ids(U, A, C), 2)
    assert student.tolist() == [name(U), name(U, B), name(U, B, D)]
    assert answer.tolist() == [name(U), name(U, A), name(U, A, C)]
    assert (student == answer).tolist() == [True, False, False]


def test_op_03_the_teacher_reads_exactly_the_students_ids() -> None:
    require_same_context(path())
    drifted = path()  # one id of the prompt is another token, as after a round trip through text
    drifted.token_ids[0] += 1
    with pytest.raises(RecordError, match="trajectory 0: its teacher read another context from response token 0 on"):
        require_same_context(drifted)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_er_11_values_of_another_context_are_refused_though_they_are_there(at: int) -> None:
    record = path()
    record.token_ids[2 + at] += 50
    with pytest.raises(RecordError, match=f"another context from response token {at} on"):
        with_advantages([record], "population", SignalOptions("group_with_distillation"))


def test_er_11_values_without_their_context_are_refused() -> None:
    record = path()
    del record.extra["teacher_contexts"]
    with pytest.raises(RecordError, match="no teacher log-probs with their contexts"):
        with_advantages([record], "population", SignalOptions("distillation"))
    longer = path()
    longer.extra["teacher_contexts"] = longer.extra["teacher_contexts"][:2]
    with pytest.raises(RecordError, match="its teacher read 2 response tokens, not 3"):
        require_same_context(longer)


def test_op_12_a_sample_without_a_teacher_is_an_error() -> None:
    assignment, teachers = {"math": "a", "code": "b", "chat": "c"}, ("a", "b")
    assert [assigned_teacher(assignment, kind, teachers) for kind in ("math", "code")] == ["a", "b"]
    with pytest.raises(RealError, match="no teacher is assigned to 'law'; kinds with one: chat, code, math"):
        assigned_teacher(assignment, "law", teachers)
    with pytest.raises(RealError, match="'chat' is assigned to 'c', which is no teacher; teachers: a, b"):
        assigned_teacher(assignment, "chat", teachers)


def test_signal_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(RealError, match="advantage is 'opd'; it can be group, critic, distillation"):
        SignalOptions("opd")  # type: ignore[arg-type]
    with pytest.raises(RealError, match=r"lambd is 1\.5; it must be from 0 to 1"):
        SignalOptions(lambd=1.5)
    with pytest.raises(RealError, match="opd_kl_coef is 0; it must be above 0"):
        SignalOptions(opd_kl_coef=0)
