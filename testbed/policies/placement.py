"""Which pool does a job run on, and when does a shared pool change phase?

Jobs are kinds (`generate`, `train`, one per signal), not roles and not GPU counts: several roles may use one pool at
different times, and one role may span many GPUs."""

from __future__ import annotations

from typing import Final

from testbed.scenario.layout import Layout
from testbed.scenario.scenario import Scenario

EXTERNAL: Final = -1
"""A service outside the GPU pools: verifier, reward model, hosted teacher."""


class JobMap:
    """Where each signal is computed."""

    def __init__(self, scenario: Scenario, layout: Layout) -> None:
        roles = scenario.placement.roles
        hosts: dict[str, str] = {
            "reward": "external",
            "old_log_probs": roles.old_log_probs,
            "reference": roles.reference,
            "critic": roles.critic,
            "teacher": roles.teacher,
        }
        pools = {s: layout.train_pool if h == "trainer" else EXTERNAL for s, h in hosts.items()}
        signals = scenario.algorithm.signals
        self.bit: dict[str, int] = {s: 1 << i for i, s in enumerate(signals)}
        self.external = tuple(s for s in signals if pools[s] == EXTERNAL)
        """Signals that can be asked for as soon as a trajectory is generated."""
        self.on_trainer = tuple(s for s in signals if pools[s] != EXTERNAL)
        """Signals that wait for the training pool, in the order in which they are computed."""
        self.all_missing = (1 << len(signals)) - 1
        self.trainer_bits = sum(self.bit[s] for s in self.on_trainer)


def back_to_generation(alone: bool, batch_available: bool, wanting: int, min_pending: int) -> bool:
    """Whether a shared pool leaves training when the trainer is free.

    Colocated, or no other engine is left: always (nothing else generates). Hybrid: if no batch is available and at
    least `min_pending` trajectories could use its engines."""
    return alone or (not batch_available and wanting >= min_pending)
