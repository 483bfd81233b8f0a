"""What a loss is made of: the choices a user makes, and nothing that computes. Names are slime's and Miles' where they
exist (`eps_clip`, `eps_clip_high`), verl's for the aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from real.errors import RealError

AdvantageStd = Literal["population", "sample", "none"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
Denominator = Literal["generation", "recomputed", "decoupled"]
KlType = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class LossOptions:
    """GRPO with the conventions of the seeds: population standard deviation, generation log-probs as denominator."""

    eps_clip: float = 0.2
    """The ratio may fall to 1 - eps_clip before its token stops pushing."""
    eps_clip_high: float | None = None
    """... and rise to 1 + eps_clip_high; None: the same as `eps_clip`. 0.28 is DAPO's clip-higher."""
    advantage_std: AdvantageStd = "population"
    """`none` only subtracts the mean (Dr.GRPO); `sample` (n - 1) is the default of Miles, slime and verl."""
    aggregation: Aggregation = "token-mean"
    normal_length: int | None = None
    """Tokens; the constant of `seq-mean-token-sum-norm`, which needs it."""
    denominator: Denominator = "generation"
    """Which log-prob stands under the ratio (module `losses`). All but `generation` need `Record.old_log_probs`."""
    kl_coef: float = 0.0
    """> 0 adds kl_coef * KL(current || reference) per token; 0 schedules no reference forward pass at all."""
    kl_type: KlType = "k3"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("advantage_std", self.advantage_std, get_args(AdvantageStd)),
            ("aggregation", self.aggregation, get_args(Aggregation)),
            ("denominator", self.denominator, get_args(Denominator)),
            ("kl_type", self.kl_type, get_args(KlType)),
        ):
            if value not in choices:
                raise RealError(f"loss: {name} is {value!r}; it can be {', '.join(choices)}")
        if not 0 < self.eps_clip < 1 or self.high <= 0:
            raise RealError(f"loss: eps_clip is {self.eps_clip}, eps_clip_high {self.high}; 0.2 is the usual value")
        if self.kl_coef < 0:
            raise RealError(f"loss: kl_coef is {self.kl_coef}; it cannot be negative (0 leaves the reference out)")
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.normal_length is not None):
            raise RealError("loss: normal_length belongs to aggregation seq-mean-token-sum-norm, which needs it")

    @property
    def high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def needs_old_log_probs(self) -> bool:
        return self.denominator != "generation"
