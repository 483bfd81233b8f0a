"""LM, OP, ER, AP as far as the core shows them: which signals readiness waits for, and trajectories that use tools."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from tests.support.invariants import watched
from tests.support.scenarios import scenario
from tests.support.scripted import Scripted

ONE_GROUP = {"n_samples_per_prompt": 4, "rollout_batch_size": 1}


def ready_times(advantage: str, **seconds: Any) -> tuple[list[float], list[float]]:
    """(trajectory ready, selectable) of a group whose members end at 10, 20, 30 and 40 s."""
    config = scenario(algorithm=ONE_GROUP | {"advantage": advantage}, run__num_rollout=1)
    run = Scripted(config, turn=lambda a: 10.0 * (a.member + 1), **seconds).run()
    xs = sorted((x for _, a in run.of(do.Train) for x in a.experiences), key=lambda x: x.trajectory)
    return [x.ready_t for x in xs], [x.group_ready_t for x in xs]


def test_lm_02_one_reward_per_response_and_not_before_it_is_generated() -> None:
    run = Scripted(scenario(), reward=2.0).run()
    generated = {e.trajectory: t for t, e in run.of(said.TurnFinished)}
    scored: dict[int, list[float]] = {}
    for t, e in run.of(said.SignalReady):
        for i in e.trajectories:
            scored.setdefault(i, []).append(t)
    assert all(len(times) == 1 and times[0] >= generated[i] for i, times in scored.items())


def test_lm_21_a_group_baseline_waits_for_the_group_and_schedules_no_critic() -> None:
    each, together = ready_times("group", reward=5.0)
    assert each == [15, 25, 35, 45] and set(together) == {45}


def test_lm_21_a_critic_baseline_is_ready_per_response_and_schedules_a_critic() -> None:
    each, alone = ready_times("critic", reward=5.0, signal=1.0)
    assert each == alone == [16, 26, 36, 46]


def test_op_05_distillation_alone_schedules_no_reward_job() -> None:
    config = scenario(algorithm=ONE_GROUP | {"advantage": "distillation"}, run__num_rollout=1)
    run = Scripted(config).run()
    assert {a.signal for _, a in run.of(do.ComputeSignals)} == {"teacher"} and run.of(do.Train)


@pytest.mark.parametrize("latency", [0.0, 7.0, 60.0])
def test_op_14_readiness_is_delayed_by_the_teacher(latency: float) -> None:
    each, _ = ready_times("group_with_distillation", reward=5.0, signal=latency)
    assert each == [t + max(5.0, latency) for t in (10, 20, 30, 40)]


def test_op_14_a_teacher_on_the_training_pool_waits_for_its_turn() -> None:
    config = scenario(
        algorithm=ONE_GROUP | {"advantage": "distillation"},
        placement={
            "mode": "disaggregated",
            "rollout_num_gpus": 2,
            "actor_num_gpus": 2,
            "roles": {"teacher": "trainer"},
        },
        rollout__admission={"type": "one_step_ahead"},
        run__num_rollout=3,
    )
    run = Scripted(config, train=50.0).run()
    assert {a.pool for _, a in run.of(do.ComputeSignals)} == {1}
    watched(config, run.records)  # one job at a time on the pool


def test_er_12_how_a_trajectory_ended_is_recorded_and_members_that_failed_are_no_members() -> None:
    config = scenario(algorithm=ONE_GROUP, run__num_rollout=2)
    run = Scripted(config, turns=2)
    run.tool_fails = lambda a: a.trajectory == 2
    run.run()
    ends = {t: (a.outcome, a.reason) for _, a in run.of(do.Retire) for t in a.trajectories}
    assert ends[2] == ("failed", "tool") and {ends[t] for t in (0, 1, 3)} == {("trained", "")}
    first = run.of(do.Train)[0][1]
    assert {x.trajectory for x in first.experiences} == {0, 1, 3}


def test_er_18_a_trajectory_has_several_calls_and_observations() -> None:
    config = scenario(run__num_rollout=1)
    run = Scripted(config, turns=3).run()
    for _, a in run.of(do.Train):
        assert {(x.turns, x.output_tokens, x.observation_tokens) for x in a.experiences} == {(3, 3 * 50, 2 * 20)}


# --- programs ---------------------------------------------------------------------------------------------------------


def test_ap_01_reasoning_and_acting_alternate_and_acting_holds_no_decode_slot() -> None:
    """One slot in one engine: while the first trajectory uses its tool, the second generates."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 2},
        placement={"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1},
        rollout__concurrency={"type": "per_engine", "max_concurrent_per_engine": 1},
        run__num_rollout=1,
    )
    run = Scripted(config, turns=2, tool=10.0).run()
    starts = [(t, a.trajectory, a.turn) for t, a in run.of(do.StartTurn)]
    assert starts == [(0, 0, 0), (10, 1, 0), (20, 0, 1), (30, 1, 1)]
    assert [(t, a.trajectory) for t, a in run.of(do.RunTool)] == [(10, 0), (20, 1)]


