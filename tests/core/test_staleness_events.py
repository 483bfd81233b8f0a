"""When staleness is decided: at dequeue, at completion, or before a publication; on the scripted backend."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.core import actions as do
from tests.support.scenarios import scenario
from tests.support.scripted import Scripted

SLOW_GROUP = 2
"""The third group takes three times as long as any other, so it is the one that ages."""


def run(event: str, action: str = "drop", bound: int = 0) -> Scripted:
    """One trajectory a group, one group a batch, two in flight; a version per batch; requests go on over updates."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 1},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2},
        experience__staleness={"bound": bound, "action": action, "event": event},
        weights__transition={"pause_generation_mode": "in_place", "kv": "keep"},
        run__num_rollout=8,
    )
    return Scripted(config, turn=lambda a: 30.0 if a.task == SLOW_GROUP else 6.0, reward=0.0, train=3.0, copy=0.5).run()


def retired(run: Scripted, outcome: str, reason: str) -> list[tuple[float, Any]]:
    return [(t, a) for t, a in run.of(do.Retire) if (a.outcome, a.reason) == (outcome, reason)]


def test_as_06_decided_at_dequeue_the_slow_group_is_dropped_after_it_was_generated() -> None:
    dropped = retired(run("dequeue"), "dropped", "stale")
    assert SLOW_GROUP in {a.group for _, a in dropped}
    assert all(a.staleness > 0 and a.output_tokens > 0 for _, a in dropped)


def test_as_06_decided_at_completion_nothing_is_dropped_later() -> None:
    """A group that was fresh when ready is trained although a version came while it waited."""
    late = run("completion")
    used = [x for _, a in late.of(do.Train) for x in a.experiences]
    assert all(x.completion_deployed - x.oldest_version <= 0 for x in used), (
        "too old at completion never reaches a batch"
    )
    assert SLOW_GROUP in {a.group for _, a in retired(late, "dropped", "stale")}


def test_as_09_decided_before_a_publication_the_slow_group_is_cancelled_in_flight() -> None:
    cancelled = run("publication")
    aborted = retired(cancelled, "aborted", "stale")
    assert SLOW_GROUP in {a.group for _, a in aborted}
    asked = {a.trajectory: t for t, a in cancelled.of(do.AbortTurn)}
    pauses = [t for t, _ in cancelled.of(do.PauseEngine)]
    for t, a in aborted:
        assert asked[a.trajectories[0]] <= t
        assert asked[a.trajectories[0]] in pauses, "asked for before the engines pause, at the same instant"
    longest = max(t for t, a in aborted if a.group == SLOW_GROUP)
    assert longest < 30.0, "it did not run to its end"


@pytest.mark.parametrize("event", ["dequeue", "completion", "publication"])
def test_br_13_retry_draws_the_task_again_at_every_event(event: str) -> None:
    again = [a.task for _, a in run(event, "retry").of(do.DrawTask) if a.task >= 0]
    assert SLOW_GROUP in again
