"""How long a prompt takes, as a router guesses it: two rates of the scenario. Refuses to know engines."""

from __future__ import annotations


class PrefillEstimate:
    """T_prefill(n, c) = (n - c) / tokens_per_s + (n - c) (c + (n - c) / 2) / pairs_per_s for a prompt of n tokens of
    which c are cached; without `pairs_per_s` the first term alone. Seconds."""

    __slots__ = ("_per_pair", "_per_token")

    def __init__(self, tokens_per_s: float, pairs_per_s: float | None = None) -> None:
        self._per_token = 1.0 / tokens_per_s
        self._per_pair = 1.0 / pairs_per_s if pairs_per_s is not None else 0.0

    def seconds(self, prompt: int, cached: int) -> float:
        new = prompt - cached
        return new * (self._per_token + (cached + 0.5 * new) * self._per_pair)
