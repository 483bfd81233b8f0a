"""The pairs of precisions (`testbed.scenario.precisions`), asked for outside of a scenario file. Knows no rule."""

from __future__ import annotations

from real.errors import RealError
from testbed.scenario.precisions import ALLOWED, Pair, served_precisions, training_for, why_refused

__all__ = ["Pair", "pair_of"]


def pair_of(rollout: str, training: str) -> Pair:
    """The allowed pair. Raises `RealError` for any other, with the reason and what is allowed."""
    for pair in ALLOWED:
        if (pair.rollout, pair.training) == (rollout, training):
            return pair
    near = " or ".join(training_for(rollout))
    if not near:
        raise RealError(f"quantisation: no engine weights {rollout!r}; there are {', '.join(served_precisions())}")
    why = why_refused(rollout, training)
    raise RealError(f"quantisation: {rollout} engines with {training} training: {why}; {rollout} goes with {near}")
