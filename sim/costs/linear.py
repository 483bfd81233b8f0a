"""Step times from five coefficients: decode = base + per_sequence n + per_context_token S, prefill = base + per_token
new.

For queueing checks with closed forms, and for engines whose coefficients are known. It refuses to know models and GPUs.
"""

from __future__ import annotations

from sim.costs.segments import Row, SegmentCosts, row_through
from testbed.scenario.run import LinearCosts


class LinearCostModel(SegmentCosts):
    """Raises `ValueError` if a decode step would take no time at all."""

    kind = "linear"

    def __init__(self, costs: LinearCosts) -> None:
        super().__init__()
        if costs.base_s + costs.per_sequence_s + costs.per_context_token_s <= 0:
            raise ValueError("a decode step must take time: set base_s, per_sequence_s or per_context_token_s above 0")
        self._c = costs

    def _row(self, batch: int) -> Row:
        c = self._c
        fixed = c.base_s + c.per_sequence_s * batch
        return row_through([(0.0, fixed), (1.0, fixed + c.per_context_token_s * batch)])

    def _prefill(self, new_tokens: int, attention: float, requests: int) -> tuple[float, bool]:
        return self._c.prefill_base_s + self._c.prefill_per_token_s * new_tokens, False
