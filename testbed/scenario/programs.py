"""Agent programs: whether a trajectory that uses tools may be paused between its model calls, and by which rule.

Only says what may be written in a scenario; the rule itself is in `testbed.policies.programs`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from testbed.scenario.base import Fraction, NonNegativeInt, PositiveFloat, Section


class NoPrograms(Section):
    """Trajectories are not paused: every call is sent as soon as its tool has answered."""

    type: Literal["none"] = "none"


class ThunderAgent(Section):
    """Programs are paused and restored by what their KV costs in space and time (ThunderAgent, arXiv 2602.13692).

    The defaults are the paper's rule. The deployed code differs: `decay: restore`, `reserve_tokens: 100`,
    `count_shared_prompts_once: true`, `pause_reasoning: next_tool`, `restore_order: best_fit`, `tick_order:
    restore_first`, `forced_restore_s: 1800`. Dynamo's port pauses above 0.95 and down to 0.80.
    """

    type: Literal["thunder_agent"] = "thunder_agent"
    tick_s: PositiveFloat = 5.0
    """Seconds between two looks at memory."""
    acting_half_life_s: PositiveFloat | None = 1.0
    """The context of a program whose tool has run for t seconds counts 2^(-t / this); null: it counts in full."""
    decay: Literal["always", "restore"] = "always"
    """`restore`: it decays only where room for paused programs is looked for."""
    acting_token_weight: Fraction = 1.0
    """Times the context of a program whose tool runs."""
    reserve_tokens: NonNegativeInt = 0
    """Tokens that every program counts for beyond its context."""
    count_shared_prompts_once: bool = False
    """The prompt of a group counts once on an engine, not once a member."""
    pause_above: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of an engine's KV above which programs are paused."""
    pause_to: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share at which pausing ends."""
    pause_reasoning: Literal["at_once", "next_tool"] = "at_once"
    """A program in a model call that must go: its call is taken back, or it is marked and pauses at its next tool."""
    restore_order: Literal["shortest_first", "best_fit"] = "shortest_first"
    """`shortest_first`: those that want a model call before those whose tool runs, shortest context first, to the
    engine with most room. `best_fit`: want a call, then new, then acting; longest first, to the tightest room."""
    tick_order: Literal["pause_first", "restore_first"] = "pause_first"
    forced_restore_s: PositiveFloat | None = None
    """A program that was paused for so long is restored whether there is room or not; null: it waits."""
    prepare_ahead: NonNegativeInt | None = 8
    """Programs at the head of the line whose environments are prepared while they wait; 0: when they are let in,
    null: when they arrive."""

    @model_validator(mode="after")
    def _ordered(self) -> ThunderAgent:
        if self.pause_to > self.pause_above:
            raise ValueError("`pause_to` is at most `pause_above`")
        return self


Programs = Annotated[NoPrograms | ThunderAgent, Field(discriminator="type")]
