"""Fresh starts inside prepared dialogues: MOPD^2, multi-prefix multi-teacher on-policy distillation (MiMo-V2.6, 5.6).

Besides full rollouts from a prompt P, the student answers ONE turn from intermediate histories of a source dialogue (a
teacher's rollout, or SFT data):

    h1 = P + source turns 1, 2       ->  the student's own third turn y1
    h2 = P + source turns 1, 2, 3    ->  the student's own fourth turn y2

y1 is in no other history: starts depend on the source alone, and can run in any order or at once. To the rest of the
system a start is a task whose prompt is the history, so that source turns are context without loss, and starts of one
source share a long prefix. Knows ids only; turns are cut where the source says, never by reading text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from real.errors import RealError
from real.records import Record, RecordError


@dataclass(frozen=True)
class SourceDialogue:
    """A prompt and K turns that somebody else took. A turn is the output of one model call and the observation (tool
    result, user's next message, template) that followed it."""

    name: str
    prompt_ids: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]
    teacher: str
    """Scores what the student says from any history of this dialogue."""

    def __post_init__(self) -> None:
        if not self.teacher:
            raise RealError(f"source dialogue {self.name}: no teacher is assigned to it")
        if not self.prompt_ids or not self.turns or not all(self.turns):
            raise RealError(f"source dialogue {self.name}: it needs a prompt and turns that are not empty")


@dataclass(frozen=True)
class Start:
    """Where the student is to generate one turn (`source_turns` > 0), or a whole rollout (0)."""

    source: str
    source_turns: int
    token_ids: tuple[int, ...]
    """The history: prompt and the first `source_turns` turns of the source."""
    teacher: str

    def __str__(self) -> str:
        return f"{self.source} after {self.source_turns} source turns"

    @property
    def max_turns(self) -> int | None:
        """Model calls to make from here; None: as many as the task takes."""
        return 1 if self.source_turns else None


def dialogue_of(record: Record, name: str, teacher: str) -> SourceDialogue:
    """A recorded rollout (of a teacher) as a source; each turn keeps what followed it up to the next model call."""
    if not record.turns or record.turns[0][0] != 0:
        raise RecordError(f"trajectory {record.trajectory} has no turns that begin with its response")
    response = record.token_ids[record.prompt_tokens :]
    edges = [*(start for start, _ in record.turns), len(response)]
    turns = tuple(tuple(response[a:b].tolist()) for a, b in pairwise(edges))
    return SourceDialogue(name, tuple(record.token_ids[: record.prompt_tokens].tolist()), turns, teacher)


def dialogue_of_demonstration(ids: Sequence[int], trained: Sequence[bool], name: str, teacher: str) -> SourceDialogue:
    """Supervised data as a source: a turn begins with each run of trained tokens, and keeps what follows up to the next
    one; what is before the first is the prompt."""
    begins = [i for i, mine in enumerate(trained) if mine and (i == 0 or not trained[i - 1])]
    turns = tuple(tuple(ids[a:b]) for a, b in pairwise([*begins, len(ids)]))
    return SourceDialogue(name, tuple(ids[: begins[0] if begins else len(ids)]), turns, teacher)


def starts(source: SourceDialogue, after: Iterable[int] | None = None) -> list[Start]:
    """One start after each number of source turns in `after`; by default the full rollout (0) and every history that
    the source goes on from: K turns give 0 .. K - 1.

    Raises `RealError` for a history after which the source has no turn."""
    most = len(source.turns) - 1
    found = []
    for n in range(most + 1) if after is None else after:
        if not 0 <= n <= most:
            raise RealError(f"source dialogue {source.name}: a fresh turn can follow 0 to {most} of its turns, not {n}")
        history = source.prompt_ids + tuple(i for turn in source.turns[:n] for i in turn)
        found.append(Start(source.name, n, history, source.teacher))
    return found


def require_fresh_turn(record: Record, start: Start) -> Record:
    """The record as it is, if it is what the student made of `start`: its prompt is exactly the history, and from an
    intermediate history it made one call. Raises `RecordError` otherwise (a history with the student's own earlier
    turns in it is another start; a longer prompt lets source tokens carry loss or lose theirs)."""
    prompt = record.token_ids[: record.prompt_tokens]
    who = f"trajectory {record.trajectory}, from {start}"
    if not np.array_equal(prompt, np.asarray(start.token_ids)):
        raise RecordError(f"{who}: its prompt is not that history")
    if start.max_turns is not None and len(record.turns) > start.max_turns:
        raise RecordError(f"{who}: {len(record.turns)} turns where one was to be made")
    return record
