"""Named regressions: the failures that users of RL frameworks report most, and defects of this core that were fixed
once.

The first seven names are those of the field study: update_deadlock, mixed_version_call, stale_prefix_after_in_place,
flush_refused_by_waiting_queue, group_member_aborted, retry_orphan; router_hash_thrash lives with the routing policies.
"""

from __future__ import annotations

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.errors import ProtocolError
from tests.support.invariants import watched
from tests.support.scenarios import COLOCATED, scenario
from tests.support.scripted import Scripted

SINGLE = {"n_samples_per_prompt": 1, "rollout_batch_size": 1}


def test_update_deadlock_a_collective_with_a_hung_rank_times_out_and_publications_never_interleave() -> None:
    config = scenario(weights__timeout_s=30.0, run__num_rollout=4)
    run = Scripted(config)
    run.drops = lambda a: isinstance(a, do.CopyWeights) and (a.engine, a.version) == (1, 2)
    run.run()
    assert watched(config, run.records).batches == 4
    hung = next(t for t, a in run.of(do.CopyWeights) if (a.engine, a.version) == (1, 2))
    before = {e.version for t, e in run.of(said.EngineResumed) if hung < t <= hung + 31}
    assert before == {1}, "nobody resumes with version 2 before all are ready"
    under_way = 0
    for _, x in run.of(do.PauseEngine, said.EngineResumed, do.PrepareWeights):
        under_way += {do.PauseEngine: 1, said.EngineResumed: -1}.get(type(x), 0)
        assert not (isinstance(x, do.PrepareWeights) and under_way), "one publication at a time"


def test_mixed_version_call_carries_its_spans_and_not_the_last_version() -> None:
    """A call that crosses two updates: its oldest version is the one before the first, not what the engine serves at
    the end."""
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "group"},
        weights__transition={"pause_generation_mode": "in_place", "kv": "keep"},
        run__num_rollout=4,
    )
    run = Scripted(config, turn=lambda a: 30.0 if a.group == 0 else 10.0).run()
    (call,) = [e for _, e in run.of(said.TurnFinished) if e.trajectory == 0]
    assert [v for v, _, _ in call.spans] == [0, 1, 2]
    x = next(x for _, a in run.of(do.Train) for x in a.experiences if x.trajectory == 0)
    assert (x.oldest_version, x.newest_version, x.dispatch_version) == (0, 2, 0)
    assert x.dequeue_deployed - x.oldest_version == 2


def test_mixed_version_call_with_a_gap_or_a_version_that_falls_is_refused() -> None:
    for spans in (((0, 0, 20), (0, 25, 50)), ((0, 0, 30), (0, 20, 50)), ((1, 0, 20), (0, 20, 50)), ((0, 0, 40),)):
        run = Scripted(scenario(algorithm=SINGLE))
        run.run(until=5)
        with pytest.raises(ProtocolError, match="spans"):
            run.core.handle(said.TurnFinished(10.0, 0, 0, 0, 100, 50, spans, 0, 1.0, 0.0, "stop"))


def test_stale_prefix_after_in_place_is_refused_for_new_requests_unless_the_rule_keeps_it() -> None:
    """`in_place` leaves the prefix cache alone: with a salt no new request may match blocks of the old version."""
    for kv, allowed in (("salt_by_version", False), ("keep", True)):
        config = scenario(algorithm=SINGLE, weights__transition={"pause_generation_mode": "in_place", "kv": kv})
        run = Scripted(config)
        run.run(until=17.5)
        start = run.of(do.StartTurn)[-1][1]
        e = said.TurnFinished(
            20.0, start.trajectory, 0, start.engine, 100, 50, ((1, 0, 50),), 64, 18.0, 18.0, "stop", kv_version=0
        )
        if allowed:
            run.core.handle(e)
        else:
            with pytest.raises(ProtocolError, match="transition rule"):
                run.core.handle(e)


