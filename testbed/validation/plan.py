"""Which scenarios are simulated against a real run: with the work that it did, and with the scenario's own work model.

It refuses to run anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.scenario import Scenario
from testbed.scenario.workload import JournalWorkload

ONLY_SIMULATED = (
    ("name",),
    ("question",),
    ("provenance",),
    ("cluster", "links"),
    ("cluster", "storage"),
    ("cluster", "price_usd_per_gpu_hour"),
    ("workload",),
    ("training", "cost"),
    ("weights", "delta_density"),
    ("weights", "delta_bytes_per_changed_param"),
    ("weights", "pause_overhead_s"),
    ("placement", "switch"),
    ("placement", "roles", "external_seconds_per_trajectory"),
    ("placement", "roles", "external_slots"),
    ("run",),
    ("simulation",),
    ("real",),
)
"""What does not change a decision, given the same events: it may differ between a real run and what is simulated
against it."""


def full(scenario: Scenario, real: Scenario, batches: int, forced_lengths: bool = False) -> Scenario:
    """The scenario as it is simulated by itself: the seed, warm-up and length of the real run, everything else as
    written. `forced_lengths`: of the real run (`forces_lengths`)."""
    changes = {
        "seed": real.run.seed,
        "warmup_steps": real.run.warmup_steps,
        "num_rollout": batches,
        "journal": "full",
    }
    simulation = scenario.simulation.model_copy(update={"forced_lengths": forced_lengths})
    return scenario.model_copy(update={"run": scenario.run.model_copy(update=changes), "simulation": simulation})


def forces_lengths(real: Scenario, backend: str) -> bool:
    """Whether replies of that run end by a token count: without an environment, actual engines are asked for it."""
    if backend == "real":
        return getattr(real.workload, "environment", None) is None
    return real.simulation.forced_lengths


def timing(scenario: Scenario, real: Scenario, batches: int, journal: Path, forced_lengths: bool = False) -> Scenario:
    """As `full`, with prompts, lengths, tool times, rewards and open arrivals of the real run.

    Recorded tool and verifier times hold the wait for a slot: nothing waits for one again.
    """
    w = scenario.workload
    workload = JournalWorkload(
        run=str(journal.resolve()),
        arrivals="closed" if getattr(w, "arrivals", "closed") == "closed" else "trace",
        max_response_length=w.max_response_length,
        rewards=w.rewards.model_copy(update={"servers": 0}),
        tools=w.tools.model_copy(update={"slots": 0, "environments": 0}),
    )
    return full(scenario, real, batches, forced_lengths).model_copy(update={"workload": workload})


def first_difference(scenario: Scenario, real: Scenario) -> str:
    """The first key on which the two would decide differently, with both values; empty if they are one experiment."""
    return _difference(_decisive(scenario), _decisive(real), "")


def _decisive(scenario: Scenario) -> dict[str, Any]:
    tree = scenario.model_dump(mode="json")
    for *above, last in ONLY_SIMULATED:
        node = tree
        for key in above:
            node = node.get(key) or {}
        node.pop(last, None)
    return tree


def _difference(a: Any, b: Any, key: str) -> str:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in dict.fromkeys((*a, *b)):
            found = _difference(a.get(name), b.get(name), f"{key}.{name}".lstrip("."))
            if found:
                return found
        return ""
    return "" if a == b else f"{key}: {a!r}, in the real run {b!r}"
