"""What is asked of the policy: prompts, reply lengths, turns, tool times and rewards, and where each of them comes
from.

The generators live in the backends; this module only says what may be written in a scenario.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from testbed.scenario.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from testbed.scenario.environment import Environment


class FixedLength(Section):
    """Every draw has the same value."""

    type: Literal["fixed"] = "fixed"
    tokens: NonNegativeInt


class UniformLength(Section):
    """Whole numbers in [low, high]."""

    type: Literal["uniform"] = "uniform"
    low: NonNegativeInt
    high: PositiveInt


class LognormalLength(Section):
    """Lognormal, cut at a cap. `mean` is the mean *after* the cut; `sigma` is of the logarithm.

    `group_correlation` is the share of the log-variance that a task's replies have in common (0: independent, 1:
    equal). Give `sigma`, or `capped_share` from which sigma is solved (mean and capped share are what publications
    state).
    """

    type: Literal["lognormal"] = "lognormal"
    mean: PositiveFloat
    sigma: PositiveFloat | None = None
    capped_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    group_correlation: Fraction = 0.5
    source: str = ""
    """Where mean and spread come from, for the report (empty: chosen by the user)."""

    @model_validator(mode="after")
    def _one_of(self) -> LognormalLength:
        if (self.sigma is None) == (self.capped_share is None):
            raise ValueError("give exactly one of `sigma` and `capped_share`")
        return self


class GeometricLength(Section):
    """Geometric with mean `mean` (>= 1): the memoryless case of queueing formulas."""

    type: Literal["geometric"] = "geometric"
    mean: PositiveFloat


class QuantileLength(Section):
    """Whole numbers by published quantiles: between two points the share grows linearly."""

    type: Literal["quantiles"] = "quantiles"
    points: Annotated[tuple[tuple[Fraction, NonNegativeInt], ...], Field(min_length=2)]
    """(share of values at or below, value), both rising, from share 0 to 1."""
    source: str = ""
    """Where they come from, for the report (empty: chosen by the user)."""

    @model_validator(mode="after")
    def _rising(self) -> QuantileLength:
        shares, values = zip(*self.points, strict=True)
        if shares[0] != 0 or shares[-1] != 1 or list(shares) != sorted(set(shares)):
            raise ValueError("shares of `points` rise from 0 to 1")
        if list(values) != sorted(values):
            raise ValueError("values of `points` never fall")
        return self


class TraceLength(Section):
    """Prompt lengths (and shared prefixes, where the trace has them) in the order of a recorded trace."""

    type: Literal["trace"] = "trace"
    trace: str
    """`azure_conv`, `azure_code`, `mooncake_conversation`, `mooncake_synthetic`, or a path relative to the scenario
    file."""


ReplyLength = Annotated[
    FixedLength | UniformLength | LognormalLength | GeometricLength | QuantileLength, Field(discriminator="type")
]
PromptLength = Annotated[
    FixedLength | UniformLength | LognormalLength | GeometricLength | QuantileLength | TraceLength,
    Field(discriminator="type"),
]


class FixedTime(Section):
    type: Literal["fixed"] = "fixed"
    seconds: NonNegativeFloat


class ExponentialTime(Section):
    type: Literal["exponential"] = "exponential"
    mean_s: PositiveFloat


class LognormalTime(Section):
    type: Literal["lognormal"] = "lognormal"
    mean_s: PositiveFloat
    sigma: PositiveFloat


Duration = Annotated[FixedTime | ExponentialTime | LognormalTime, Field(discriminator="type")]


class Rewards(Section):
    """Verification: how long it takes on how many servers, and how often it says 1.

    `success_rate` is drawn per task from a Beta distribution with this mean and `concentration` (small: tasks are all
    easy or all hard, so groups without variance are common).
    """

    latency: Duration = FixedTime(seconds=0.5)
    servers: NonNegativeInt = 0
    """Verifiers that work in parallel; 0 means as many as needed."""
    success_rate: Fraction = 0.5
    concentration: PositiveFloat = 2.0
    stage: Literal["streaming", "serial"] = "streaming"
    """`streaming`: score as soon as a trajectory is generated. `serial`: score when the whole group is generated."""


class Tools(Section):
    """The CPU tool server: execution slots, and environments that must be prepared and reclaimed."""

    slots: NonNegativeInt = 0
    """Tool calls that execute at once; 0 means as many as needed."""
    max_queued: NonNegativeInt | None = None
    """Calls that may wait for a slot; one more is refused, and its trajectory fails. null: as many as come."""
    environment_prepare: Duration = FixedTime(seconds=0.0)
    environment_release: Duration = FixedTime(seconds=0.0)
    prepare_slows_at: PositiveInt | None = None
    """n preparations at once take 1 + (n / this)^2 times as long each; null: as long as one. ThunderAgent's four points
    (29.9, 32.8, 38.4, 47.2 s at 24, 48, 72, 96) are 29 s and 122 to 3 %."""
    environments: NonNegativeInt = 0
    """Environments alive at once; 0 means as many as needed."""

    @model_validator(mode="after")
    def _queue(self) -> Tools:
        if self.max_queued is not None and not self.slots:
            raise ValueError("`max_queued` counts calls that wait for one of `slots`, and there is no limit of those")
        return self


class LengthsWorkload(Section):
    """Synthetic tasks: prompt and reply lengths from distributions; one or several turns."""

    type: Literal["lengths"] = "lengths"
    prompt: PromptLength = FixedLength(tokens=512)
    reply: ReplyLength
    max_response_length: PositiveInt
    """Cap on the generated tokens of one turn (`max_new_tokens`)."""
    turns: Annotated[FixedLength | UniformLength | GeometricLength | QuantileLength, Field(discriminator="type")] = (
        FixedLength(tokens=1)
    )
    """Model calls in a trajectory (the distribution counts turns, not tokens)."""
    observation: ReplyLength = FixedLength(tokens=0)
    """Tokens a tool answers with."""
    tool_time: Duration = FixedTime(seconds=0.0)
    shared_prefix_tokens: NonNegativeInt = 0
    """A system prompt in front of every prompt."""
    num_tasks: PositiveInt | None = None
    """Size of the data set; null: never ends."""
    arrivals: Literal["closed", "poisson"] = "closed"
    """`closed`: the core draws tasks when admission allows. `poisson`: tasks arrive by themselves at
    `arrival_rate_per_s`."""
    arrival_rate_per_s: PositiveFloat | None = None
    rewards: Rewards = Rewards()
    tools: Tools = Tools()
    environment: Environment | None = None
    """Tasks with text and a verifier for real runs, which `prompt`, `reply`, `turns` and `rewards` stand for in a
    simulation; null: a real run asks for these lengths with random tokens."""

    @model_validator(mode="after")
    def _arrivals(self) -> LengthsWorkload:
        if (self.arrivals == "poisson") != (self.arrival_rate_per_s is not None):
            raise ValueError("`arrival_rate_per_s` belongs to `arrivals: poisson`, and only there")
        return self


class Swing(Section):
    """Arrivals per second go up and down as 1 + share x sin(2 pi t / period) around what they were."""

    share: Annotated[float, Field(gt=0, lt=1)]
    period_s: PositiveFloat


class TraceWorkload(Section):
    """Requests of a recorded trace: input lengths, output lengths, prefix block ids and, if wanted, arrival times."""

    type: Literal["trace"] = "trace"
    trace: str
    arrivals: Literal["trace", "closed"] = "closed"
    """`trace`: requests arrive when the trace says. `closed`: the core draws them in the order of the trace."""
    time_scale: PositiveFloat = 1.0
    """Arrival times are multiplied by this (2: half the load)."""
    swing: Swing | None = None
    """An uneven load of the same requests, by the scaled times; null: as the trace has it."""
    max_requests: PositiveInt | None = None
    max_response_length: PositiveInt = 16384
    rewards: Rewards = Rewards()
    tools: Tools = Tools()

    @model_validator(mode="after")
    def _swings(self) -> TraceWorkload:
        if self.swing is not None and self.arrivals == "closed":
            raise ValueError("`swing` moves arrivals, which belong to `arrivals: trace`")
        return self


class SessionsWorkload(Section):
    """Multi-turn sessions, one JSON object a line:

    `{"session_id", "arrival_time_ns", "sub_requests": [{"input_toks", "output_toks", "tool_duration_ns"}, ...]}`;
    `input_toks` are the tokens added in front of that call.
    """

    type: Literal["sessions"] = "sessions"
    path: str
    source: str = ""
    """Where the sessions were recorded, for the report (empty: made up)."""
    arrivals: Literal["trace", "closed"] = "closed"
    max_sessions: PositiveInt | None = None
    max_response_length: PositiveInt = 16384
    rewards: Rewards = Rewards()
    tools: Tools = Tools()


class JournalWorkload(Section):
    """Lengths, tool times and rewards of an earlier run, read from its journal (the run must have `journal: full`)."""

    type: Literal["journal"] = "journal"
    run: str
    """A run folder, or a `journal.jsonl.zst`; relative to the scenario file."""
    arrivals: Literal["trace", "closed"] = "closed"
    """`trace`: tasks arrive when they did in that run. `closed`: the core draws them in that order."""
    max_response_length: PositiveInt = 16384
    rewards: Rewards = Rewards()
    tools: Tools = Tools()


WorkloadConfig = Annotated[
    LengthsWorkload | TraceWorkload | SessionsWorkload | JournalWorkload, Field(discriminator="type")
]
