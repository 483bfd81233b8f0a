"""A short supervised stage that teaches a model its environment's format, so that groups have mixed rewards.

Responsible for the loss on demonstrated tokens, the optimiser loop and its stopping rule. Refuses to know caches,
files and what the demonstrations say."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from real.environments.base import Demonstration

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

RAMP_STEPS, EVALUATE_EVERY, EVALUATED, HELD_OUT = 20, 5, 128, 1_000_003
"""Steps of linear learning-rate ramp; steps between readings; demonstrations of a reading; what is added to the seed
of the training stream for theirs."""


@dataclass(frozen=True)
class Warmup:
    """AdamW until the model would sample a demonstrated answer with probability `target` (mean over tasks), at most
    `steps` steps."""

    target: float = 0.45
    steps: int = 600
    batch_size: int = 64
    lr: float = 1e-3


@dataclass(frozen=True)
class WarmupResult:
    """`probability`: mean over tasks of the probability that sampling at temperature 1 gives exactly the
    demonstration; `accuracy`: share of its tokens that are the model's first choice; `loss` in nats per token."""

    steps: int
    loss: float
    accuracy: float
    probability: float
    seconds: float
    reached: bool


def token_log_probs(model: PreTrainedModel, batch: Sequence[Demonstration]) -> tuple[torch.Tensor, ...]:
    """(log p [B, T-1] of each next token, whether it is trained [B, T-1], whether it is the first choice [B, T-1]).

    Sequences are padded on the right, where a causal model cannot see the padding."""
    import torch

    device, length = model.device, max(len(d.ids) for d in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    trained = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, d in enumerate(batch):
        ids[row, : len(d.ids)] = torch.tensor(d.ids)
        trained[row, : len(d.ids)] = torch.tensor(d.trained)
    ids, trained = ids.to(device), trained.to(device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    target = ids[:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    return log_probs, trained[:, 1:], logits.argmax(-1) == target


def answer_loss(model: PreTrainedModel, batch: Sequence[Demonstration]) -> torch.Tensor:
    """Mean negative log-likelihood of the trained tokens alone; all others are context."""
    log_probs, trained, _ = token_log_probs(model, batch)
    return -(log_probs * trained).sum() / trained.sum()


def warm_up(
    model: PreTrainedModel, demonstrations: Iterator[Demonstration], held: Sequence[Demonstration], options: Warmup
) -> WarmupResult:
    """Train `model` in place on one thread, so that the same inputs give the same weights. `held`: the readings'
    demonstrations. They may occur in training too: this is practice, not a benchmark."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(model, demonstrations, held, options)
    finally:
        torch.set_num_threads(threads)


def _train(
    model: PreTrainedModel, demonstrations: Iterator[Demonstration], held: Sequence[Demonstration], options: Warmup
) -> WarmupResult:
    import torch

    started = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RAMP_STEPS))
    model.train()
    step = 0
    while True:
        if step % EVALUATE_EVERY == 0 or step == options.steps:
            loss, accuracy, probability = evaluate(model, held)
            log.info("warm-up step %d: loss %.3f, accuracy %.3f, answer %.3f", step, loss, accuracy, probability)
            reached = probability >= options.target
            if reached or step >= options.steps:
                break
        answer_loss(model, list(islice(demonstrations, options.batch_size))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ramp.step()
        step += 1
    model.eval()
    return WarmupResult(step, loss, accuracy, probability, time.monotonic() - started, reached)


def evaluate(model: PreTrainedModel, held: Sequence[Demonstration]) -> tuple[float, float, float]:
    """(loss, accuracy, probability) as in `WarmupResult`. P(demonstration) = exp(sum of log p of its trained
    tokens)."""
    import torch

    with torch.no_grad():
        log_probs, trained, first = token_log_probs(model, held)
    per_task = (log_probs * trained).sum(-1)
    count = trained.sum()
    return float(-per_task.sum() / count), float((first & trained).sum() / count), float(per_task.exp().mean())