def test_stale_prefix_after_in_place_does_not_concern_the_request_that_goes_on() -> None:
    """It was sent to the old version and goes on with the KV it has."""
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "one_step_ahead"},
        weights__transition={"pause_generation_mode": "in_place", "kv": "salt_by_version"},
    )
    run = Scripted(config, turn=lambda a: 100.0 if a.group == 1 else 10.0)
    run.run(until=50)
    live = next(a for _, a in run.of(do.StartTurn) if a.group == 1)
    spans = ((0, 0, 20), (1, 20, 50))
    actions = run.core.handle(
        said.TurnFinished(60.0, live.trajectory, 0, live.engine, 100, 50, spans, 64, 12.0, 12.0, "stop", kv_version=0)
    )
    assert do.ComputeSignals("reward", (live.trajectory,), -1) in actions, "it is taken as generated"


def test_flush_refused_by_waiting_queue_keeps_the_old_version_and_the_job_alive() -> None:
    """The engine refuses the flush: the update is given up, the run goes on, the next publication tries again."""
    config = scenario(run__num_rollout=3)
    run = Scripted(config)
    refused: list[int] = []

    def flush(a: do.FlushCache) -> None:
        if not refused:
            refused.append(a.engine)
            run.at(run.now, lambda t: said.WeightUpdateFailed(t, a.engine, 1, "flush", "a batch is running"))

    run._on_FlushCache = flush  # type: ignore[attr-defined]
    run.run()
    assert refused and watched(config, run.records).batches == 3
    assert run.core.context.progress.deployed == 2
    pauses = [t for t, _ in run.of(said.EnginePaused)]
    flushes = [t for t, _ in run.of(do.FlushCache)]
    assert all(any(p <= f for p in pauses) for f in flushes), "flushed only once paused"


@pytest.mark.parametrize("scored_first", [True, False])
def test_group_member_aborted_leaves_a_group_of_the_others(scored_first: bool) -> None:
    """A tool kills one of three members: the group does not wait for it, and does not lose the other two."""
    config = scenario(algorithm={"n_samples_per_prompt": 3, "rollout_batch_size": 1}, run__num_rollout=1)
    run = Scripted(config, turns=2, tool=lambda a: 1.0, turn=lambda a: 10.0 + 20 * (a.member == 1 and scored_first))
    run.seconds["tool"] = 3.0
    run.tool_fails = lambda a: a.trajectory == 1
    run.run()
    (train,) = [a for _, a in run.of(do.Train)]
    assert {x.trajectory for x in train.experiences} == {0, 2}
    end = next(a for _, a in run.of(do.Retire) if a.trajectories == (1,))
    assert (end.outcome, end.reason) == ("failed", "tool")
    watched(config, run.records)


def test_group_member_aborted_all_of_them_and_the_group_is_replaced() -> None:
    config = scenario(run__num_rollout=2)
    run = Scripted(config, turns=2)
    run.tool_fails = lambda a: a.trajectory in (0, 1)
    run.run()
    assert watched(config, run.records).batches == 2
    assert {x.group for _, a in run.of(do.Train)[:1] for x in a.experiences} == {1, 2}


def test_retry_orphan_a_lost_turn_keeps_its_request_id_and_never_runs_twice() -> None:
    config = scenario(run__num_rollout=2)
    run = Scripted(config)
    run.lose(4.0, 1)
    run.run()
    watch = watched(config, run.records)
    sent = [(a.trajectory, a.turn, a.attempt, a.engine) for _, a in run.of(do.StartTurn)]
    lost = [(t, n) for t, n, attempt, engine in sent if engine == 1]
    again = [(t, n) for t, n, attempt, engine in sent if attempt == 1]
    assert sorted(lost) == sorted(again) and len(again) == 2
    assert all(engine == 0 for _, _, attempt, engine in sent if attempt == 1) and watch.batches == 2


def test_retry_orphan_a_turn_that_is_lost_four_times_ends_its_trajectory() -> None:
    config = scenario(run__num_rollout=1)
    run = Scripted(config)
    run.turn_fails = lambda a: a.trajectory == 0
    run.run()
    assert [a.attempt for _, a in run.of(do.StartTurn) if a.trajectory == 0] == [0, 1, 2, 3]
    end = next(a for _, a in run.of(do.Retire) if a.trajectories == (0,))
    assert (end.outcome, end.reason) == ("failed", "turn_lost")
    watched(config, run.records)


