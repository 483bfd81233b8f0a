"""A reward model made of a causal model: a value head on top, trained on right and wrong responses of an environment.

Responsible for the pairs, the optimiser loop and the folder that the trainer's reward model role loads. The number at a
sequence's last token is its reward. Refuses to know what the environment asks and how its answers are verified: it
learns from demonstrations."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from real.environments.base import Demonstration, Environment
from real.errors import RealError
from real.learning.reward_model import preference_loss
from real.models.prepare import check_model
from real.models.warmup import HELD_OUT, RAMP_STEPS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a prompt with a right response, and of the same prompt with a wrong one."""


@dataclass(frozen=True)
class RewardTraining:
    """AdamW for `steps` steps of `batch_size` pairs; `evaluated` pairs of another seed are read afterwards."""

    steps: int = 200
    batch_size: int = 32
    lr: float = 1e-3
    seed: int = 0
    evaluated: int = 256

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "lr", "evaluated"):
            if getattr(self, name) <= 0:
                raise RealError(f"reward model: {name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True)
class RewardFit:
    """On pairs of a seed that training did not see (tasks may recur): `accuracy` is the share in which the right
    response got the higher reward (0.5 is chance), `loss` in nats per pair (ln 2 is chance)."""

    steps: int
    accuracy: float
    loss: float
    seconds: float


def train_reward_model(
    folder_in: str | Path, folder_out: str | Path, environment: Environment, options: RewardTraining | None = None
) -> RewardFit:
    """Train a copy of the model in `folder_in` (causal, or a reward model to go on with) and write it to `folder_out`
    with its tokenizer; the same inputs give the same weights on one thread.

    Raises `RealError` for a folder that is no model or exists already, and for an environment that shows no answers."""
    import torch

    options = options or RewardTraining()
    source, target = Path(folder_in), Path(folder_out)
    check_model(str(source))
    if target.exists():
        raise RealError(f"reward model: {target} exists already; nothing is written over")
    seen, held = (pairs(environment, options.seed + apart) for apart in (0, HELD_OUT))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = load(source)
        fit = _train(model, seen, list(islice(held, options.evaluated)), options)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(target)
    for file in source.glob("*token*"):
        shutil.copy(file, target)
    (target / "reward_model.json").write_text(json.dumps({**asdict(options), **asdict(fit)}, indent=2) + "\n")
    return fit


def pairs(environment: Environment, seed: int) -> Iterator[Pair]:
    """Endless, the same for the same seed. Wrong is, in turns, the response to another task, or the right one with one
    of the actor's tokens replaced by one of another response. Where many responses are right, some of these are too."""
    demonstrations = environment.demonstrations(seed)
    if demonstrations is None:
        raise RealError("reward model: this environment has no answers to show (nearest: arithmetic or calculator)")
    rng, swap = np.random.default_rng(seed), True
    while True:
        mine, other = islice(demonstrations, 2)
        wrong = _swapped(mine, other) if swap else _replaced(mine, other, rng)
        if wrong != mine.ids:
            swap = not swap
            yield mine.ids, wrong


def _swapped(mine: Demonstration, other: Demonstration) -> tuple[int, ...]:
    return mine.ids[: mine.trained.index(True)] + other.ids[other.trained.index(True) :]


def _replaced(mine: Demonstration, other: Demonstration, rng: np.random.Generator) -> tuple[int, ...]:
    at = int(rng.choice(np.flatnonzero(mine.trained)))
    by = other.ids[int(rng.choice(np.flatnonzero(other.trained)))]
    return (*mine.ids[:at], by, *mine.ids[at + 1 :])


def load(folder: Path) -> PreTrainedModel:
    """With a value head that says 0 everywhere if the folder has none."""
    import torch
    from transformers import AutoModelForTokenClassification

    model, info = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, num_labels=1, output_loading_info=True
    )
    if "score.weight" in info["missing_keys"]:
        torch.nn.init.zeros_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
    return model.eval()


def rewards(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """[N]: the value at each sequence's last token. They are padded on the right, which a causal model cannot see."""
    import torch

    ends = torch.tensor([len(s) - 1 for s in sequences])
    ids = torch.zeros(len(sequences), int(ends.max()) + 1, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    values = model(input_ids=ids.to(model.device), use_cache=False).logits[..., 0].float()
    return values[torch.arange(len(sequences)), ends]


def pair_rewards(model: PreTrainedModel, batch: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] of the right responses, [N] of the wrong ones)."""
    both = rewards(model, [s for pair in batch for s in pair])
    return both[::2], both[1::2]


def _train(model: PreTrainedModel, seen: Iterator[Pair], held: Sequence[Pair], options: RewardTraining) -> RewardFit:
    import torch

    started = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RAMP_STEPS))
    for _ in range(options.steps):
        preference_loss(*pair_rewards(model, list(islice(seen, options.batch_size)))).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ramp.step()
    with torch.no_grad():
        right, wrong = pair_rewards(model, held)
    accuracy, loss = float((right > wrong).float().mean()), float(preference_loss(right, wrong).mean())
    return RewardFit(options.steps, accuracy, loss, time.monotonic() - started)
