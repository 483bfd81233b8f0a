"""Which precision of the training forward goes with which precision of the engines' weights, and why. Data: Miles'
documented matrix, the seeds' two configurations, and what FlashRL and Miles' INT4 training add. Knows no rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from real.errors import RealError


@dataclass(frozen=True)
class Pair:
    rollout: str
    """Engine weights."""
    training: str
    """Training forward."""
    reason: str
    shared: bool
    """Both sides compute with the same values (configuration A); if not, a difference remains to be corrected."""


def _shared(precision: str, reason: str) -> Pair:
    return Pair(precision, precision, reason, True)


def _mixed(rollout: str, reason: str) -> Pair:
    return Pair(rollout, "bf16", reason, False)


ALLOWED: tuple[Pair, ...] = (
    _shared("bf16", "one precision throughout (Miles' matrix)"),
    _shared("fp16", "one precision throughout"),
    _shared("fp32", "one precision throughout"),
    _mixed("fp8", "Miles' matrix: cheaper inference, the difference is corrected by probability ratios"),
    _shared("fp8", "Miles' matrix: the same 128 x 128 blocks on both sides"),
    _mixed("mxfp8", "Miles' matrix: cheaper inference, the difference is corrected by probability ratios"),
    _shared("mxfp8", "Miles' matrix: the same 1 x 32 blocks on both sides"),
    _shared("nvfp4", "Miles' matrix: the NVFP4 recipe aligns the training forward"),
    _mixed("int8", "FlashRL: with truncated importance sampling"),
    _shared("int8", "the same rows on both sides (configuration A)"),
    _shared("int4", "Miles' INT4 quantisation-aware training: scale amax / 7, values -7 .. 7"),
)

REFUSED: Mapping[tuple[str, str], str] = {
    ("nvfp4", "bf16"): "this is not the NVFP4 recipe, whose training forward is quantised to NVFP4 too",
    ("int4", "bf16"): "INT4 engines are documented with quantisation-aware training, whose forward is INT4 too",
    ("bf16", "fp8"): "training would round what its engines do not",
}
"""The pairs that are asked for by mistake, with the reason; others are refused because nothing documents them."""


def training_for(rollout: str) -> tuple[str, ...]:
    """Precisions of the training forward that go with engine weights in `rollout`; none for an unknown one."""
    return tuple(pair.training for pair in ALLOWED if pair.rollout == rollout)


def pair_of(rollout: str, training: str) -> Pair:
    """The allowed pair. Raises `RealError` for any other, with the reason and what is allowed."""
    for pair in ALLOWED:
        if (pair.rollout, pair.training) == (rollout, training):
            return pair
    served = ", ".join(dict.fromkeys(pair.rollout for pair in ALLOWED))
    allowed = training_for(rollout)
    if not allowed:
        raise RealError(f"quantisation: no engine weights {rollout!r}; there are {served}")
    why = REFUSED.get((rollout, training), "nothing documents this pair")
    near = " or ".join(allowed)
    raise RealError(f"quantisation: {rollout} engines with {training} training: {why}; {rollout} goes with {near}")
