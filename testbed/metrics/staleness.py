"""The seven readings of "staleness" in use, each a formula over the versions that a trajectory carries.

Every measure is read at two events, completion and dequeue; the reading at dequeue is the one decided on. What differs
between the events is handed in as `deployed` (published version that serves) and `trainer_version` (optimizer updates
so far). The module refuses to know bounds, and what happens to data beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from testbed.metrics.version_sets import UNIT, Sizes
from testbed.scenario.experience import Measure
from testbed.scenario.scenario import Scenario


class Versions(Protocol):
    """What a measure reads of a trajectory: an `Experience`, or the core's own record, whose fields have the same
    names."""

    @property
    def oldest_version(self) -> int: ...
    @property
    def dispatch_version(self) -> int: ...
    @property
    def completion_deployed(self) -> int: ...
    @property
    def dequeue_deployed(self) -> int: ...
    @property
    def trainer_version(self) -> int: ...
    @property
    def dispatch_trainer_version(self) -> int: ...
    @property
    def submitted_index(self) -> int: ...


def sizes_of(scenario: Scenario) -> Sizes:
    return Sizes(
        scenario.algorithm.trajectories_per_batch,
        scenario.algorithm.num_steps_per_rollout,
        scenario.weights.update_weights_interval,
    )


def oldest_token(deployed: int, oldest: int) -> int:
    """deployed - oldest: published versions. The seeds' definition, and the default; Miles, verl V1.

    Of a group, `oldest` is the oldest version in any turn of any member. Optimizer updates do not enter.
    """
    return deployed - oldest


def _oldest_token(v: Versions, deployed: int, trainer_version: int, sizes: Sizes) -> int:
    return deployed - v.oldest_version


def dispatch(v: Versions, deployed: int, trainer_version: int, sizes: Sizes) -> int:
    """deployed - version that served when the first turn was sent, queue time included. prime-rl, NeMo RL
    SingleController."""
    return deployed - v.dispatch_version


def completion(v: Versions, deployed: int, trainer_version: int, sizes: Sizes) -> int:
    """deployed - deployed at completion: what arose in the buffer alone, so 0 at completion. What a system sees that
    stamps the version after the reply (AReaL before #1569)."""
    return deployed - v.completion_deployed


def create_step(v: Versions, deployed: int, trainer_version: int, sizes: Sizes) -> int:
    """floor(trainer version / k) - floor(trainer version at dispatch / k), k updates a batch: pipeline steps since the
    prompt began. ROLL (window: ceil(async_generation_ratio)), NeMo RL legacy async."""
    k = sizes.updates_per_batch
    return trainer_version // k - v.dispatch_trainer_version // k


def admission_count(v: Versions, deployed: int, trainer_version: int, sizes: Sizes) -> int:
    """max(0, floor(submitted index / (B b)) - dispatch version), B trajectories a batch, b batches a version.

    The smallest eta whose bound N_submitted <= (version + eta + 1) B admits this trajectory: a count over the whole
    run, fixed at dispatch, so both readings are equal. AReaL, SkyRL; verl fully_async in fractions. Trajectories that
    were dropped since count as submitted.
    """
    return max(0, v.submitted_index // (sizes.trajectories_per_batch * sizes.batches_per_version) - v.dispatch_version)


def trainer_steps(v: Versions, deployed: int, trainer_version: int, sizes: Sizes) -> int:
    """trainer version - trainer version at dispatch: optimizer updates in between, published or not."""
    return trainer_version - v.dispatch_trainer_version


def samples(v: Versions, deployed: int, trainer_version: int, sizes: Sizes) -> int:
    """(trainer version - trainer version at dispatch) B / k: trajectories trained in between, B a batch in k updates.

    PipelineRL, whose version is the number of samples trained.
    """
    return (trainer_version - v.dispatch_trainer_version) * sizes.trajectories_per_batch // sizes.updates_per_batch


MEASURES: Mapping[Measure, Callable[[Versions, int, int, Sizes], int]] = {
    "oldest_token": _oldest_token,
    "dispatch": dispatch,
    "completion": completion,
    "create_step": create_step,
    "admission_count": admission_count,
    "trainer_steps": trainer_steps,
    "samples": samples,
}
"""Name in `experience.staleness.measure` -> (trajectory, deployed, trainer version, sizes) -> staleness."""


def at_completion(v: Versions, measure: Measure, trainer_version: int, sizes: Sizes = UNIT) -> int:
    """The reading when the trajectory was generated; `trainer_version` of that moment, which no trajectory carries."""
    return MEASURES[measure](v, v.completion_deployed, trainer_version, sizes)


def at_dequeue(v: Versions, measure: Measure, sizes: Sizes = UNIT) -> int:
    """The reading when a batch takes the trajectory: the one that is decided on."""
    return MEASURES[measure](v, v.dequeue_deployed, v.trainer_version, sizes)


def group_staleness(members: Iterable[Versions], measure: Measure, sizes: Sizes = UNIT) -> int:
    """The reading of a group at dequeue: the largest of its members'."""
    return max(at_dequeue(v, measure, sizes) for v in members)