def test_retry_orphan_turns_that_the_core_takes_back_use_up_no_attempt() -> None:
    """`abort` throws the turn away at every update, as often as it likes."""
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "group"},
        weights__transition={"pause_generation_mode": "abort", "kv": "flush"},
        run__num_rollout=12,
    )
    run = Scripted(config, turn=lambda a: 500.0 if a.group == 0 and a.attempt < 8 else 10.0, train=1.0).run()
    ends = [a for _, a in run.of(do.Retire) if 0 in a.trajectories]
    assert max(a.attempt for _, a in run.of(do.StartTurn) if a.trajectory == 0) > 4
    assert all(a.outcome != "failed" for a in ends)
    watched(config, run.records)


def test_retry_orphan_an_engine_that_is_given_up_has_its_turns_taken_back_and_may_answer_late() -> None:
    """Engine 1 never pauses and is removed with the turns that it still holds."""
    config = scenario(
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2},
        weights__transition={"pause_generation_mode": "in_place", "kv": "keep"},
        weights__timeout_s=20.0,
        weights__on_failure="remove_engine",
        run__num_rollout=4,
    )
    run = Scripted(config, turn=lambda a: 200.0 if a.engine == 1 and a.group >= 2 else 10.0)
    run.drops = lambda a: isinstance(a, do.PauseEngine) and a.engine == 1
    run.run()
    removed = [t for t, a in run.of(do.Note) if a.subject == "engine:1"]
    taken_back = [a for t, a in run.of(do.AbortTurn) if a.why == "engine_removed"]
    assert removed and taken_back and {a.engine for a in taken_back} == {1}
    late = [e for t, e in run.of(said.TurnFailed, said.TurnFinished) if e.engine == 1 and t >= removed[0]]
    assert late, "the engine that nobody waits for reports the abort"
    watched(config, run.records)


# --- fixed once -------------------------------------------------------------------------------------------------------


def test_a_group_filtered_last_is_replaced() -> None:
    """The only outstanding group is rejected: nothing else happens that could wake admission."""
    config = scenario(experience__selection={"filter_zero_variance": True}, run__num_rollout=1)
    run = Scripted(
        config, turn=lambda a: 20.0 if a.group == 1 else 10.0, values=lambda i: float(i % 2) if i > 3 or i < 2 else 1.0
    )
    run.run()
    assert watched(config, run.records).batches == 1
    assert {x.group for _, a in run.of(do.Train) for x in a.experiences} == {0, 2}


