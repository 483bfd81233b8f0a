"""What is too old, and then what?

A rule is measure x bound x action, read at dequeue. The measures themselves are formulas in
`testbed.metrics.staleness`; this module only says what follows from a reading."""

from __future__ import annotations

from testbed.core.records import Lot, Trajectory
from testbed.metrics.staleness import MEASURES, oldest_token
from testbed.metrics.version_sets import Sizes
from testbed.scenario.experience import Staleness


class StalenessRule:
    """The decision over one lot at dequeue."""

    def __init__(self, config: Staleness, sizes: Sizes) -> None:
        self.measure = config.measure
        self.bound = config.bound
        self.action = config.action
        self._measure = MEASURES[config.measure]
        self._sizes = sizes
        self.at_completion = config.event == "completion"
        """Decided when a lot becomes ready, and not again."""
        self.cancels_in_flight = config.event == "publication" and config.action in ("drop", "retry")

    def reading(self, trajectory: Trajectory) -> int:
        """Staleness of one trajectory whose dequeue fields are set."""
        return self._measure(trajectory, trajectory.dequeue_deployed, trajectory.trainer_version, self._sizes)

    def of_lot(self, lot: Lot) -> int:
        """A group is as stale as its stalest member (max over samples and turns)."""
        return max(self.of_members(lot))

    def of_members(self, lot: Lot) -> list[int]:
        """`reading` of each member."""
        if self.measure == "oldest_token":  # the default: without a call by its address and look-ups by name
            return [oldest_token(m.dequeue_deployed, m.oldest_version) for m in lot.members]
        measure, sizes = self._measure, self._sizes
        return [measure(m, m.dequeue_deployed, m.trainer_version, sizes) for m in lot.members]

    def verdict(self, reading: int) -> str:
        """`use`, or the action if a reading is above the bound: `drop`, `retry`, `mask`, `correct`, `none`, `wait`."""
        if self.bound is None or reading <= self.bound:
            return "use"
        return self.action

    def too_old_for(self, version: int, dispatch_version: int) -> bool:
        """Whether experience dispatched under `dispatch_version` is over the bound once `version` is deployed."""
        return self.bound is not None and version - dispatch_version > self.bound

    def holds_publication(self, deployed: int, oldest_active: int | None) -> bool:
        """`wait`: whether publishing one more version would push the oldest unused experience over the bound."""
        if self.action != "wait" or self.bound is None or oldest_active is None:
            return False
        return deployed + 1 - oldest_active > self.bound

    def masked_tokens(self, trajectory: Trajectory, deployed: int) -> int:
        """Tokens made by versions older than `deployed - bound` (action `mask`)."""
        if self.bound is None:
            return 0
        oldest_allowed = deployed - self.bound
        return sum(n for version, n in trajectory.token_versions or () if version < oldest_allowed)
