"""How long, with which seed, and how much is written down."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.scenario.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section
from testbed.scenario.cluster import GpuName


class MeasuredCosts(Section):
    """Tables of SGLang step latencies, bundled for H100 and H200 (others with the `tables` extra); interpolated, and
    marked outside their range."""

    type: Literal["measured"] = "measured"
    overheads: bool = False
    """Add to every step what the host and the all-reduces take beyond the kernels, as fitted to measured servers
    (docs/serving-points.md)."""


class AnalyticCosts(Section):
    """Roofline from the GPU catalogue and the model's architecture."""

    type: Literal["analytic"] = "analytic"
    gpu: GpuName | None = None
    compute_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.45
    memory_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.80
    step_overhead_ms: Annotated[float, Field(ge=0)] = 0.6


class LinearCosts(Section):
    """Decode step = base + per_sequence n + per_context_token S; prefill = prefill_base + prefill_per_token x new
    tokens.

    For queueing checks, and for engines whose coefficients are known.
    """

    type: Literal["linear"] = "linear"
    base_s: Annotated[float, Field(ge=0)] = 0.005
    per_sequence_s: Annotated[float, Field(ge=0)] = 0.00005
    per_context_token_s: Annotated[float, Field(ge=0)] = 0.0
    prefill_base_s: Annotated[float, Field(ge=0)] = 0.0
    prefill_per_token_s: Annotated[float, Field(ge=0)] = 0.0


class CalibratedCosts(Section):
    """Coefficients fitted to one machine by `testbed calibrate`, stored in a profile: engine steps, the way of requests
    to the engine, and the times of weight updates and phase switches."""

    type: Literal["calibrated"] = "calibrated"
    profile: str


EngineCosts = Annotated[MeasuredCosts | AnalyticCosts | LinearCosts | CalibratedCosts, Field(discriminator="type")]


class Simulation(Section):
    """Options of the simulated backend alone."""

    engine_costs: EngineCosts = MeasuredCosts()
    broadcast: Literal["miles", "checkpoint_engine"] = "miles"
    """Whose broadcast the cost of one follows: one source at a time that converts as it sends, or every rank sending
    what it holds ready in host memory."""
    mode: Literal["skip", "iterate"] = "skip"
    """`skip` jumps to the next change of an engine's batch; `iterate` is the reference that takes every step."""
    forced_lengths: bool = False
    """Replies end because the request asks for so many tokens, as in a real run of a workload without an environment,
    instead of by a stop token: the engine knows their length, and does not compute the KV of the last one."""
    max_simulated_s: PositiveFloat = 1e9
    watchdog_s: PositiveFloat = 86_400.0
    """A run in which work is queued and nothing finishes for this long (simulated) is ended with a message."""


class Run(Section):
    """Seed, length and record."""

    seed: NonNegativeInt = 0
    num_rollout: PositiveInt = 10
    """Batches to train (RL steps)."""
    warmup_steps: NonNegativeInt = 1
    """Steps left out of means."""
    journal: Literal["full", "sampled", "off"] = "full"
    journal_sample: Fraction = 0.01
    """Share of groups whose events are kept when `journal: sampled`."""
