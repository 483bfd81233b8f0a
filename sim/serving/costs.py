"""Step times of a server whose steps may compute prompts and replies together.

It refuses to know requests and clocks.
"""

from __future__ import annotations

from sim.costs.measured import TableCostModel


class StepCosts(TableCostModel):
    """A table of kernel times, with overheads."""

    def step_time(self, new_tokens: int, attention: float, prompts: int, batch: int, context: int) -> float:
        """A step that computes `new_tokens` of prompts and one token for each of `batch` sequences."""
        if not batch:
            return self.prefill_time(new_tokens, attention, prompts)
        return self.mixed_time(new_tokens, attention, prompts + batch, batch, context)
