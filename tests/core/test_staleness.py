"""AS: what runs while what trains, three version numbers, and how old experience is when a batch takes it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.records import Group, Trajectory
from testbed.metrics.staleness import at_completion, at_dequeue, group_staleness
from tests.support.invariants import watched
from tests.support.scenarios import scenario
from tests.support.scripted import Scripted
from tests.support.timeline import generation, overlap_of_phases, pauses, training

SINGLE = {"n_samples_per_prompt": 1, "rollout_batch_size": 1}
CONTINUE = {"pause_generation_mode": "in_place", "kv": "keep"}


def experiences(run: Scripted) -> list[do.Experience]:
    return [x for _, a in run.of(do.Train) for x in a.experiences]


def lag(x: do.Experience) -> int:
    return x.dequeue_deployed - x.oldest_version


def test_as_01_sync_is_generate_train_sync_generate() -> None:
    run = Scripted(scenario(), copy=2.0).run()
    batch = {x.group: a.batch for _, a in run.of(do.Train) for x in a.experiences}
    served: dict[int, float] = {e.version: t for t, e in run.of(said.EngineResumed)}
    for k, (start, end) in enumerate(training(run)):
        mine = [(s, e) for s, e, g in generation(run) if batch[g] == k]
        following = [s for s, _, g in generation(run) if batch[g] == k + 1]
        assert max(e for _, e in mine) < start < end < served[k + 1]
        assert all(s >= served[k + 1] for s in following)


def test_as_02_async_generates_the_next_batch_while_this_one_trains_with_a_brief_pause() -> None:
    config = scenario(rollout__admission={"type": "one_step_ahead"}, weights__transition=CONTINUE, run__num_rollout=4)
    run = Scripted(config, turn=20.0, train=10.0, copy=0.5, prepare=3.0).run()
    batch = {x.group: a.batch for _, a in run.of(do.Train) for x in a.experiences}
    first, second = training(run)[0], [(s, e) for s, e, g in generation(run) if batch.get(g) == 1]
    assert any(s < first[1] and e > first[0] for s, e in second), "G2 overlaps the training of G1"
    interval = pauses(run, 0)[0]
    assert interval[1] - interval[0] == 0.5
    across = [(s, e) for s, e, _ in generation(run, 0) if s < interval[0] and e > interval[1]]
    assert across, "generation goes on after the pause"


def test_as_03_worked_example_v10_makes_four_responses_one_update_then_v11() -> None:
    """Ten batches bring the core to version 10; the eleventh question is the example's."""
    config = scenario(algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 1}, run__num_rollout=12)
    run = Scripted(config).run()
    start = next(t for t, e in run.of(said.EngineResumed) if e.version == 10)
    trace = [(t, x) for t, x in run.log if t >= start]
    group = next(a for _, a in trace if isinstance(a, do.DrawTask)).group
    turns = [a for _, a in trace if isinstance(a, do.StartTurn) and a.group == group]
    assert [a.member for a in turns] == [0, 1, 2, 3]
    versions = [
        e.spans for _, e in trace if isinstance(e, said.TurnFinished) and e.trajectory in {a.trajectory for a in turns}
    ]
    assert versions == [((10, 0, 50),)] * 4
    (train,) = [a for _, a in trace if isinstance(a, do.Train) and {x.group for x in a.experiences} == {group}]
    assert train.updates == 1 and [x.oldest_version for x in train.experiences] == [10] * 4
    assert [x.reward for x in train.experiences] and train.experiences[0].trainer_version == 10
    steps = [e for _, e in trace if isinstance(e, said.TrainStepFinished) and e.batch == train.batch]
    assert len(steps) == 1
    later = [e for _, e in trace if isinstance(e, said.TurnFinished)][4:]
    assert later and {v for e in later for v, _, _ in e.spans} == {11}


def test_as_04_three_optimizer_steps_and_one_sync_raise_the_deployed_version_by_one() -> None:
    config = scenario(
        algorithm={"n_samples_per_prompt": 3, "rollout_batch_size": 1, "num_steps_per_rollout": 3}, run__num_rollout=1
    )
    run = Scripted(config).run()
    p = run.core.context.progress
    assert (p.trainer_version, p.deployed) == (3, 1)
    assert run.of(do.PrepareWeights)[0][1].trainer_version == 3


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_as_05_staleness_does_not_depend_on_optimizer_steps_per_sync(steps: int) -> None:
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 2, "num_steps_per_rollout": steps},
        rollout__admission={"type": "bounded", "max_head_offpolicyness": 1},
        run__num_rollout=5,
    )
    run = Scripted(config, train=8.0 / steps).run()
    readings = [[lag(x) for x in a.experiences] for _, a in run.of(do.Train)]
    assert readings == [[0] * 4] + [[1] * 4] * 4
    assert max(x.trainer_version - x.dispatch_trainer_version for x in experiences(run)) == steps


