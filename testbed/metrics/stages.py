"""What the stages of a graph did: figures that runners write and reports read.

It refuses to know models, scenarios and how a stage is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from testbed.metrics.scores import Mean, Score, fifth, mean_of

STAGE = "stage.json"
"""In a stage's folder: its `StageResult`. There only when the stage is finished."""
STAGES = "stages.json"
"""In the folder of a graph: its `StagesResult`, as far as it is done."""
CHECKPOINTS = "checkpoints"
"""In the folder of a graph: one model folder per stage that trains, under the stage's name."""


class StageResult(Struct):
    """One finished stage."""

    name: str
    kind: str
    key: str
    """Digest of all that decides the result; the stage is not run again while it is the same."""
    model: str
    """What it started from."""
    teachers: list[str]
    checkpoint: str = ""
    """Model folder, relative to the graph's; empty: it trained nothing."""
    weights: str = ""
    """SHA-256 over the checkpoint's files."""
    inputs: dict[str, str] = {}
    """Model or teacher -> SHA-256 over its files, the same before and after the stage."""
    steps: int = 0
    """Optimizer steps (demonstrations) or batches (rewards, distillation)."""
    seconds: float = 0.0
    """Wall clock, from bringing up what it needs to the checkpoint."""
    first: Mean | None = None
    """Reward of the first fifth of the batches; the interval is over batches."""
    last: Mean | None = None
    first_kl: Mean | None = None
    """Distillation: KL(student || teacher) on the student's own tokens in the first fifth, nats; over batches."""
    last_kl: Mean | None = None
    answer_probability: float | None = None
    """Stages on demonstrations: that sampling gives exactly the held-out demonstration."""
    accuracy: float | None = None
    """Reward models: share of held-out pairs in the right order."""
    scores: list[Score] = []
    """Evaluations: over all tasks, then by kind."""
    note: str = ""
    kept: bool = False
    """It was finished before and is not run again."""


class StagePlan(Struct, frozen=True):
    """A stage of the graph, done or not."""

    name: str
    kind: str
    model: str
    teachers: dict[str, str]
    """Kind of task -> teacher; numbers as kinds where teachers take turns."""
    lineage: list[str]
    """Stages that trained its model, first to last."""
    reward_model: str = ""
    note: str = ""

    @property
    def reads(self) -> list[str]:
        """What is only read, each once."""
        return list(dict.fromkeys([*self.teachers.values(), *([self.reward_model] if self.reward_model else [])]))


class StagesResult(Struct):
    """All of a graph, as far as it is done."""

    name: str
    question: str
    command: str
    seed: int
    graph: list[StagePlan]
    results: list[StageResult]
    versions: dict[str, str] = {}


def fifths(values: Sequence[float]) -> tuple[Mean, Mean] | None:
    """Mean of the first and of the last fifth of a series; None if it is empty."""
    if not values:
        return None
    n = fifth(len(values))
    return mean_of(values[:n]), mean_of(values[-n:])


def read_stage(folder: Path) -> StageResult | None:
    """The finished stage of this folder; None if there is none, or another version's."""
    try:
        return msgspec.json.decode((folder / STAGE).read_bytes(), type=StageResult)
    except (OSError, msgspec.MsgspecError):
        return None


def write_result(path: Path, result: StageResult | StagesResult) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
