"""What a model gets on held-out tasks: a mean with its interval. Refuses to know how tasks are answered."""

from __future__ import annotations

from msgspec import Struct


class Mean(Struct, frozen=True):
    """A mean of `n` values and its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int


class Score(Struct, frozen=True):
    """What a model gets on held-out tasks of one kind (empty: of all kinds)."""

    kind: str
    reward: Mean
    kl: float | None = None
    """Mean over its sampled tokens of log p(model) - log p(teacher), nats; None: no teacher was read."""
