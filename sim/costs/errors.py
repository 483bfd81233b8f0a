"""Why a cost model can't answer for a scenario, and what would work instead."""

from __future__ import annotations


class CostModelError(ValueError):
    """The chosen source has no numbers for this model, GPU, split or precision. `nearest`: what it does have."""

    def __init__(self, message: str, nearest: str = "") -> None:
        super().__init__(f"{message}; nearest: {nearest}" if nearest else message)
        self.message = message
        self.nearest = nearest