@pytest.mark.parametrize("admission", ["sync", "bounded"])
@pytest.mark.parametrize("advantage", ["critic", "distillation"])
def test_a_single_lost_trajectory_is_made_up_for(admission: str, advantage: str) -> None:
    """Where trajectories are taken singly, B groups minus one trajectory are no batch."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 2, "advantage": advantage},
        rollout__admission={"type": admission},
    )
    run = Scripted(config, turns=2)
    run.tool_fails = lambda a: a.trajectory == 2
    run.run()
    assert watched(config, run.records).batches == 3


@pytest.mark.parametrize("long_rounds", [True, False])
def test_over_sampling_replaces_groups_that_were_filtered_after_the_stop(long_rounds: bool) -> None:
    config = scenario(
        rollout__admission={"type": "over_sampling", "over_sampling_ratio": 1.5, "long_rounds": long_rounds},
        experience__selection={"filter_zero_variance": True},
        run__num_rollout=4,
    )
    run = Scripted(config, turn=lambda a: 5.0 + a.trajectory % 7, values=lambda i: float(i % 2) if i // 2 % 3 else 1.0)
    run.run()
    assert watched(config, run.records).batches == 4


def test_over_sampling_stops_at_a_batch_and_reruns_what_it_gave_up_in_a_long_round() -> None:
    """B = 2, ratio 1.5: three groups start, the first two that are generated stay, every second round B tasks are
    collected."""
    config = scenario(rollout__admission={"type": "over_sampling", "over_sampling_ratio": 1.5}, run__num_rollout=3)
    run = Scripted(config, turn=lambda a: 40.0 if a.task in (1, 4) else 10.0).run()
    batches = [{x.task for x in a.experiences} for _, a in run.of(do.Train)]
    assert batches == [{0, 2}, {3, 5}, {1, 4}]
    whys = [a.why for _, a in run.of(do.DrawTask)]
    assert whys == ["over_sampling:short"] * 6 + ["over_sampling:long"] * 2
    given_up = [a for _, a in run.of(do.Retire) if a.reason == "over_sampled"]
    assert {a.outcome for a in given_up} == {"aborted"} and len(given_up) == 4
    watched(config, run.records)


def test_several_publications_that_became_due_during_a_slow_one_all_count_for_admission() -> None:
    """Updates of 30 s, training of 5 s: without counting all of them N_submitted falls behind for ever."""
    config = scenario(
        rollout__admission={"type": "bounded", "max_head_offpolicyness": 3},
        weights__transition={"pause_generation_mode": "in_place", "kv": "keep"},
        weights__path={"type": "fixed", "update_weight_transfer_mode": "disk"},
        run__num_rollout=40,
    )
    run = Scripted(config, prepare=30.0)
    run.early_release = True
    run.run()
    assert watched(config, run.records).batches == 40
    assert 0 < len(run.of(do.PrepareWeights)) < 40


def test_a_held_publication_goes_out_when_the_run_closes() -> None:
    """`wait` must not wait for experience that nothing will use any more."""
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "group"},
        experience__staleness={"bound": 1, "action": "wait"},
        run__num_rollout=3,
    )
    run = Scripted(config, turn=lambda a: 1000.0 if a.group == 0 else 10.0).run()
    assert run.core.finished and run.core.context.progress.deployed >= 2
    watched(config, run.records)


def test_multi_turn_trajectories_may_meet_an_older_engine_while_waves_go_on() -> None:
    config = scenario(
        placement={"mode": "disaggregated", "rollout_num_gpus": 3, "actor_num_gpus": 1},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4},
        rollout__routing={"type": "round_robin"},
        weights__participation={"type": "waves", "size": 1},
        run__num_rollout=6,
    )
    run = Scripted(config, turn=lambda a: 1.0 + a.trajectory % 3, turns=6, tool=0.5, copy=6.0).run()
    assert watched(config, run.records).batches == 6
    histories: dict[int, list[int]] = {}
    for _, e in run.of(said.TurnFinished):
        histories.setdefault(e.trajectory, []).extend(v for v, _, _ in e.spans)
    assert any(h != sorted(h) for h in histories.values()), "a later turn was made by an older version"


@pytest.mark.parametrize("stage", ["prepare", "copy"])
def test_the_last_publication_of_a_shared_pool_may_fail(stage: str) -> None:
    config = scenario(**COLOCATED, run__num_rollout=2)
    run = Scripted(config)
    kind = {"prepare": do.PrepareWeights, "copy": do.CopyWeights}[stage]
    run.fails = lambda a: type(a) is kind and a.version == 2
    run.run()
    assert watched(config, run.records).finished == "completed"


@pytest.mark.parametrize("phase", ["train", "to_train", "to_generate"])
def test_an_engine_that_comes_back_while_its_gpus_train_takes_no_turn(phase: str) -> None:
    """The turn of the lost engine starts again at 5 s: ready at 16, training from 18 to 23, switches of 2 s before and
    after."""
    config = scenario(**COLOCATED, run__num_rollout=3)
    run = Scripted(config)
    run.lose(5.0, 3)
    back = {"to_train": 17.0, "train": 20.0, "to_generate": 24.0}[phase]
    seen: list[str] = []

    def joined(t: float) -> said.Event:
        seen.append(run.core.pool.phase)
        return said.EngineJoined(t, 3, 0)

    run.at(back, joined)
    run.run()
    assert seen == [phase]
    assert watched(config, run.records).batches == 3
    assert any(a.engine == 3 for t, a in run.of(do.StartTurn) if t > back)


def test_an_engine_that_joins_twice_behind_catches_up_once() -> None:
    config = scenario(run__num_rollout=6)
    run = Scripted(config, copy=lambda a: 8.0 if len(a.participants) == 2 else 1.0)
    start = next(t for t, a in Scripted(config).run().of(do.PrepareWeights) if a.version == 3)
    run.lose(start, 1)
    run.join(start + 2.0, 1)
    run.run()
    assert watched(config, run.records).batches == 6


def test_an_answer_that_comes_after_its_engine_was_lost_is_ignored() -> None:
    config = scenario(run__num_rollout=3)
    run = Scripted(config, copy=lambda a: 9.0 if a.engine == 1 and a.version == 1 else 1.0)
    paused = next(t for t, _ in Scripted(config).run().of(do.PauseEngine))
    run.lose(paused + 3.0, 1)
    run.run()
    assert [t for t, e in run.of(said.WeightsCopied) if (e.engine, e.version) == (1, 1)] == [paused + 9.0]
    assert watched(config, run.records).batches == 3


def test_tasks_that_arrive_by_themselves_are_retried_too() -> None:
    workload = scenario().workload.model_dump() | {"arrivals": "poisson", "arrival_rate_per_s": 1.0}
    config = scenario(
        workload=workload,
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 3, "submission_granularity": "group"},
        experience__staleness={"bound": 0, "action": "retry"},
        run__num_rollout=100,
    )
    run = Scripted(config, turn=lambda a: 10.0 + 15 * (a.task % 3))
    for task in range(9):
        run.at(float(task), lambda t, i=task: said.TaskArrived(t, -1, i, 100))
    run.at(9.0, lambda t: said.TasksExhausted(t))
    run.run()
    trained = {x.task for _, a in run.of(do.Train) for x in a.experiences}
    assert run.core.finished and trained == set(range(9)), "nothing is lost and the run ends"
    assert any(a.task >= 0 for _, a in run.of(do.DrawTask))


def test_staleness_is_never_negative_while_a_wave_is_ahead() -> None:
    """Engine 0 serves v1 while engine 1 is still being updated: what it makes is not older than what is deployed."""
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "group"},
        weights__participation={"type": "waves", "size": 1},
        weights__path={"type": "fixed", "update_weight_transfer_mode": "p2p"},
        run__num_rollout=20,
    )
    run = Scripted(config, turn=2.0, reward=0.0, train=1.0, copy=lambda a: 1.0 if a.engine == 0 else 30.0)
    run.early_release = True
    run.run()
    watched(config, run.records)
    ahead = [x for _, a in run.of(do.Train) for x in a.experiences if x.oldest_version == x.dequeue_deployed > 0]
    assert ahead


@pytest.mark.parametrize("advantage", ["critic", "distillation"])
def test_giving_up_a_group_keeps_its_members_that_are_trained_singly(advantage: str) -> None:
    """Ratio 1.5: the third group is given up when two are generated; its first member is ready by then and trained."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 2, "advantage": advantage},
        rollout__admission={"type": "over_sampling", "over_sampling_ratio": 1.5},
        run__num_rollout=2,
    )
    run = Scripted(config, turn=lambda a: {4: 5.0, 5: 60.0}.get(a.trajectory, 10.0 + a.trajectory)).run()
    watched(config, run.records)
    ends = {t: (a.outcome, a.reason) for _, a in run.of(do.Retire) for t in a.trajectories}
    assert ends[4] == ("trained", "") and ends[5] == ("aborted", "over_sampled")


