"""What a critic learns. Pure functions of values: the model with the value head is the trainer's, and what its
predictions are good for is module `gae`.

V_t is the return expected in the context in which token t is about to be chosen (prompt and response tokens before t);
it is a number per position, where a teacher gives a distribution over next tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

VALUES = "values"
"""Name under `Record.extra` of V_t before the update, [R]."""
RETURNS = "returns"
"""Name under `Record.extra` of what V_t should have been, [R]."""


class ValueLoss(NamedTuple):
    """Both [K]; `loss` carries the gradient."""

    loss: Tensor
    clipped: Tensor
    """Bool: the value has moved so far that this token pushes it no further."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None = 0.2) -> ValueLoss:
    """max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) / 2 per token (OpenAI baselines' ppo2; described in arXiv
    2005.12729; c is Miles' `--value-clip`). `None` does not clip. G and V_old are constants; all [K]."""
    returns, old_values = returns.detach(), old_values.detach()
    free = (values - returns).square()
    if value_clip is None:
        return ValueLoss(free / 2, torch.zeros_like(free, dtype=torch.bool))
    held = (old_values + (values - old_values).clamp(-value_clip, value_clip) - returns).square()
    return ValueLoss(torch.maximum(free, held) / 2, held > free)
