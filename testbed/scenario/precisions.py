"""Which precision of the training forward goes with which precision of the engines' weights, and why: the one table
that scenario rules and the real formats read. Sources: Miles' documented matrix, the seeds' two configurations, and
what FlashRL and Miles' INT4 training add. Knows no arithmetic of a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PLAIN = ("bf16", "fp16", "fp32")
"""Types that hardware computes in; the other precisions are formats that weights are rounded to."""


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
    ("nvfp4", "bf16"): "this is not the NVFP4 recipe (miles-nvfp4), whose training forward is NVFP4 too",
    ("int4", "bf16"): "INT4 engines are documented with quantisation-aware training, whose forward is INT4 too",
    ("bf16", "fp8"): "training would round what its engines do not",
}
"""The pairs that are asked for by mistake, with the reason; others are refused because nothing documents them."""


def served_precisions() -> tuple[str, ...]:
    """Precisions that engine weights can have."""
    return tuple(dict.fromkeys(pair.rollout for pair in ALLOWED))


def training_for(rollout: str) -> tuple[str, ...]:
    """Precisions of the training forward that go with engine weights in `rollout`; none for an unknown one."""
    return tuple(pair.training for pair in ALLOWED if pair.rollout == rollout)


def why_refused(rollout: str, training: str) -> str:
    """The reason, for a pair that is not in `ALLOWED`."""
    return REFUSED.get((rollout, training), "nothing documents this pair")


def computed_in(precision: str) -> str:
    """The plain type of arithmetic where the weights' values are those of `precision`: itself, or bf16."""
    return precision if precision in PLAIN else "bf16"
