"""A batch folded by its distinct versions gives the readings of its trajectories taken one by one."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.core import actions as do
from testbed.metrics.batch import MEASURE_NAMES, BatchFold, BatchTotals
from testbed.metrics.staleness import Sizes, at_completion, at_dequeue
from testbed.metrics.trajectory import Lives
from testbed.scenario.layout import layout_of
from tests.metrics.builders import experience
from tests.support.scenarios import scenario

SIZES = Sizes(trajectories_per_batch=6, updates_per_batch=2, batches_per_version=2)
UPDATES = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
"""Times of the optimizer updates so far."""


@st.composite
def taken(draw: st.DrawFn) -> do.Experience:
    """Any history that can be: versions and update counts rise from dispatch to dequeue."""
    dispatch, oldest, done, now = sorted(draw(st.lists(st.integers(0, 5), min_size=4, max_size=4)))
    generated_t = draw(st.sampled_from([5.0, 20.0, 35.0, 60.0]))
    updates_then = sum(t <= generated_t for t in UPDATES)
    return experience(
        trajectory=draw(st.integers(0, 10_000)),
        submitted_index=draw(st.integers(0, 100)),
        dispatch_version=dispatch,
        oldest_version=oldest,
        completion_deployed=done,
        dequeue_deployed=now,
        dispatch_trainer_version=draw(st.integers(0, updates_then)),
        trainer_version=len(UPDATES),
        generated_t=generated_t,
        output_tokens=draw(st.integers(0, 900)),
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(taken(), min_size=1, max_size=20))
def test_rp_07_every_measure_at_both_events(experiences: list[do.Experience]) -> None:
    fold = BatchFold(do.Train(0, 1, 2, tuple(experiences), "fifo"), Lives(layout_of(scenario())), UPDATES, SIZES)
    totals = BatchTotals(SIZES)
    totals.add(fold)
    readings = totals.staleness()
    for measure in MEASURE_NAMES:
        then = [at_completion(e, measure, sum(t <= e.generated_t for t in UPDATES), SIZES) for e in experiences]
        now = [at_dequeue(e, measure, SIZES) for e in experiences]
        assert readings[measure].completion.histogram == dict(sorted(Counter(then).items()))
        assert readings[measure].dequeue.histogram == dict(sorted(Counter(now).items()))
        mean, largest = fold.staleness(measure, SIZES)
        assert abs(mean - sum(now) / len(now)) < 1e-9
        assert largest == max(now)
    assert totals.lengths.distribution().histogram == dict(
        sorted(Counter(e.output_tokens for e in experiences).items())
    )
