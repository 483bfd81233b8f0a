"""The seven measures, on the worked examples of the requirements."""

from __future__ import annotations

from typing import get_args

import pytest

from testbed.core.records import Group, Trajectory
from testbed.metrics.staleness import (
    MEASURES,
    Sizes,
    at_completion,
    at_dequeue,
    group_staleness,
    oldest_token,
)
from testbed.scenario.experience import Measure
from tests.metrics.builders import experience


def test_every_measure_that_a_scenario_may_name_has_a_formula() -> None:
    assert set(MEASURES) == set(get_args(Measure))


def test_as_04_three_optimizer_steps_and_one_sync_raise_the_deployed_version_by_one() -> None:
    e = experience(
        dispatch_version=7, oldest_version=7, dequeue_deployed=8, dispatch_trainer_version=21, trainer_version=24
    )
    sizes = Sizes(trajectories_per_batch=12, updates_per_batch=3)
    assert at_dequeue(e, "oldest_token", sizes) == 1
    assert at_dequeue(e, "trainer_steps", sizes) == 3
    assert at_dequeue(e, "create_step", sizes) == 1


@pytest.mark.parametrize("k", [1, 2, 8])
def test_as_05_staleness_does_not_depend_on_optimizer_steps_per_sync(k: int) -> None:
    e = experience(
        oldest_version=4,
        completion_deployed=5,
        dequeue_deployed=6,
        dispatch_trainer_version=4 * k,
        trainer_version=6 * k,
    )
    sizes = Sizes(trajectories_per_batch=8, updates_per_batch=k)
    assert at_completion(e, "oldest_token", 5 * k, sizes) == 1
    assert at_dequeue(e, "oldest_token", sizes) == 2
    assert at_dequeue(e, "create_step", sizes) == 2
    assert at_dequeue(e, "trainer_steps", sizes) == 2 * k


def test_as_06_start_v3_sync_to_v4_in_between_and_v5_while_it_waits() -> None:
    e = experience(dispatch_version=3, oldest_version=3, newest_version=4, completion_deployed=4, dequeue_deployed=5)
    assert at_completion(e, "oldest_token", 0) == 4 - 3 == 1
    assert at_dequeue(e, "oldest_token") == 5 - 3 == 2
    assert oldest_token(deployed=5, oldest=3) == 2


def test_as_07_what_arose_in_generation_and_what_in_the_buffer_add_up() -> None:
    e = experience(dispatch_version=3, oldest_version=3, completion_deployed=4, dequeue_deployed=5)
    in_generation, in_buffer = at_completion(e, "oldest_token", 0), at_dequeue(e, "completion")
    assert (in_generation, in_buffer) == (1, 1)
    assert at_completion(e, "completion", 0) == 0
    assert in_generation + in_buffer == at_dequeue(e, "oldest_token")


def test_as_08_a_group_is_as_stale_as_its_oldest_turn() -> None:
    members = [experience(oldest_version=v, dequeue_deployed=6) for v in (5, 5, 3, 5)]
    assert group_staleness(members, "oldest_token") == 6 - 3


def test_dispatch_counts_time_in_the_queue_where_oldest_token_does_not() -> None:
    e = experience(dispatch_version=2, oldest_version=4, completion_deployed=4, dequeue_deployed=5)
    assert at_dequeue(e, "dispatch") == 3
    assert at_completion(e, "dispatch", 0) == 2
    assert at_dequeue(e, "oldest_token") == 1


def test_create_step_counts_from_the_batch_that_was_in_training_at_dispatch() -> None:
    """ROLL: current step - step at which the prompt began. 4 updates a batch; dispatched in batch 2, used by batch
    4."""
    sizes = Sizes(updates_per_batch=4)
    for updates_done in (8, 9, 11):
        e = experience(dispatch_trainer_version=updates_done, trainer_version=16)
        assert at_dequeue(e, "create_step", sizes) == 2


@pytest.mark.parametrize(
    ("index", "version", "needed"), [(0, 0, 0), (7, 0, 0), (8, 0, 1), (15, 0, 1), (16, 0, 2), (16, 1, 1), (16, 5, 0)]
)
def test_as_13_admission_count_is_the_smallest_eta_that_admits(index: int, version: int, needed: int) -> None:
    """AReaL: N_submitted <= (version + eta + 1) B, with N counting this trajectory; here B = 8."""
    n_submitted = index + 1
    assert n_submitted <= (version + needed + 1) * 8
    assert needed == 0 or n_submitted > (version + needed) * 8
    e = experience(
        submitted_index=index, dispatch_version=version, completion_deployed=version, dequeue_deployed=version + 9
    )
    sizes = Sizes(trajectories_per_batch=8)
    assert at_completion(e, "admission_count", 0, sizes) == at_dequeue(e, "admission_count", sizes) == needed


def test_admission_count_of_a_synchronous_run_is_zero_with_two_batches_a_version() -> None:
    sizes = Sizes(trajectories_per_batch=8, batches_per_version=2)
    for index in range(64):
        e = experience(submitted_index=index, dispatch_version=index // 16)
        assert at_dequeue(e, "admission_count", sizes) == 0


def test_samples_counts_trajectories_trained_between_dispatch_and_use() -> None:
    """PipelineRL's version is the number of samples trained: 3 updates of 16 samples (64 in 4 updates) are 48."""
    e = experience(dispatch_trainer_version=5, trainer_version=8)
    assert at_dequeue(e, "samples", Sizes(trajectories_per_batch=64, updates_per_batch=4)) == 48


def test_measures_read_the_records_of_the_core_too() -> None:
    t = Trajectory(0, Group(0, 0.0, ""), 0, 0.0, 0)
    t.oldest_version, t.dequeue_deployed = 3, 5
    assert at_dequeue(t, "oldest_token") == 2
