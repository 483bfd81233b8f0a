"""From a batch's rewards, values and teacher log-probs to the advantage of each token (and the return of each, which a
critic is trained on). Records are copied, token arrays shared. Knows no rank and no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from real.learning.advantages import combine, group_advantages
from real.learning.critic import RETURNS, VALUES
from real.learning.distillation import CONTEXTS, TEACHER, context_hashes, require_same_context, teacher_signal
from real.learning.gae import gae
from real.learning.options import AdvantageStd
from real.records import Record, RecordError
from real.trainer.options import SignalOptions

ADVANTAGES = "advantages"
"""Name under `Record.extra` of the advantage of each response token, [R]; 0 where it carries no loss."""
TeacherValues = dict[str, NDArray[Any]]
"""Entries for `Record.extra`: `teacher_log_probs` [R] float32 and `teacher_contexts` [R] uint64."""


def with_advantages(records: Sequence[Record], std: AdvantageStd, signals: SignalOptions | None = None) -> list[Record]:
    """Copies of `records` with `extra["advantages"]` [R]. By `signals.advantage`:

    group                     the response's reward relative to its group's (not its task's: two groups of one task
                              are two comparisons), the same on each of its actor tokens
    critic                    generalised advantage estimation from `extra["values"]`
    distillation              opd_kl_coef * (log p_teacher - log p_student) per token; rewards are not read
    group_with_distillation   the first plus the third

    Raises `RecordError` for an aborted or failed response, which has no reward and must not enter a group's mean, and
    where values or a teacher's log-probs are missing or were computed on other ids."""
    signals = signals or SignalOptions()
    _require_ended(records)
    if signals.advantage == "critic":
        return [_with(r, ADVANTAGES, _gae(r, signals)[0]) for r in records]
    grouped = [torch.zeros(())] * len(records)
    if signals.advantage != "distillation":
        for members in _groups(records):
            rewards = torch.tensor([records[i].reward for i in members], dtype=torch.float64)
            for i, value in zip(members, group_advantages(rewards, std), strict=True):
                grouped[i] = value
    if signals.advantage == "group":
        return [_with(r, ADVANTAGES, a) for r, a in zip(records, grouped, strict=True)]
    return [
        _with(r, ADVANTAGES, combine(a, _teacher_signal(r), signals.opd_kl_coef))
        for r, a in zip(records, grouped, strict=True)
    ]


def with_returns(records: Sequence[Record], signals: SignalOptions) -> list[Record]:
    """Copies of `records` with `extra["returns"]` [R]: what `extra["values"]` should have been, value + advantage."""
    _require_ended(records)
    return [_with(r, RETURNS, _gae(r, signals)[1]) for r in records]


def teacher_values(record: Record, log_probs: NDArray[np.float32]) -> TeacherValues:
    """A teacher's `log_probs` [R] of this record's ids, with the contexts it read."""
    return {TEACHER: log_probs, CONTEXTS: context_hashes(record.token_ids, record.prompt_tokens)}


def _teacher_signal(record: Record) -> Tensor:
    """[R]. The student's side is its log-probs before the update: the trainer's own where they were recomputed, so that
    the two engines' difference is no signal; else those of generation."""
    require_same_context(record)
    student = record.generation_log_probs if record.old_log_probs is None else record.old_log_probs
    return teacher_signal(torch.from_numpy(record.extra[TEACHER]), torch.from_numpy(student))


def _gae(record: Record, signals: SignalOptions) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [R]: one reward, earned with the last choice."""
    if VALUES not in record.extra:
        raise RecordError(f"trajectory {record.trajectory} has no critic values, which advantage critic needs")
    mask = torch.from_numpy(record.loss_mask)
    rewards = torch.zeros(record.response_tokens)
    if mask.any():
        rewards[-1] = record.reward
    return gae(rewards, torch.from_numpy(record.extra[VALUES]), mask, signals.gamma, signals.lambd)


def _require_ended(records: Sequence[Record]) -> None:
    for record in records:
        if record.finish_reason in ("aborted", "failed"):
            raise RecordError(
                f"trajectory {record.trajectory} {record.finish_reason}: it cannot be compared or trained"
            )


def _groups(records: Sequence[Record]) -> Iterator[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        groups.setdefault(record.group, []).append(i)
    yield from groups.values()


def _with(record: Record, name: str, values: Tensor) -> Record:
    """`values` [R], or one for all, where the record carries loss."""
    masked = np.where(record.loss_mask, values.numpy(), 0).astype(np.float32)
    return replace(record, extra={**record.extra, name: masked})