def v3_v4_v5(**experience: Any) -> Scripted:
    """Two trajectories in flight, batches of two, turns of 6 s; the first that is dispatched at v3 takes 15 s.

    v4 reaches it while it generates; when it is done it waits for a partner, and v5 comes meanwhile.
    """
    config = scenario(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 2},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "group"},
        weights__transition=CONTINUE,
        experience=experience,
        run__num_rollout=7,
    )
    slow: list[int] = []

    def turn(a: do.StartTurn) -> float:
        if run.core.context.progress.deployed == 3 and not slow:
            slow.append(a.trajectory)
            return 15.0
        return 6.0

    run = Scripted(config, turn=turn, reward=0.0, copy=1.0, prepare=2.0, train=2.0)
    run.run()
    run.slow = slow[0]  # type: ignore[attr-defined]
    return run


def test_as_06_worked_example_v3_v4_v5_gap_one_at_completion_two_at_dequeue() -> None:
    run = v3_v4_v5()
    x = next(x for x in experiences(run) if x.trajectory == run.slow)  # type: ignore[attr-defined]
    assert (x.oldest_version, x.newest_version, x.completion_deployed) == (3, 4, 4)
    assert at_completion(x, "oldest_token", 0) == 4 - 3 == 1
    assert x.dequeue_deployed == 5 and at_dequeue(x, "oldest_token") == 5 - 3 == 2
    assert x.staleness == 2, "the decision uses the dequeue reading"


def test_as_06_the_decision_uses_the_reading_at_dequeue() -> None:
    """Bound 1: at completion the trajectory (gap 1) would pass, at dequeue (gap 2) it does not."""
    run = v3_v4_v5(staleness={"bound": 1, "action": "drop"})
    end = next(a for _, a in run.of(do.Retire) if run.slow in a.trajectories)  # type: ignore[attr-defined]
    assert (end.outcome, end.reason, end.staleness) == ("dropped", "stale", 2)


def test_as_07_age_while_generating_and_age_in_the_buffer_are_one_and_one() -> None:
    run = v3_v4_v5()
    x = next(x for x in experiences(run) if x.trajectory == run.slow)  # type: ignore[attr-defined]
    assert (x.completion_deployed - x.oldest_version, x.dequeue_deployed - x.completion_deployed) == (1, 1)
    assert at_dequeue(x, "completion") == 1


def test_er_08_versions_are_a_history_with_token_spans() -> None:
    run = v3_v4_v5()
    (event,) = [e for _, e in run.of(said.TurnFinished) if e.trajectory == run.slow]  # type: ignore[attr-defined]
    assert [v for v, _, _ in event.spans] == [3, 4]
    assert (
        event.spans[0][1] == 0 and event.spans[0][2] == event.spans[1][1] and event.spans[1][2] == event.output_tokens
    )


