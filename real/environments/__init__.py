"""Tasks, verifiers and tools of real runs: which environment a scenario's section names.

`base.py` has the Protocol, one module per environment has the rest. Packages that only one environment needs are
imported when it is made, and nothing heavy here: helper processes import this package, one for each trajectory."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.environments.base import Environment, RealTask, ToolCall, TurnLimits
from real.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from real.environments.composed import Mixture
    from real.environments.prefixes import Prefixes
    from testbed.scenario.environment import MixtureTasks, PrefixTasks
    from testbed.workloads import Workload

__all__ = ["Environment", "RealTask", "ToolCall", "TurnLimits", "environment"]


_CLASSES = {
    "arithmetic": ("real.environments.arithmetic", "Arithmetic"),
    "calculator": ("real.environments.calculator", "Calculator"),
    "gsm8k": ("real.environments.gsm8k", "Gsm8k"),
    "reasoning_gym": ("real.environments.reasoning_gym", "ReasoningGym"),
    "workspace": ("real.environments.workspace", "Workspace"),
}
"""`type` of the section -> where its class is."""

SOURCES = 2_000_003
"""Added to a run's seed for the tasks whose demonstrations are histories to start from."""


def environment(
    config: Any,
    *,
    tokenizer: Tokenizer,
    members: int,
    seed: int,
    workload: Workload | None = None,
    max_response_length: int | None = None,
    num_tasks: int | None = None,
    base_dir: Path = Path(),
) -> Environment:
    """`config`: a section with `type` and, as further fields, the keyword arguments of that type's class; None: carry
    out the plans of `workload`. `max_response_length` (tokens of one turn) and `num_tasks` replace the type's own.
    `base_dir`: what file names are relative to.

    Raises RealError for data sets and files that do not exist and packages that are missing.
    """
    if config is None:
        assert workload is not None
        from real.environments.planned import Planned

        return Planned(workload, tokenizer=tokenizer)
    within = partial(environment, tokenizer=tokenizer, members=members, max_response_length=max_response_length)
    if config.type == "mixture":
        return _mixture(config, within, seed, num_tasks)
    if config.type == "prefixes":
        return _prefixes(config, within, seed, num_tasks, tokenizer.vocab_size, base_dir)
    module, name = _CLASSES[config.type]
    options = config.model_dump(exclude={"type"})
    options |= {} if max_response_length is None else {"max_response_length": max_response_length}
    options |= {} if num_tasks is None else {"num_tasks": num_tasks}
    made: Environment = getattr(import_module(module), name)(**options, tokenizer=tokenizer, members=members, seed=seed)
    return made


def _mixture(config: MixtureTasks, within: Any, seed: int, num_tasks: int | None) -> Mixture:
    from real.environments.composed import Mixture, seed_of

    parts = {part.name: within(part.environment, seed=seed_of(seed, part.name)) for part in config.tasks}
    return Mixture(parts, [part.share for part in config.tasks], seed=seed, num_tasks=num_tasks)


def _prefixes(
    config: PrefixTasks, within: Any, seed: int, num_tasks: int | None, vocab_size: int, base_dir: Path
) -> Prefixes:
    from real.environments.composed import Mixture
    from real.environments.prefixes import Prefixes, Prepared, demonstrated, recorded
    from testbed.scenario.environment import kinds_of

    inner: Environment = within(config.environment, seed=seed)
    sections = {p.name: p.environment for p in getattr(config.environment, "tasks", ())}
    sources: list[Prepared] = []
    for k, source in enumerate(config.sources):
        if source.file is not None:
            kind = source.kind or kinds_of(config.environment)[0]
            sources += recorded(base_dir / source.file, kind, vocab_size)
        elif source.demonstrations is not None:
            own = seed + SOURCES * (k + 1)
            section = sections.get(source.kind or "", config.environment)
            sources += demonstrated(within(section, seed=own), own, source.demonstrations, source.kind)
    return Prefixes(
        inner,
        sources,
        limits_of=lambda kind: inner.parts[kind] if isinstance(inner, Mixture) else inner,
        full_share=config.full_share,
        after=config.after,
        seed=seed,
        num_tasks=num_tasks,
    )
