"""The trainer: how the model is split, and where its step time comes from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.scenario.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from testbed.scenario.model import Precision


class AnalyticTrainer(Section):
    """FLOPs / (GPUs x peak x MFU), plus pipeline bubble, exposed communication and optimizer."""

    type: Literal["analytic"] = "analytic"
    mfu: Annotated[float, Field(gt=0, le=1)] = 0.40
    """Model FLOPs utilisation of forward + backward, of the dense BF16 peak."""
    imbalance: Annotated[float, Field(ge=1)] = 1.05
    """Longest data-parallel rank over the mean."""
    exposed_communication: Fraction = 0.0
    """Share of step time added for communication that nothing hides."""
    fixed_s: NonNegativeFloat = 0.5
    """Per optimizer update: data loading, packing, logging."""


class FittedTrainer(Section):
    """FLOPs of matrix products and of attention, each at its own MFU, plus memory traffic of activations and logits;
    the coefficients are fitted to published step times of an FSDP2 trainer (`docs/published.md`)."""

    type: Literal["fitted"] = "fitted"
    imbalance: Annotated[float, Field(ge=1)] = 1.05
    """Longest data-parallel rank over the mean."""
    exposed_communication: Fraction = 0.0
    """Share of step time added for communication that nothing hides."""
    fixed_s: NonNegativeFloat = 0.5
    """Per optimizer update: data loading, packing, logging."""


class RateTrainer(Section):
    """A plain throughput: seconds = fixed + trajectories / rate (for queueing checks and published shapes)."""

    type: Literal["rate"] = "rate"
    samples_per_s: PositiveFloat | None = None
    tokens_per_s: PositiveFloat | None = None
    fixed_s: NonNegativeFloat = 0.0


class CalibratedTrainer(Section):
    """Seconds of an update by trajectories and tokens, fitted to one machine by `testbed calibrate`."""

    type: Literal["calibrated"] = "calibrated"
    profile: str


TrainerCost = Annotated[AnalyticTrainer | FittedTrainer | RateTrainer | CalibratedTrainer, Field(discriminator="type")]


class Training(Section):
    """Parallel split and precision of the trainer; the GPUs come from `placement`."""

    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    context_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    precision: Precision = "bf16"
    recompute: Literal["none", "selective", "full"] = "selective"
    max_tokens_per_gpu: PositiveInt = 32768
    """Token-packed micro-batches."""
    optimizer_bytes_per_param: PositiveFloat = 12.0
    sharding: Literal["zero1", "zero2", "zero3"] = "zero3"
    cost: TrainerCost = AnalyticTrainer()