def test_as_08_a_group_is_as_old_as_its_oldest_turn_of_any_member() -> None:
    """Two members of three turns; one turn of one member was made by version 0, all else is newer when the batch takes
    it."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 1},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "group"},
        weights__transition=CONTINUE,
        run__num_rollout=4,
    )
    run = Scripted(config, turn=lambda a: 12.0 if a.group == 1 else 4.0, turns=2, tool=1.0, train=2.0, copy=0.0).run()
    mixed = next(a for _, a in run.of(do.Train) if {x.group for x in a.experiences} == {1})
    oldest = [x.oldest_version for x in mixed.experiences]
    deployed = mixed.experiences[0].dequeue_deployed
    assert group_staleness(mixed.experiences, "oldest_token") == deployed - min(oldest)
    spans = [e.spans for _, e in run.of(said.TurnFinished) if e.trajectory == mixed.experiences[0].trajectory]
    assert spans[0][0][0] == 0 < spans[-1][0][0], "its last turn is of a newer version than its first"
    assert run.core.experience.rule.of_lot(FakeLot(list(mixed.experiences))) == deployed  # type: ignore[arg-type]


class FakeLot:
    def __init__(self, members: list[do.Experience]) -> None:
        self.members = members


@pytest.mark.parametrize(
    ("rule", "spans", "tokens_lost"),
    [
        ({"pause_generation_mode": "in_place", "kv": "keep"}, 2, False),
        ({"pause_generation_mode": "retract", "kv": "flush"}, 2, False),
        ({"pause_generation_mode": "finish", "kv": "flush"}, 1, False),
        ({"pause_generation_mode": "abort", "kv": "flush"}, 1, True),
    ],
    ids=lambda v: v["pause_generation_mode"] if isinstance(v, dict) else "",
)
def test_as_09_going_on_after_a_sync_is_a_configuration(rule: dict[str, str], spans: int, tokens_lost: bool) -> None:
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "one_step_ahead"},
        weights__transition=rule,
        run__num_rollout=2,
    )
    run = Scripted(config, turn=lambda a: 40.0 if a.group == 1 else 10.0).run()
    (event,) = [e for _, e in run.of(said.TurnFinished) if e.trajectory == 1]
    lost = [e.output_tokens for _, e in run.of(said.TurnFailed) if e.trajectory == 1]
    assert len(event.spans) == spans and bool(lost) == tokens_lost
    assert event.spans[0][0] == (1 if tokens_lost else 0), "after an abort everything is of the new version"
    mode = rule["pause_generation_mode"]
    assert {a.mode for _, a in run.of(do.PauseEngine)} == {"retract" if mode == "finish" else mode}
    assert bool(run.of(do.FlushCache)) == (rule["kv"] == "flush")


def test_as_10_waiting_less_costs_staleness() -> None:
    """The same work: sync waits, async does not; the report needs both sides."""
    results = []
    for admission in ({"type": "sync"}, {"type": "bounded", "max_head_offpolicyness": 2}):
        config = scenario(rollout__admission=admission, run__num_rollout=8, weights__transition=CONTINUE)
        run = Scripted(config, train=10.0).run()
        results.append((run.records[-1][0].t, sum(lag(x) for x in experiences(run))))
    (sync_time, sync_age), (async_time, async_age) = results
    assert sync_age == 0 < async_age and async_time < sync_time


def test_as_11_sync_leaves_each_side_idle_while_the_other_works() -> None:
    run = Scripted(scenario(run__num_rollout=5), turn=10.0, reward=0.0, train=5.0, copy=0.0).run()
    span = training(run)[-1][1]
    trains = sum(end - start for start, end in training(run))
    generates = sum(end - start for start, end, _ in generation(run, 0) if end <= span) / 2  # two turns at a time
    assert (trains / span, generates / span) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert overlap_of_phases(run) == 0


@pytest.mark.parametrize("admission", ["sync", "one_step_ahead", "bounded", "fully_async"])
def test_as_12_every_trained_token_has_a_version_and_every_version_its_times(admission: str) -> None:
    config = scenario(rollout__admission={"type": admission}, weights__transition=CONTINUE, run__num_rollout=5)
    run = Scripted(config, turn=lambda a: 7.0 + a.trajectory % 9).run()
    spans: dict[int, int] = {}
    versions = set()
    for _, e in run.of(said.TurnFinished):
        spans[e.trajectory] = spans.get(e.trajectory, 0) + sum(end - start for _, start, end in e.spans)
        versions |= {v for v, _, _ in e.spans}
    assert all(spans[x.trajectory] == x.output_tokens for x in experiences(run))
    published = {a.version for _, a in run.of(do.PrepareWeights)}
    effective = {e.version for _, e in run.of(said.EngineResumed)}
    assert versions - {0} <= published & effective


# --- the admission bound ----------------------------------------------------------------------------------------------


def bounded(eta: int, order: str, batch: int, interval: int = 1, drop: bool = False) -> Any:
    return scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": batch},
        placement={"mode": "disaggregated", "rollout_num_gpus": 2, "actor_num_gpus": 2},
        rollout__admission={"type": "bounded", "max_head_offpolicyness": eta},
        experience__selection={"order": {"type": order}, "filter_zero_variance": drop},
        weights__update_weights_interval=interval,
        weights__transition=CONTINUE,
        run__num_rollout=8,
    )


def slow_now_and_then(seed: int) -> Any:
    r = random.Random(seed)
    return lambda a: r.choice((3.0, 5.0, 9.0, 120.0))


@settings(max_examples=40, deadline=None)
@given(eta=st.integers(0, 3), batch=st.integers(1, 3), seed=st.integers(0, 10**6), drop=st.booleans())
def test_as_13_in_submission_order_staleness_never_exceeds_eta(eta: int, batch: int, seed: int, drop: bool) -> None:
    config = bounded(eta, "oldest_first", batch, drop=drop)
    r = random.Random(seed)
    run = Scripted(config, turn=slow_now_and_then(seed), values=lambda i: float(r.random() < 0.5)).run()
    watch = watched(config, run.records)
    assert watch.batches == 8
    assert max(lag(x) for x in experiences(run)) <= eta
    submitted = [(x.group, a.batch) for _, a in run.of(do.Train) for x in a.experiences]
    assert submitted == sorted(submitted), "batches follow the order of submission"


@settings(max_examples=25, deadline=None)
@example(interval=2, seed=3972)
@given(interval=st.integers(2, 3), seed=st.integers(0, 10**6))
def test_as_13_the_bound_counts_publications_when_several_batches_make_one(interval: int, seed: int) -> None:
    config = bounded(2, "oldest_first", 1, interval)
    run = Scripted(config, turn=slow_now_and_then(seed)).run()
    assert max(lag(x) for x in experiences(run)) <= 2


def test_as_13_submitted_groups_stay_within_the_formula() -> None:
    """N_submitted <= (v + eta + 1) B at every submission."""
    eta, batch = 2, 3
    run = Scripted(bounded(eta, "oldest_first", batch), turn=slow_now_and_then(7))
    tell, submitted = run.tell, 0

    def counting(event: said.Event) -> list[do.Action]:
        nonlocal submitted
        actions = tell(event)
        submitted += sum(isinstance(a, do.DrawTask) for a in actions)
        assert submitted <= (run.core.context.progress.deployed + eta + 1) * batch
        return actions

    run.tell = counting  # type: ignore[method-assign]
    run.run()
    assert submitted > 8 * batch


def test_as_13_eta_zero_is_synchronous_and_on_policy() -> None:
    runs = [
        Scripted(scenario(rollout__admission=admission)).run()
        for admission in ({"type": "sync"}, {"type": "bounded", "max_head_offpolicyness": 0})
    ]
    starts = [[(t, a.trajectory, a.engine) for t, a in run.of(do.StartTurn)] for run in runs]
    assert starts[0] == starts[1] and {lag(x) for x in experiences(runs[1])} == {0}


@pytest.mark.parametrize(("order", "worst"), [("fifo", 4), ("oldest_first", 1)])
def test_as_13_in_completion_order_a_slow_sample_breaks_the_bound(order: str, worst: int) -> None:
    """eta = 1, B = 1. Group 0 takes 100 s; the others 10 s + 1 s score + 5 s training + 1 s copy, one version every 17
    s."""
    config = bounded(1, order, 1)
    run = Scripted(config, turn=lambda a: 62.0 if a.group == 0 else 10.0).run()
    assert max(lag(x) for x in experiences(run)) == worst
    slow = next(x for x in experiences(run) if x.group == 0)
    assert lag(slow) == (worst if order == "fifo" else 0)


# --- other rules ------------------------------------------------------------------------------------------------------


AGE_RULES: dict[str, dict[str, Any]] = {
    "window": {"selection": {"order": {"type": "windowed_fifo", "window": 1}}},
    "age": {"staleness": {"measure": "dispatch", "bound": 1, "action": "drop"}},
}
"""NeMo RL's rule over the dispatch version: as a selection window, and as a staleness bound."""


