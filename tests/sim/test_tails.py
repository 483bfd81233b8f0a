"""Tail handling in the simulator: what rounds, partial rollout, redundant members and Seer's order do to a synchronous
step, and what they do to the sample."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.summary import BiasBin
from tests.support.simulated import Run, linear_run, split, turn_seconds

LONG_TAIL: dict[str, Any] = {
    "cluster__gpus_per_node": 8,
    "placement": split(4, 1),
    "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 8},
    "workload__reply": {"type": "lognormal", "mean": 300, "sigma": 1.0, "group_correlation": 0.7},
    "workload__max_response_length": 4000,
    "training__cost": {"type": "rate", "samples_per_s": 1000.0},
    "run__num_rollout": 30,
}
SHORT = {"type": "over_sampling", "over_sampling_ratio": 1.5}


def run(admission: dict[str, Any], **changes: Any) -> Run:
    r = linear_run(**{**LONG_TAIL, **changes}, rollout__admission=admission)
    r.checked()
    return r


def seconds(r: Run) -> float:
    return sum(r.cycles) / len(r.cycles)


def by(r: Run, kind: str) -> list[BiasBin]:
    return [b for b in r.summary.bias if b.by == kind]


def lengths(r: Run) -> list[int]:
    return [x.output_tokens for b in r.batches for x in b.experiences]


def test_short_and_long_rounds_give_up_nothing_for_good_and_delay_the_long() -> None:
    """RollPacker: every task is trained in the end; long ones come later. Only calls of a stopped round are lost."""
    r = run(SHORT | {"long_rounds": True})
    bins = by(r, "length")
    assert bins[-1].delay_steps > 1.0 > bins[0].delay_steps
    assert seconds(r) < seconds(run({"type": "sync"}))


def test_dropping_what_is_unfinished_trains_shorter_replies_than_the_workload_has() -> None:
    """The sign that an early stop must have: the longer, the likelier given up; without a stop nothing is."""
    dropped, whole = run(SHORT | {"long_rounds": False}), run({"type": "sync"})
    assert sum(lengths(dropped)) / len(lengths(dropped)) < 0.8 * sum(lengths(whole)) / len(lengths(whole))
    common = [b for b in by(dropped, "length") if b.trained + b.given_up >= 30]
    shares = [b.given_up_share for b in common]
    assert shares[0] < 0.1 and shares[-1] > 0.6 and shares == sorted(shares)
    assert not whole.summary.bias, "no tail rule, no bias to report"


def test_given_up_shares_are_those_counted_by_hand() -> None:
    """Against a count over the journal with the plans' lengths."""
    r = run(SHORT | {"long_rounds": False}, run__num_rollout=8)
    source = linear_run(**{**LONG_TAIL, "run__num_rollout": 1}).backend.workload
    plans = {}
    for _ in range(400):
        task = source.draw()
        assert task is not None
        plans[task.index] = [sum(p.output_tokens) for p in task.plans]
    of = {a.trajectory: (a.task + 8, a.member) for _, a in r.of(do.StartTurn)}
    first = min(plans)
    counted: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for _, a in r.of(do.Retire):
        for t in a.trajectories:
            if a.reason != "run_ended" and t in of and of[t][0] - 8 >= first:
                task, member = of[t][0] - 8, of[t][1]
                counted[plans[task][member].bit_length() - 1][a.outcome != "trained"] += 1
    late = {b.low: (b.trained, b.given_up) for b in by(r, "length")}
    for exponent, (trained, gone) in counted.items():
        t, g = late[float(1 << exponent)]
        assert t >= trained and g >= gone, "tasks from the first on are in the report, those from `first` on here"


def test_partial_rollout_trains_every_planned_token() -> None:
    """What was taken back goes on where it was: its parts add up to its plan, and each token is made once."""
    r = run(SHORT | {"long_rounds": False, "partial_rollout": True})
    made: dict[int, int] = defaultdict(int)
    parts = 0
    for _, e in r.of(said.TurnFinished):
        made[e.trajectory] += e.output_tokens
        parts += e.finish_reason == "abort"
    task_of = {a.trajectory: (a.task, a.member) for _, a in r.of(do.StartTurn)}
    source = linear_run(**{**LONG_TAIL, "run__num_rollout": 1}).backend.workload
    for _ in range(100):
        task = source.draw()
        assert task is not None
        for trajectory, (index, member) in task_of.items():
            if index == task.index and any(x.trajectory == trajectory for b in r.batches for x in b.experiences):
                assert made[trajectory] == sum(task.plans[member].output_tokens)
    assert parts > 20
    lost = [e for _, e in r.of(said.TurnFailed)]
    assert sum(e.output_tokens for e in lost) == 0, "nothing that was generated is lost"
    assert r.summary.waste.share < 0.01


def test_partial_rollout_ends_a_step_early_and_makes_older_experience() -> None:
    part, sync = run(SHORT | {"long_rounds": False, "partial_rollout": True}), run({"type": "sync"})
    assert seconds(part) < 0.8 * seconds(sync)
    assert part.summary.staleness["oldest_token"].dequeue.mean > 0 == sync.summary.staleness["oldest_token"].dequeue.max
    bins = by(part, "length")
    assert bins[-1].delay_steps > bins[0].delay_steps, "the bias of partial rollout is in time"
    assert sum(b.given_up for b in bins) == 0


def test_redundant_members_shorten_the_step_and_the_replies() -> None:
    """n + r members, the first n stay: the expected length falls, and the report says for which."""
    plain, spare = run({"type": "sync"}), run({"type": "sync"}, rollout__redundant_members=2)
    assert seconds(spare) < 0.85 * seconds(plain)
    assert sum(lengths(spare)) < 0.9 * sum(lengths(plain))
    assert {len(b.experiences) for b in spare.batches} == {32}
    shares = [b.given_up_share for b in by(spare, "length") if b.trained + b.given_up >= 30]
    assert shares[-1] > 3 * shares[0] and r_share(spare) == pytest.approx(2 / 6, abs=0.02)


def r_share(r: Run) -> float:
    bins = by(r, "length")
    return sum(b.given_up for b in bins) / sum(b.given_up + b.trained for b in bins)


def test_given_up_by_difficulty_follows_length_only_where_they_are_related() -> None:
    """Rewards are drawn apart from lengths here, so shares by difficulty are alike though shares by length are not."""
    r = run(SHORT | {"long_rounds": False}, run__num_rollout=60)
    shares = [b.given_up_share for b in by(r, "difficulty") if b.trained + b.given_up >= 100]
    assert max(shares) - min(shares) < 0.12


def test_seers_order_shortens_a_step_whose_groups_are_alike() -> None:
    """Four slots an engine, members of about equal lengths: hurrying the longest leaves no straggler for the end."""
    changes: dict[str, Any] = {
        "workload__reply": {"type": "lognormal", "mean": 300, "sigma": 1.0, "group_correlation": 0.95},
        "rollout__concurrency": {"type": "per_engine", "max_concurrent_per_engine": 4},
        "algorithm": {"n_samples_per_prompt": 8, "rollout_batch_size": 16},
        "run__num_rollout": 12,
    }
    fifo = run({"type": "sync"}, **changes)
    seer = run({"type": "sync"}, **changes, rollout__turn_order={"type": "group_length"})
    assert sorted(lengths(fifo)) == sorted(lengths(seer)), "the same work"
    assert seconds(seer) < 0.95 * seconds(fifo)
    longest = max(lengths(seer))
    assert max(seer.cycles) >= turn_seconds(longest) * 0.99
