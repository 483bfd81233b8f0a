"""Tasks with text and a verifier, for runs that really generate. In a simulation the workload's lengths stand for them.

Only says what may be written in a scenario; the environments themselves live in `real/environments/`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from testbed.scenario.base import PositiveFloat, PositiveInt, Section

Template = Annotated[str, Field(pattern=r"\{question\}")]
Operator = Literal["+", "-", "*"]


class ArithmeticTasks(Section):
    """`3+5=` with the answer `8`: reward 1 for the right answer."""

    type: Literal["arithmetic"] = "arithmetic"
    max_operand: PositiveInt = 9
    operators: tuple[Operator, ...] = ("+",)
    answer: Literal["exact", "last_number"] = "exact"
    """What of the reply is compared: all of it, or the last number in it (for models that talk)."""
    prompt_template: Template = "{question}"
    """Special tokens in it become their ids, so a chat format is a template like any other."""


class ReasoningGymTasks(Section):
    """A generator of the reasoning-gym package, with its own scorer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    dataset_config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the generator, e.g. `{min_terms: 2, max_terms: 2}`."""
    prompt_template: Template = "{question}\nAnswer: "


class Gsm8kTasks(Section):
    """The packaged sample of GSM8K; answers are compared by math-verify."""

    type: Literal["gsm8k"] = "gsm8k"
    split: Literal["train", "test"] = "train"
    prompt_template: Template = "Question: {question}\nAnswer: "


class CalculatorTasks(Section):
    """Arithmetic with a tool: the policy may write `<tool>12*7</tool>` and reads the result in its context."""

    type: Literal["calculator"] = "calculator"
    max_operand: PositiveInt = 9
    operators: tuple[Operator, ...] = ("+", "-", "*")
    operations: PositiveInt = 1
    """In one question."""
    max_turns: PositiveInt = 3
    tool_time_limit_s: PositiveFloat = 2.0
    prompt_template: Template = "{question}"


Environment = Annotated[ArithmeticTasks | ReasoningGymTasks | Gsm8kTasks | CalculatorTasks, Field(discriminator="type")]
