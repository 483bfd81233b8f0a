"""What the core's components share: scenario, layout, the live records, the counters, and the list that actions go to.

Decides nothing. `note` emits the reason for waiting only when it changes.
"""

from __future__ import annotations

from testbed.core.actions import Action, Note
from testbed.core.records import Engine, Group, Progress, Trajectory
from testbed.numbered import Numbered
from testbed.scenario import Scenario
from testbed.scenario.layout import Layout


class Context:
    """Mutable state of one run."""

    def __init__(self, scenario: Scenario, layout: Layout) -> None:
        self.scenario = scenario
        self.layout = layout
        self.now = 0.0
        self.out: list[Action] = []
        self.engines = [Engine(e.index, e.pool) for e in layout.engines]
        prefill = layout.prefill_engines
        self.sides = (self.engines[:prefill], self.engines[prefill:]) if prefill else (self.engines,)
        """Engines that can stand in for each other: prefill and decode, or all."""
        self.trajectories: Numbered[Trajectory] = Numbered()
        self.groups: dict[int, Group] = {}
        self.progress = Progress(
            scenario.algorithm.rollout_batch_size,
            scenario.algorithm.n_samples_per_prompt,
            scenario.weights.update_weights_interval,
        )
        self.closed = False
        """Enough batches are trained: nothing new starts."""
        self.finished = False
        self._notes: dict[str, str] = {}
        self._timers = 0

    def note(self, subject: str, state: str) -> None:
        if self._notes.get(subject) != state:
            self._notes[subject] = state
            self.out.append(Note(subject, state))

    def noted(self, subject: str) -> str:
        return self._notes.get(subject, "")

    def next_timer(self) -> int:
        self._timers += 1
        return self._timers
