"""Tasks with text and a verifier, for runs that really generate. In a simulation the workload's lengths stand for them.

Only says what may be written in a scenario, and which kinds of task follow from it; the environments themselves live in
`real/environments/`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from testbed.scenario.base import Fraction, PositiveFloat, PositiveInt, Section

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


class WorkspaceTasks(Section):
    """Sums of the numbers in a file that only code can read: the policy may write `<tool>` Python `</tool>`, which runs
    in the trajectory's own workspace, and reads what it prints. Limits keep accidents in bounds, not attacks."""

    type: Literal["workspace"] = "workspace"
    numbers: PositiveInt = 4
    """In the file, one a line."""
    max_operand: PositiveInt = 9
    max_turns: PositiveInt = 3
    tool_time_limit_s: PositiveFloat = 5.0
    tool_memory_mb: PositiveInt = 512
    """MiB, of all processes of a call."""
    tool_output_bytes: PositiveInt = 200
    """A call that prints more is ended."""
    workspace_mb: PositiveInt = 64
    """MiB of files, of all calls together."""
    prompt_template: Template = "{question}"


Single = Annotated[
    ArithmeticTasks | ReasoningGymTasks | Gsm8kTasks | CalculatorTasks | WorkspaceTasks, Field(discriminator="type")
]
"""Tasks of one kind, which is the section's `type`."""


class Part(Section):
    """Tasks of one kind in a mixture."""

    name: Annotated[str, Field(min_length=1)]
    """The kind of these tasks: teachers are assigned to it."""
    share: PositiveFloat = 1.0
    """Relative to the other parts."""
    environment: Single


class MixtureTasks(Section):
    """Tasks of several kinds; each task is drawn from one part, by seed and index."""

    type: Literal["mixture"] = "mixture"
    tasks: tuple[Part, ...]


class Source(Section):
    """Dialogues of somebody else, whose intermediate histories the policy starts from."""

    file: str | None = None
    """Recorded rollouts as a Parquet file, relative to the scenario file."""
    demonstrations: PositiveInt | None = None
    """So many correct dialogues of the environment's own."""
    kind: str | None = None
    """Kind of task that they are, and so who teaches there; null: the environment's only one, or, of demonstrations,
    as they come."""

    @model_validator(mode="after")
    def _one_of(self) -> Source:
        if (self.file is None) == (self.demonstrations is None):
            raise ValueError("give exactly one of `file` and `demonstrations`")
        return self


class PrefixTasks(Section):
    """Multi-prefix distillation (MOPD^2): full rollouts, and single fresh turns from intermediate histories of prepared
    dialogues."""

    type: Literal["prefixes"] = "prefixes"
    environment: Annotated[
        ArithmeticTasks | ReasoningGymTasks | Gsm8kTasks | CalculatorTasks | WorkspaceTasks | MixtureTasks,
        Field(discriminator="type"),
    ]
    """Full rollouts are its tasks."""
    sources: tuple[Source, ...]
    full_share: Fraction = 0.5
    """Share of tasks that are full rollouts from the prompt."""
    after: tuple[PositiveInt, ...] = ()
    """Numbers of source turns after which a fresh one is generated; empty: all that a source goes on from."""


Environment = Annotated[
    ArithmeticTasks | ReasoningGymTasks | Gsm8kTasks | CalculatorTasks | WorkspaceTasks | MixtureTasks | PrefixTasks,
    Field(discriminator="type"),
]

PLANNED = "planned"
"""Kind of tasks without text."""


def kinds_of(tasks: Environment | None) -> tuple[str, ...]:
    """Kinds that its tasks can be of."""
    if isinstance(tasks, PrefixTasks):
        return kinds_of(tasks.environment)
    if isinstance(tasks, MixtureTasks):
        return tuple(part.name for part in tasks.tasks)
    return (PLANNED if tasks is None else tasks.type,)