@pytest.mark.parametrize("ending", ["trained", "failed", "aborted"])
def test_ap_03_the_environment_is_reclaimed_once_at_every_ending(ending: str) -> None:
    admission = {"type": "over_sampling", "over_sampling_ratio": 1.5} if ending == "aborted" else {"type": "sync"}
    config = scenario(rollout__admission=admission, run__num_rollout=2)
    run = Scripted(config, turns=2, environments=True, turn=lambda a: 10.0 + a.group)
    run.tool_fails = lambda a: ending == "failed" and a.trajectory == 1
    run.run()
    watched(config, run.records)  # prepared once, released once
    assert ending in {a.outcome for _, a in run.of(do.Retire)}
    prepared = [a.trajectory for _, a in run.of(do.PrepareEnvironment)]
    assert sorted(prepared) == sorted(a.trajectory for _, a in run.of(do.ReleaseEnvironment))


def test_ap_02_the_environment_of_a_trajectory_is_one_over_all_its_turns() -> None:
    run = Scripted(scenario(run__num_rollout=1), turns=3, environments=True, environment=4.0).run()
    prepared = {a.trajectory: t for t, a in run.of(do.PrepareEnvironment)}
    released = {a.trajectory: t for t, a in run.of(do.ReleaseEnvironment)}
    for t, a in run.of(do.StartTurn, do.RunTool):
        assert prepared[a.trajectory] + 4.0 <= t <= released[a.trajectory]


def test_ap_05_a_call_that_ends_is_no_task_that_ends() -> None:
    run = Scripted(scenario(run__num_rollout=1), turns=3, tool=20.0).run()
    x = run.of(do.Train)[0][1].experiences[0]
    assert x.generated_t == 3 * 10 + 2 * 20
    first_call = next(t for t, e in run.of(said.TurnFinished) if e.trajectory == x.trajectory)
    assert first_call == 10 and not [t for t, a in run.of(do.ComputeSignals) if t < x.generated_t]


@pytest.mark.parametrize("mode", ["finish", "retract", "in_place", "abort"])
def test_ap_13_after_a_version_change_while_acting_the_next_call_is_of_the_new_version(mode: str) -> None:
    """The tool of batch 2 runs through the update to v1; the call before is v0, the one after v1, whatever the mode."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 1},
        rollout__admission={"type": "one_step_ahead"},
        weights__transition={"pause_generation_mode": mode, "kv": "salt_by_version"},
        run__num_rollout=2,
    )
    run = Scripted(config, turns=2, turn=2.0, tool=15.0, train=5.0).run()
    calls = [e.spans for _, e in run.of(said.TurnFinished) if e.trajectory == 1]
    assert calls == [((0, 0, 50),), ((1, 0, 50),)]


def test_rk_12_with_session_affinity_every_turn_of_a_trajectory_goes_to_one_engine() -> None:
    config = scenario(rollout__routing={"type": "session_affinity"}, run__num_rollout=3)
    run = Scripted(config, turns=4, turn=lambda a: 3.0 + a.trajectory % 5).run()
    engines: dict[int, set[int]] = {}
    for _, a in run.of(do.StartTurn):
        engines.setdefault(a.trajectory, set()).add(a.engine)
    assert all(len(e) == 1 for e in engines.values()) and set.union(*engines.values()) == {0, 1}


def test_rk_04_a_freed_slot_is_taken_at_the_next_step() -> None:
    config = scenario(
        algorithm=ONE_GROUP,
        rollout__concurrency={"type": "per_engine", "max_concurrent_per_engine": 1},
        run__num_rollout=1,
    )
    run = Scripted(config, turn=lambda a: 5.0 + 10 * a.member).run()
    ended = {t for t, _ in run.of(said.TurnFinished)}
    later = [t for t, _ in run.of(do.StartTurn) if t > 0]
    assert len(later) == 2 and set(later) <= ended
