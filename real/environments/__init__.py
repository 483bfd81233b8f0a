"""Tasks, verifiers and tools of real runs: which environment a scenario's section names.

`base.py` has the Protocol, one module per environment has the rest. Packages that only one environment needs are
imported when it is made."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from real.environments.base import Environment, RealTask, ToolCall, TurnLimits
from real.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from testbed.workloads import Workload

__all__ = ["Environment", "RealTask", "ToolCall", "TurnLimits", "environment"]


_CLASSES = {
    "arithmetic": ("real.environments.arithmetic", "Arithmetic"),
    "calculator": ("real.environments.calculator", "Calculator"),
    "gsm8k": ("real.environments.gsm8k", "Gsm8k"),
    "reasoning_gym": ("real.environments.reasoning_gym", "ReasoningGym"),
}
"""`type` of the section -> where its class is."""


def environment(
    config: Any,
    *,
    tokenizer: Tokenizer,
    members: int,
    seed: int,
    workload: Workload | None = None,
    max_response_length: int | None = None,
    num_tasks: int | None = None,
) -> Environment:
    """`config`: a section with `type` and, as further fields, the keyword arguments of that type's class; None: carry
    out the plans of `workload`. `max_response_length` (tokens of one turn) and `num_tasks` replace the type's own.

    Raises RealError for data sets that do not exist and packages that are missing.
    """
    if config is None:
        assert workload is not None
        from real.environments.planned import Planned

        return Planned(workload, tokenizer=tokenizer)
    module, name = _CLASSES[config.type]
    options = config.model_dump(exclude={"type"})
    options |= {} if max_response_length is None else {"max_response_length": max_response_length}
    options |= {} if num_tasks is None else {"num_tasks": num_tasks}
    made: Environment = getattr(import_module(module), name)(**options, tokenizer=tokenizer, members=members, seed=seed)
    return made
