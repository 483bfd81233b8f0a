"""MOPD^2's data source: full rollouts of another environment, and single fresh turns from intermediate histories.

A start is a task whose prompt is a history and of which one model call is made, so that source turns are context
without loss, and members of its group share the history. Which tokens a history holds is `real.learning.prefixes`'
business. Refuses to know teachers: a start only has a kind, like any other task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from real.environments.base import (
    BLOCK_TOKENS,
    Demonstration,
    Environment,
    RealTask,
    ToolCall,
    TurnLimits,
    Who,
    prefix_blocks,
)
from real.environments.composed import Composed, Inner
from real.errors import RealError
from real.experience_files import read_records
from real.learning.prefixes import SourceDialogue, Start, dialogue_of, dialogue_of_demonstration, starts
from real.records import RecordError

_DRAW = 1
"""Third part of the generator's seed: the choice of a start does not repeat the mixture's choice of a part."""


@dataclass(frozen=True)
class Prepared:
    """A dialogue to start in; `whole`: the environment's own task that it solves, if it is one (then its last turn can
    be scored)."""

    dialogue: SourceDialogue
    whole: Inner | None = None


@dataclass(frozen=True)
class Begun:
    """Payload of a start."""

    start: Start
    turns_left: int
    """Of the source, from here on."""
    whole: Inner | None


class Prefixes(Composed):
    """Task i is with probability `full_share` the next task of `environment`, else a start: one of all histories of all
    `sources`, each with the same probability; (seed, i) decides. `after`: numbers of source turns, none: all.

    `limits_of` a kind: the environment whose limits a turn of that kind has. Raises `RealError` if no source has a
    history to start from."""

    def __init__(
        self,
        environment: Environment,
        sources: Sequence[Prepared],
        *,
        limits_of: Callable[[str], Environment],
        full_share: float,
        after: Sequence[int],
        seed: int,
        num_tasks: int | None,
    ) -> None:
        super().__init__(num_tasks)
        self._environment, self._limits_of = environment, limits_of
        self._seed, self._full_share = seed, full_share
        self._histories = [
            (source, n) for source in sources for n in range(1, len(source.dialogue.turns)) if not after or n in after
        ]
        if not self._histories and full_share < 1:
            most = max((len(s.dialogue.turns) for s in sources), default=0)
            raise RealError(
                f"prefixes: none of {len(sources)} source dialogues has a turn after "
                f"{' or '.join(map(str, after)) if after else 'an intermediate history'}; the longest has {most} "
                f"turn{'s' * (most != 1)}, so a fresh turn can follow {f'1 to {most - 1}' if most > 1 else 'none'} "
                "(nearest: full_share: 1, or sources with several turns)"
            )
        digest = hashlib.sha256(repr((environment.fingerprint, seed, num_tasks, full_share, tuple(after))).encode())
        for source in sources:
            digest.update(repr((source.dialogue.prompt_ids, source.dialogue.turns, source.dialogue.teacher)).encode())
        self.fingerprint = digest.hexdigest()[:16]
        self.kinds = dict(environment.kinds)
        self._scorers = {id(s.whole.environment): s.whole.environment for s in sources if s.whole is not None}

    def environments(self) -> Sequence[Environment]:
        return (self._environment, *self._scorers.values())

    async def open(self) -> None:
        await self._environment.open()  # the others only score last turns, and start their helpers when they do

    def make(self, index: int) -> RealTask | None:
        draw = np.random.default_rng((self._seed, index, _DRAW))
        if draw.random() < self._full_share:
            return self.adopt(index, self._environment)
        source, n = self._histories[int(draw.integers(len(self._histories)))]
        (start,) = starts(source.dialogue, [n])
        begun = Begun(start, len(source.dialogue.turns) - n, source.whole)
        ids = start.token_ids
        return RealTask(index, ids, prefix_blocks(ids), BLOCK_TOKENS, False, 0, begun, start.teacher)

    def demonstrations(self, seed: int) -> Iterator[Demonstration] | None:
        return self._environment.demonstrations(seed)

    def limits(self, task: RealTask, member: int, turn: int, context_tokens: int) -> TurnLimits:
        if not isinstance(begun := task.payload, Begun):
            return super().limits(task, member, turn, context_tokens)
        whole = begun.whole.task if begun.whole is not None else task
        return self._limits_of(task.kind).limits(whole, member, begun.start.source_turns + turn, context_tokens)

    def after_turn(self, task: RealTask, member: int, turn: int, output_ids: list[int]) -> ToolCall | None:
        if isinstance(task.payload, Begun):
            return None  # one fresh turn, whatever it asks for
        return super().after_turn(task, member, turn, output_ids)

    async def reward(
        self,
        task: RealTask,
        member: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        outputs: list[list[int]],
    ) -> float:
        """Raises `RealError` for a start in the middle of a dialogue: one turn of many is neither right nor wrong."""
        if not isinstance(begun := task.payload, Begun):
            return await super().reward(task, member, prompt_ids, response_ids, outputs)
        if begun.whole is None or begun.turns_left > 1:
            raise RealError(
                f"prefixes: {begun.start} is not the last turn of a task of this environment, and nothing else has a "
                "reward (nearest: algorithm.advantage: distillation)"
            )
        whole = begun.whole
        return await whole.environment.reward(whole.task, member, prompt_ids, response_ids, outputs)

    async def prepare(self, task: RealTask, who: Who) -> None:
        if not isinstance(task.payload, Begun):
            await super().prepare(task, who)

    async def release_member(self, task: RealTask, who: Who) -> None:
        if not isinstance(task.payload, Begun):
            await super().release_member(task, who)


def recorded(file: Path, kind: str, vocab_size: int) -> list[Prepared]:
    """Every rollout of a Parquet file of experience. Raises `RealError` for a file that is none, rollouts without
    turns, and ids that the policy does not have."""
    found = []
    for record in read_records(file):
        if int(record.token_ids.max()) >= vocab_size:
            raise RealError(
                f"{file}: trajectory {record.trajectory} has token id {record.token_ids.max()}, and this policy's "
                f"tokenizer ends at {vocab_size - 1} (nearest: rollouts of a model with the same tokenizer)"
            )
        try:
            found.append(Prepared(dialogue_of(record, f"{file.name}#{record.trajectory}", kind)))
        except RecordError as error:
            raise RealError(f"{file}: {error} (nearest: columns turn_starts and turn_ends)") from None
    if not found:
        raise RealError(f"{file}: it has no rollouts")
    return found


def demonstrated(environment: Environment, seed: int, n: int, kind: str | None) -> list[Prepared]:
    """The first `n` tasks of an environment made with `seed`, with their demonstrations; of `kind`, or each of its own.
    Raises `RealError` if it has none to show."""
    stream = environment.demonstrations(seed)
    if stream is None:
        raise RealError("prefixes: this environment shows no dialogues (nearest: a source with `file`)")
    return list(_paired(environment, islice(stream, n), kind))


def _paired(environment: Environment, shown: Iterable[Demonstration], kind: str | None) -> Iterator[Prepared]:
    for demonstration in shown:
        task = environment.draw()
        if task is None:
            return
        name = f"demonstration {task.index}"
        dialogue = dialogue_of_demonstration(demonstration.ids, demonstration.trained, name, kind or task.kind)
        yield Prepared(dialogue, Inner(environment, task))