@pytest.mark.parametrize(("step", "used"), [(10, True), (11, True), (12, False)])
@pytest.mark.parametrize("rule", AGE_RULES)
def test_as_15_max_age_one_v10_is_used_at_steps_10_and_11_and_dropped_at_12(rule: str, step: int, used: bool) -> None:
    config = scenario(algorithm=SINGLE, experience=AGE_RULES[rule], run__num_rollout=20)
    core = Scripted(config).core
    experience, p = core.experience, core.context.progress
    group = Group(0, 0.0, "test")
    t = Trajectory(0, group, 0, 0.0, 0)
    group.members.append(t)
    core.context.groups[0], core.context.trajectories[0] = group, t
    experience.expect(group)
    group.state, t.state = "generated", "generated"
    t.dispatch_version = t.oldest_version = t.newest_version = t.completion_deployed = 10
    experience.dispatched(t)
    experience.unscored = 1
    experience.signal_ready(said.SignalReady(0.0, "reward", (0,), (1.0,)))
    p.deployed = step
    batch = experience.take_batch(1)
    assert (batch is not None) == used
    if not used:
        (end,) = [a for a in core.context.out if isinstance(a, do.Retire)]
        assert (end.outcome, end.reason) == ("dropped", "outside_window" if rule == "window" else "stale")


