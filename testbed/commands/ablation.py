"""An ablation: a scenario with each of its savings switched off, one at a time, and the time that each one saves.

Prefix reuse saves computing histories again, filled slots save waiting, speculation saves decode steps, paused programs
save the histories that requests would evict: different costs, so each is a switch of its own. It refuses to know how a
variant is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.commands.errors import UserError
from testbed.metrics.summary import RunSummary
from testbed.scenario import Scenario
from testbed.scenario.programs import ThunderAgent
from testbed.scenario.routing import FOLLOWS_PREFIXES

PARTS = ("queue", "held", "prefill", "decode", "tool", "environment", "paused")
"""Of a trajectory's time until it is generated."""
EVERY = "everything on"
NO_PROGRAMS = "program scheduling off"


@dataclass(frozen=True)
class Switch:
    """One saving, switched off. `against`: the variant that has it and differs in nothing else."""

    name: str
    saving: str
    against: str
    changes: Mapping[str, Any]
    """Dotted key -> value."""


@dataclass(frozen=True)
class Saved:
    """What one saving saves per trajectory, seconds (negative: costs)."""

    switch: Switch
    step_s: float
    """Per RL step."""
    trajectory_s: float
    """From submission to generated."""
    parts: Mapping[str, float]
    """By what the trajectory does in that time; they sum to `trajectory_s`."""


def switches(scenario: Scenario) -> list[Switch]:
    """The savings that the scenario has. Raises `UserError` if it has none."""
    r, e = scenario.rollout, scenario.rollout.engine
    found = []
    programs = isinstance(r.programs, ThunderAgent)
    without = {"rollout.programs": {"type": "none"}} if programs else {}
    against = NO_PROGRAMS if programs else EVERY
    if programs:
        found.append(Switch(NO_PROGRAMS, "program scheduling", EVERY, without))
    if not e.disable_radix_cache:
        changes: dict[str, Any] = {**without, "rollout.engine.disable_radix_cache": True}
        if isinstance(r.routing, FOLLOWS_PREFIXES):
            changes["rollout.routing"] = {"type": "session_affinity"}
        if e.hierarchical_cache is not None:
            changes["rollout.engine.hierarchical_cache"] = None
        found.append(Switch("prefix reuse off", "prefix reuse", against, changes))
    if r.concurrency.type != "static_batch":
        static = {"type": "static_batch", "batch_size": e.max_running_requests}
        found.append(Switch("slot filling off", "slot filling", EVERY, {"rollout.concurrency": static}))
    if e.speculative is not None:
        found.append(Switch("speculation off", "speculation", EVERY, {"rollout.engine.speculative": None}))
    if not found:
        raise UserError("nothing to switch off (nearest: rollout.engine.disable_radix_cache: false)")
    return found


def generated_s(summary: RunSummary) -> float:
    """Mean seconds from a trajectory's submission until it is generated."""
    return float(sum(getattr(summary.trajectory, part) for part in PARTS))


def saved(switch: Switch, off: RunSummary, on: RunSummary) -> Saved:
    """`off`: with the saving switched off; `on`: the variant `switch.against`."""
    parts = {p: getattr(off.trajectory, p) - getattr(on.trajectory, p) for p in PARTS}
    return Saved(switch, off.step_time_mean_s - on.step_time_mean_s, generated_s(off) - generated_s(on), parts)


def figures(every: RunSummary, savings: list[Saved]) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "step_s": every.step_time_mean_s,
        "trajectory_s": generated_s(every),
        "savings": [
            {
                "saving": s.switch.saving,
                "against": s.switch.against,
                "step_s": s.step_s,
                "trajectory_s": s.trajectory_s,
                "parts": dict(s.parts),
            }
            for s in savings
        ],
    }
