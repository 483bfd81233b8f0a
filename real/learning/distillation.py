"""On-policy distillation (OPD): what a teacher says about the tokens that the student chose, as a learning signal.

    signal_t = log p_teacher(y_t | P, y_<t) - log p_student(y_t | P, y_<t)

One sampled-token term of -KL(student || teacher), on the student's own tokens in the student's own contexts (Thinking
Machines, "On-Policy Distillation"; Miles' `--opd-kl-coef`). Responsible for the signal, for naming the contexts
in which a teacher read (a value of another one is refused) and for who teaches which sample. `advantages.combine` adds
the signal to task advantages. It refuses to know how teachers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from real.errors import RealError
from real.learning.ratios import context_digests
from real.records import Record, RecordError

TEACHER = "teacher_log_probs"
"""Name under `Record.extra` of the teacher's log p of each response token, [R]."""
CONTEXTS = "teacher_contexts"
"""Name under `Record.extra` of the contexts in which the teacher read them: `context_hashes`, [R] uint64."""


def teacher_signal(teacher: Tensor, student: Tensor) -> Tensor:
    """log p_teacher - log p_student of the same tokens in the same contexts, [K]; constant: no gradient in either.

    0.4 against the student's 0.2 is +0.693, the other way round -0.693. `student` is the policy before the update (old
    or generation log-probs); it stays what it was while the update moves the current one."""
    return teacher.detach() - student.detach()


def context_hashes(token_ids: NDArray[np.int32], prompt_tokens: int) -> NDArray[np.uint64]:
    """[R], one per response token: a digest of all ids up to it and with it, which is what log p(token | context)
    depends on. Ids that differ anywhere before give another digest from there on."""
    return context_digests(np.append(token_ids, 0))[prompt_tokens + 1 :]


def require_same_context(record: Record) -> None:
    """Raise `RecordError` unless the teacher's values are there and were computed on this record's ids, all of them."""
    who = f"trajectory {record.trajectory}"
    if TEACHER not in record.extra or CONTEXTS not in record.extra:
        raise RecordError(f"{who} has no teacher log-probs with their contexts, which distillation needs")
    here = context_hashes(record.token_ids, record.prompt_tokens)
    there = record.extra[CONTEXTS]
    if len(there) != len(here):
        raise RecordError(f"{who}: its teacher read {len(there)} response tokens, not {len(here)}")
    differs = np.flatnonzero(here != there)
    if len(differs):
        raise RecordError(
            f"{who}: its teacher read another context from response token {differs[0]} on; score the recorded ids again"
        )


def assigned_teacher(assignment: Mapping[str, str], kind: str, teachers: Sequence[str]) -> str:
    """The one teacher of a sample of this `kind` (task family, environment or source), out of `assignment`.

    Raises `RealError` if the kind has no teacher or its teacher does not exist: there is no silent default."""
    if kind not in assignment:
        known = ", ".join(sorted(assignment)) or "none"
        raise RealError(f"distillation: no teacher is assigned to {kind!r}; kinds with one: {known}")
    name = assignment[kind]
    if name not in teachers:
        known = ", ".join(teachers) or "none"
        raise RealError(f"distillation: {kind!r} is assigned to {name!r}, which is no teacher; teachers: {known}")
    return name