@pytest.mark.parametrize("rule", AGE_RULES)
def test_as_15_no_batch_of_a_run_is_older_than_the_maximum_age(rule: str) -> None:
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4, "submission_granularity": "group"},
        weights__transition=CONTINUE,
        experience=AGE_RULES[rule],
        run__num_rollout=16,
    )
    run = Scripted(config, turn=lambda a: 2.0 + 5.0 * (a.trajectory % 4), reward=0.0, train=3.0, copy=0.0).run()
    ages = {x.dequeue_deployed - x.dispatch_version for x in experiences(run)}
    assert ages == {0, 1} and [a for _, a in run.of(do.Retire) if a.outcome == "dropped"]


def test_as_16_the_longest_response_sets_the_synchronous_step_and_hardly_the_asynchronous_one() -> None:
    def seconds(admission: dict[str, Any], tail: float) -> float:
        config = scenario(rollout__admission=admission, weights__transition=CONTINUE, run__num_rollout=20)
        run = Scripted(config, turn=lambda a: tail if a.trajectory % 16 == 3 else 10.0, train=2.0).run()
        return run.records[-1][0].t

    sync = [seconds({"type": "sync"}, tail) for tail in (40.0, 80.0)]
    free = {"type": "fully_async", "async_max_concurrent_groups": 6}
    ahead = [seconds(free, tail) for tail in (40.0, 80.0)]
    assert sync[1] - sync[0] == 5 * 40.0, "every fourth step waits for the tail"
    assert ahead[1] - ahead[0] < 0.2 * (sync[1] - sync[0])


@pytest.mark.parametrize("action", ["mask", "correct", "none"])
def test_what_is_too_old_is_masked_corrected_or_only_counted(action: str) -> None:
    run = v3_v4_v5(staleness={"bound": 1, "action": action})
    x = next(x for x in experiences(run) if x.trajectory == run.slow)  # type: ignore[attr-defined]
    (event,) = [e for _, e in run.of(said.TurnFinished) if e.trajectory == x.trajectory]
    v3_tokens = event.spans[0][2]
    assert x.staleness == 2 and x.corrected == (action == "correct")
    assert x.masked_tokens == (v3_tokens if action == "mask" else 0) and 0 < v3_tokens < 50


@pytest.mark.parametrize(("share", "reason"), [(1.0, "completed"), (0.5, "completed"), (0.02, "too_many_dropped")])
def test_a_run_that_drops_more_than_the_allowed_share_ends_and_says_so(share: float, reason: str) -> None:
    """Every eighth group is slow, and too old in the end."""
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4, "submission_granularity": "group"},
        experience__staleness={"bound": 4, "action": "drop", "max_dropped_share": share},
        run__num_rollout=60,
    )
    run = Scripted(config, turn=lambda a: 300.0 if a.group % 8 == 7 else 40.0).run()
    assert watched(config, run.records).finished == reason
    ends = [a for _, a in run.of(do.Retire)]
    dropped, trained = (sum(a.outcome == outcome for a in ends) for outcome in ("dropped", "trained"))
    assert (dropped > share * (dropped + trained)) == (reason == "too_many_dropped")


def test_wait_holds_the_publication_until_the_old_experience_is_used() -> None:
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "group"},
        weights__transition=CONTINUE,
        experience__staleness={"bound": 1, "action": "wait"},
        run__num_rollout=20,
    )
    run = Scripted(config, turn=lambda a: 100.0 if a.group == 0 else 10.0).run()
    watched(config, run.records)
    assert max(lag(x) for x in experiences(run)) <= 1
    slow = next(t for t, e in run.of(said.TurnFinished) if e.trajectory == 0)
    assert len([t for t, _ in run.of(do.PrepareWeights) if t < slow]) == 1
