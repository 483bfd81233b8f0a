"""What measures of staleness read: the versions of one trajectory, and what turns counts into versions.

It refuses to know the measures, which are in `staleness`.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class VersionSet(NamedTuple):
    """The versions of one trajectory, as measures read them. A batch has few different ones, so each is read once.

    `submitted_index` is rounded down to whole versions, which is all that any measure looks at.
    """

    oldest_version: int
    dispatch_version: int
    completion_deployed: int
    dequeue_deployed: int
    trainer_version: int
    dispatch_trainer_version: int
    submitted_index: int
    completion_trainer_version: int


class Sizes(Struct, frozen=True):
    """What turns counts of trajectories and updates into batches and versions."""

    trajectories_per_batch: int = 1
    updates_per_batch: int = 1
    """`num_steps_per_rollout`."""
    batches_per_version: int = 1
    """`update_weights_interval`."""


UNIT = Sizes()
"""One trajectory a batch, one update a batch, one batch a version."""
