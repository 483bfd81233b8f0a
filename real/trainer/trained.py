"""A model and the optimizer that moves it: the actor, and the critic where there is one. Knows no loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from real.trainer import checkpoint
from real.trainer.model import gather
from real.trainer.options import TrainerOptions


class TrainedModel:
    """`folder` is where the model's configuration and tokenizer came from: a checkpoint carries them on."""

    def __init__(self, model: PreTrainedModel, folder: Path, options: TrainerOptions, lr: float) -> None:
        self.model, self.folder, self._options = model, folder, options
        o = options
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
        )

    def step(self) -> float:
        """Clip the gradients by their norm over all ranks' shards, update, and drop them. Returns the norm before
        clipping; if it is not finite nothing is updated."""
        parameters = list(self.model.parameters())
        norm = gather(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        grad_norm = float(norm)
        if math.isfinite(grad_norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self._options.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return grad_norm

    def tensors(self) -> Iterator[Tensor]:
        """All that it keeps on its device: parameters and optimizer state."""
        yield from (p.detach() for p in self.model.parameters())
        yield from (v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor))

    def write(self, folder: Path, *, writer: bool) -> None:
        """Collective."""
        checkpoint.write_weights(self.model, self.folder, folder, self._options.dtype, writer=writer)
        checkpoint.write_optimizer(self.model, self.optimizer, folder, writer=writer)