def test_groups_in_flight_that_a_publication_makes_too_old_are_cancelled_before_it() -> None:
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "group"},
        experience__staleness={"bound": 1, "action": "drop", "event": "publication"},
        run__num_rollout=4,
    )
    run = Scripted(config, turn=lambda a: 500.0 if a.group == 0 else 10.0).run()
    watched(config, run.records)
    cancelled = next(t for t, a in run.of(do.AbortTurn) if a.trajectory == 0)
    second = next(t for t, a in run.of(do.PrepareWeights) if a.version == 2)
    paused = next(t for t, a in run.of(do.PauseEngine) if a.version == 2)
    assert second <= cancelled <= paused, "at v2 it would be two versions old"
    end = next(a for _, a in run.of(do.Retire) if a.trajectories == (0,))
    assert (end.outcome, end.reason) == ("aborted", "stale")


def test_an_open_arrival_is_sent_at_the_instant_it_arrives() -> None:
    """It waited for the next event of any kind, so the last request before a quiet minute waited that minute."""
    config = scenario(
        workload={
            "type": "lengths",
            "reply": {"type": "fixed", "tokens": 50},
            "max_response_length": 1000,
            "arrivals": "poisson",
            "arrival_rate_per_s": 1.0,
        },
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 3},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 8},
        run__num_rollout=1,
    )
    run = Scripted(config, turn=500.0)
    for task in range(3):
        run.at(100.0 * task, lambda t, i=task: said.TaskArrived(t, -1, i, 100))
    run.run()
    assert [(t, a.task) for t, a in run.of(do.StartTurn)] == [(100.0 * i, i) for i in range(3) for _ in range(2)]
