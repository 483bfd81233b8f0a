"""What a loss is made of: the choices a user makes, and nothing that computes. Names are slime's and Miles' where they
exist (`eps_clip`, `eps_clip_high`, `eps_clip_c`), verl's for the aggregation.

Correcting and limiting are separate switches. `denominator` says whether the loss is corrected towards the policy that
generated; `limits` what happens to correction weights that are too far from 1; `loss_type` whether updates are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from real.errors import RealError

AdvantageStd = Literal["population", "sample", "none", "leave_one_out"]
Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "rollout-mean",
]
Denominator = Literal["generation", "recomputed", "decoupled"]
KlType = Literal["k1", "k2", "k3"]
LossType = Literal["policy_gradient", "importance", "ppo_clip", "gspo", "cispo"]
LimitAction = Literal["none", "truncate", "mask"]
WeightLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class WeightLimits:
    """What is done about weights far from 1 (module `corrections`). By default nothing.

    The weight is p(trainer) / p(generation engine): of the old trainer log-probs where the run has them in its
    denominator, else of the current ones."""

    action: LimitAction = "none"
    """`truncate` brings a weight outside `bounds` to the nearer one, `mask` to 0."""
    level: WeightLevel = "token"
    """A weight of each token; the product over a sequence; or the geometric mean over a sequence."""
    bounds: tuple[float, float] | None = None
    """Lowest and highest weight; goes with `action`."""
    geometric_band: tuple[float, float] | None = None
    """Sequences whose geometric mean is outside are masked whole, before `action` sees their tokens."""
    veto: float | None = None
    """A sequence with any token whose ratio is below this is masked whole. 1e-4 is Miles' and verl's."""
    normalise: bool = False
    """Divide the weights by their mean over the update's unmasked tokens. `decoupled` only."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("action", self.action, get_args(LimitAction)),
            ("level", self.level, get_args(WeightLevel)),
        ):
            if value not in choices:
                raise RealError(f"loss: limits.{name} is {value!r}; it can be {', '.join(choices)}")
        if (self.action == "none") != (self.bounds is None):
            raise RealError("loss: limits.bounds and limits.action (truncate, mask) go together")
        if self.bounds is not None and not 0 <= self.bounds[0] < self.bounds[1]:
            raise RealError(f"loss: limits.bounds are {self.bounds}; (0, 2) is the usual pair")
        if self.geometric_band is not None and not 0 < self.geometric_band[0] <= 1 <= self.geometric_band[1]:
            raise RealError(f"loss: limits.geometric_band is {self.geometric_band}; it holds 1, as (0.99, 1.01) does")
        if self.veto is not None and not 0 < self.veto < 1:
            raise RealError(f"loss: limits.veto is {self.veto}; it is a ratio below 1, usually 1e-4")


LIMITS: Mapping[str, WeightLimits] = MappingProxyType(
    {
        "none": WeightLimits(),
        "tis": WeightLimits("truncate", "token", (0.0, 2.0)),
        "mis": WeightLimits("mask", "sequence", (0.0, 2.0)),
        "icepop": WeightLimits("mask", "token", (0.2, 5.0)),
        "seq_mask_tis": WeightLimits("truncate", "token", (0.0, 2.0), geometric_band=(0.99, 1.01)),
    }
)
"""By the names of the field: truncated (cap 2: Miles, verl) and masked importance sampling, IcePop (prime-rl's band for
INTELLECT-3, arXiv 2512.16144), and a geometric filter (SkyRL's band) before token truncation."""


@dataclass(frozen=True)
class LossOptions:
    """GRPO with the conventions of the seeds: population standard deviation, generation log-probs as denominator."""

    loss_type: LossType = "ppo_clip"
    """Module `losses`. `importance` is PPO without its clip."""
    eps_clip: float = 0.2
    """The ratio may fall to 1 - eps_clip before its token stops pushing; 1: no lower bound. `gspo`, whose ratio is a
    mean over the sequence, wants about 3e-4."""
    eps_clip_high: float | None = None
    """... and rise to 1 + eps_clip_high; None: the same as `eps_clip`. 0.28 is DAPO's clip-higher."""
    eps_clip_c: float | None = None
    """Dual clip: the loss of a token with negative advantage is at most this times -A. 3 is verl's; None: off."""
    advantage_std: AdvantageStd = "population"
    """`none` only subtracts the mean (Dr.GRPO); `sample` (n - 1) is the default of Miles, slime and verl;
    `leave_one_out` takes mean and deviation of the others (NeMo RL)."""
    aggregation: Aggregation = "token-mean"
    normal_length: int | None = None
    """Tokens; the constant of `seq-mean-token-sum-norm`, which needs it."""
    denominator: Denominator = "generation"
    """Which log-prob stands under the ratio (module `losses`). All but `generation` need `Record.old_log_probs`."""
    limits: WeightLimits = field(default_factory=WeightLimits)
    kl_coef: float = 0.0
    """> 0 adds kl_coef * KL(current || reference) per token; 0 schedules no reference forward pass at all."""
    kl_type: KlType = "k3"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("loss_type", self.loss_type, get_args(LossType)),
            ("advantage_std", self.advantage_std, get_args(AdvantageStd)),
            ("aggregation", self.aggregation, get_args(Aggregation)),
            ("denominator", self.denominator, get_args(Denominator)),
            ("kl_type", self.kl_type, get_args(KlType)),
        ):
            if value not in choices:
                raise RealError(f"loss: {name} is {value!r}; it can be {', '.join(choices)}")
        if not 0 < self.eps_clip <= 1 or self.high <= 0:
            raise RealError(f"loss: eps_clip is {self.eps_clip}, eps_clip_high {self.high}; 0.2 is the usual value")
        if self.eps_clip_c is not None and (self.eps_clip_c <= 1 or self.loss_type not in ("ppo_clip", "gspo")):
            raise RealError(f"loss: eps_clip_c is {self.eps_clip_c}; it is above 1, and belongs to ppo_clip and gspo")
        if self.kl_coef < 0:
            raise RealError(f"loss: kl_coef is {self.kl_coef}; it cannot be negative (0 leaves the reference out)")
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.normal_length is not None):
            raise RealError("loss: normal_length belongs to aggregation seq-mean-token-sum-norm, which needs it")
        self._check_limits()

    def _check_limits(self) -> None:
        limits = self.limits
        if limits.normalise and self.denominator != "decoupled":
            raise RealError("loss: limits.normalise needs denominator decoupled: only its weights are known beforehand")
        if limits.action != "truncate":
            return
        if not self.corrects:
            raise RealError(
                f"loss: loss_type {self.loss_type} with denominator {self.denominator} has no correction weight to "
                "truncate; denominator decoupled has one, and limits.action mask works without"
            )
        own = "geometric" if self.loss_type == "gspo" else "token"
        if self.denominator == "generation" and limits.level != own:
            raise RealError(
                f"loss: limits.level is {limits.level}; with denominator generation the ratio of {self.loss_type} is "
                f"what is truncated, which is {own}"
            )

    @property
    def high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def clip(self) -> tuple[float, float] | None:
        """Lowest and highest ratio that no clip holds back; None if the loss clips nothing."""
        clips = self.loss_type in ("ppo_clip", "gspo", "cispo")
        return (1 - self.eps_clip, 1 + self.high) if clips else None

    @property
    def needs_old_log_probs(self) -> bool:
        return self.denominator != "generation"

    @property
    def corrects(self) -> bool:
        """Whether the loss weighs a choice by its probability against that of the policy that generated it."""
        if self.denominator == "generation":
            return self.loss_type != "policy_gradient"
        return self.denominator == "decoupled"
