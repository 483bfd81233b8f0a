"""Buffer and readiness (BR), and the baseline's part in it (LM-03, LM-21), shown by whole simulated runs.

Expected times follow from the plans that the workload drew: a turn of n tokens takes one prefill and n - 1 decode
steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.workloads import workload
from tests.support.simulated import HERE, PREFILL, STEP, Run, fixed, linear_run, split, turn_seconds

UNIFORM = {"type": "uniform", "low": 10, "high": 400}
ONE_GROUP = {
    "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 1},
    "workload__reply": UNIFORM,
    "workload__rewards": {"latency": {"type": "fixed", "seconds": 5.0}},
    "cluster__gpus_per_node": 8,
    "placement": split(4, 1),
    "run__num_rollout": 2,
}
"""Groups of four, one member to an engine; a score takes 5 s."""
BUFFERS: tuple[dict[str, Any], ...] = ({"type": "insert_when_ready"}, {"type": "store_then_ready"})
ASYNC = {"type": "fully_async", "async_max_concurrent_groups": 2}


def planned_lengths(r: Run, task: int) -> list[int]:
    """Output tokens of the members of a single-turn task, from the data source itself."""
    source = workload(r.scenario, HERE)
    for _ in range(task + 1):
        drawn = source.draw()
    assert drawn is not None
    return [p.output_tokens[0] for p in drawn.plans]


def generated(r: Run) -> dict[int, float]:
    return {e.trajectory: t for t, e in r.of(said.TurnFinished) if not e.continues}


def scored(r: Run) -> dict[int, float]:
    return {i: t for t, e in r.of(said.SignalReady) if e.signal == "reward" for i in e.trajectories}


def groups_of(r: Run) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for _, a in r.of(do.StartTurn):
        if a.turn == 0 and a.trajectory not in members.setdefault(a.group, []):
            members[a.group].append(a.trajectory)
    return members


# --- generated is not ready -------------------------------------------------------------------------------------------


def test_br_01_a_slot_is_free_when_its_turn_ends_and_the_group_is_ready_when_the_last_score_is_there() -> None:
    r = linear_run(**ONE_GROUP)
    ends = [turn_seconds(n) for n in planned_lengths(r, 0)]
    times, marks = generated(r), scored(r)
    assert [times[i] for i in range(4)] == pytest.approx(ends)
    assert [marks[i] for i in range(4)] == pytest.approx([t + 5.0 for t in ends])
    batch = r.batches[0]
    assert {x.group_ready_t for x in batch.experiences} == {max(marks[i] for i in range(4))}
    assert r.of(do.Train)[0][0] == pytest.approx(max(ends) + 5.0)
    assert min(ends) < max(ends) - 1.0, "the first slot was free long before"


def test_br_02_the_slot_serves_another_request_long_before_the_group_is_ready() -> None:
    """One engine of two slots, four members: the third starts the moment that the first ends."""
    r = linear_run(**{**ONE_GROUP, "placement": split(1, 1), "rollout__engine": {"max_running_requests": 2}})
    turns = sorted((e for _, e, _ in r.turns()[:4]), key=lambda e: e.started_t)
    first_end = min(e.t for e in turns[:2])
    assert turns[2].started_t == pytest.approx(first_end)
    assert turns[2].started_t < scored(r)[turns[0].trajectory], "not even its own score was there"


def test_br_03_scores_are_worked_out_while_others_generate_and_serially_it_takes_longer() -> None:
    streaming = linear_run(**ONE_GROUP)
    changes = {**ONE_GROUP, "workload__rewards": {"latency": {"type": "fixed", "seconds": 5.0}, "stage": "serial"}}
    changes["workload__reply"] = {"type": "uniform", "low": 10, "high": 3000}
    changes["workload__max_response_length"] = 3000
    serial = linear_run(**changes)
    streaming_long = linear_run(
        **{**changes, "workload__rewards": {"latency": {"type": "fixed", "seconds": 5.0}, "servers": 1}}
    )
    serial_long = linear_run(
        **{
            **changes,
            "workload__rewards": {"latency": {"type": "fixed", "seconds": 5.0}, "servers": 1, "stage": "serial"},
        }
    )
    lengths = planned_lengths(serial, 0)
    assert streaming.of(said.SignalReady)[0][0] == pytest.approx(
        min(map(turn_seconds, planned_lengths(streaming, 0))) + 5.0
    )
    assert serial.of(said.SignalReady)[0][0] == pytest.approx(max(map(turn_seconds, lengths)) + 5.0)
    # one verifier: a D/D/1 queue against the completions, or all four after the last
    free = 0.0
    for end in sorted(map(turn_seconds, lengths)):
        free = max(free, end) + 5.0
    assert streaming_long.of(do.Train)[0][0] == pytest.approx(free)
    assert serial_long.of(do.Train)[0][0] == pytest.approx(max(map(turn_seconds, lengths)) + 4 * 5.0)
    overlapping = [
        t for t, _ in streaming_long.of(said.SignalReady) if t < max(generated(streaming_long)[i] for i in range(4))
    ]
    assert overlapping, "a score came while another member was being generated"
    assert free < max(map(turn_seconds, lengths)) + 20.0


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("order", ["fifo", "windowed_fifo", "freshest_first", "oldest_first"])
def test_br_04_with_three_of_four_scores_no_rule_selects_the_group(order: str, buffer: dict[str, Any]) -> None:
    """One slow verifier: scores trickle in, and every batch comes with or after the last score of its groups."""
    if buffer["type"] == "store_then_ready":
        buffer = {**buffer, "max_buffered_groups": 4}
    r = linear_run(
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 2},
        workload__reply=UNIFORM,
        workload__rewards={"latency": {"type": "exponential", "mean_s": 3.0}, "servers": 2},
        rollout__admission={"type": "one_step_ahead"},
        experience={"buffer": buffer, "selection": {"order": {"type": order}}},
        run__num_rollout=4,
    )
    marks, members = scored(r), groups_of(r)
    for t, batch in r.of(do.Train):
        for group in {x.group for x in batch.experiences}:
            assert t >= max(marks[i] for i in members[group])
            assert sum(x.group == group for x in batch.experiences) == 4


def test_br_05_both_buffers_consume_the_same_groups_at_the_same_times_and_hold_different_numbers() -> None:
    """Stored when ready, or stored at once and ready later: what is trained when is the same, what is present is
    not."""
    changes = {**ONE_GROUP, "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 2}, "run__num_rollout": 3}
    insert, store = (linear_run(**changes, experience__buffer=b) for b in BUFFERS)
    for a, b in zip(insert.batches, store.batches, strict=True):
        assert a == b
    assert insert.steps == store.steps
    generating = [i for i, (e, _) in enumerate(insert.records) if isinstance(e, said.TurnFinished)]
    assert {insert.present[i] for i in generating} == {0}
    assert {store.present[i] for i in generating} == {2}


def test_br_06_starvation_distinguishes_empty_from_present_but_not_ready() -> None:
    """The same waiting, second for second: in one buffer nothing is there, in the other it is there and not ready."""
    changes: dict[str, Any] = {
        "workload__rewards": {"latency": {"type": "fixed", "seconds": 9.0}},
        "rollout__admission": {"type": "one_step_ahead"},
        "run__num_rollout": 5,
        "run__warmup_steps": 2,
    }
    insert = linear_run(**changes).summary.buffer
    store = linear_run(
        **changes, experience__buffer={"type": "store_then_ready", "max_buffered_groups": 4}
    ).summary.buffer
    assert (insert.empty_s > 1.0, insert.not_ready_s, insert.too_few_ready_s) == (True, 0.0, 0.0)
    assert (store.empty_s, store.not_ready_s, store.too_few_ready_s) == (0.0, pytest.approx(insert.empty_s), 0.0)


def test_br_06_a_batch_passes_over_what_is_present_and_not_ready() -> None:
    """One member's score is ten times as slow: later groups are trained first, in the order of readiness."""
    r = linear_run(
        workload__rewards={"latency": {"type": "exponential", "mean_s": 5.0}},
        rollout__admission={"type": "one_step_ahead"},
        experience__buffer={"type": "store_then_ready", "max_buffered_groups": 6},
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 1},
        rollout__engine={"max_running_requests": 2},
        run__num_rollout=12,
    )
    marks, members = scored(r), groups_of(r)
    for t, batch in r.of(do.Train):
        assert all(marks[i] <= t for x in batch.experiences for i in members[x.group])


def test_br_07_a_ready_group_waits_for_its_batch_and_that_is_not_readiness_delay() -> None:
    """One engine takes one group at a time: the first of two is ready one turn before the batch."""
    r = linear_run(
        placement=split(1, 1),
        rollout__engine={"max_running_requests": 2, "disable_overlap_schedule": True},
        run__num_rollout=3,
        run__warmup_steps=0,
    )
    gap = turn_seconds(50)
    waits = [{x.group: x.dequeued_t - x.group_ready_t for x in b.experiences} for b in r.batches]
    for batch in waits:
        assert sorted(batch.values()) == pytest.approx([0.0, gap])
    assert r.summary.buffer.ready_wait_s == pytest.approx(gap / 2)
    assert r.summary.trajectory.waits_for_signals == pytest.approx(1.0)
    assert r.summary.trajectory.in_buffer == pytest.approx(gap / 2)


# --- use and reuse ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_br_08_every_group_is_used_exactly_k_times_and_its_staleness_is_read_at_each_use(uses: int) -> None:
    r = linear_run(
        workload__reply=UNIFORM,
        rollout__admission={"type": "one_step_ahead"},
        experience={"selection": {"use_count": uses}},
        workload__num_tasks=6,
        run__num_rollout=3 * uses,
    )
    used = Counter(x.trajectory for b in r.batches for x in b.experiences)
    retired = {t for _, a in r.of(do.Retire) if a.outcome == "trained" for t in a.trajectories}
    assert retired and all(used[t] == uses for t in retired)
    assert max(used.values()) == uses
    for b in r.batches:
        for x in b.experiences:
            assert x.staleness == x.dequeue_deployed - x.oldest_version
    by_use = [[x.dequeue_deployed for b in r.batches for x in b.experiences if x.use == u] for u in range(uses)]
    assert all(len(b) for b in by_use)
    r.checked()


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("admission", [{"type": "sync"}, {"type": "one_step_ahead"}, ASYNC])
def test_br_09_either_buffer_keeps_the_same_contract(buffer: dict[str, Any], admission: dict[str, Any]) -> None:
    if buffer["type"] == "store_then_ready" and admission["type"] != "sync":
        buffer = {**buffer, "max_buffered_groups": 6}
    r = linear_run(workload__reply=UNIFORM, experience__buffer=buffer, rollout__admission=admission, run__num_rollout=4)
    r.checked()
    assert len(r.steps) == 4


def test_br_10_training_waits_for_data_in_asynchronous_mode_and_says_so() -> None:
    """Generation sets the pace: per step the trainer trains 4 s, and the rest of the cycle it waits (or publishes)."""
    r = linear_run(
        placement=split(1, 1),
        rollout__engine={"max_running_requests": 1},
        workload__reply=fixed(301),
        rollout__admission=ASYNC,
        run__num_rollout=5,
        run__warmup_steps=2,
    )
    four_turns = 4 * turn_seconds(301)
    assert four_turns > 4.0
    trainer = next(p for p in r.summary.pools if p.lane == "trainer").gpu_seconds
    steps = r.summary.measured_steps
    assert trainer["train"] == pytest.approx(4.0 * steps)
    assert trainer["idle_data"] + trainer["weight_update"] == pytest.approx(r.summary.measured_s - 4.0 * steps)
    assert trainer["idle_data"] > four_turns - 4.0 - 3.0
    states = {n.state for _, n in r.of(do.Note) if n.subject == "trainer"}
    assert states >= {"busy", "empty", "too_few_ready"}


def test_br_11_signals_come_in_any_order_and_while_others_generate() -> None:
    """Teacher before reward, reward before teacher: the last one makes a trajectory ready, and nothing waits for a
    stage."""
    ready = {}
    for reward, teacher in ((1.0, 4.0), (4.0, 1.0)):
        r = linear_run(
            **{
                **ONE_GROUP,
                "algorithm": {
                    "n_samples_per_prompt": 4,
                    "rollout_batch_size": 1,
                    "advantage": "group_with_distillation",
                },
                "workload__rewards": {"latency": {"type": "fixed", "seconds": reward}},
                "placement__roles": {"external_seconds_per_trajectory": teacher},
            }
        )
        first = min(generated(r)[i] for i in range(4))
        last = max(generated(r)[i] for i in range(4))
        signals = [(t, e.signal) for t, e in r.of(said.SignalReady) if 0 in e.trajectories or len(e.trajectories) == 1]
        assert signals[0][0] == pytest.approx(first + 1.0) and signals[0][0] < last
        ready[reward] = r.batches[0].experiences[0].group_ready_t
        assert ready[reward] == pytest.approx(last + 4.0)
    assert ready[1.0] == pytest.approx(ready[4.0])


# --- a bounded buffer -------------------------------------------------------------------------------------------------


def occupancy(r: Run) -> list[int]:
    """Ready groups that no batch has taken, after every event: what the buffer holds and what waits outside it."""
    members, marks = groups_of(r), scored(r)
    ready = sorted(max(marks[i] for i in m) for m in members.values() if all(i in marks for i in m))
    taken = sorted(t for t, b in r.of(do.Train) for _ in {x.group for x in b.experiences})
    dropped = sorted(t for t, a in r.of(do.Retire) if a.outcome == "dropped")
    return [
        sum(x <= t for x in ready) - sum(x <= t for x in taken) - sum(x <= t for x in dropped)
        for t in sorted({t for t, _ in r.log})
    ]


@pytest.mark.parametrize(("samples_per_s", "train_bound"), [(0.5, True), (1000.0, False)])
def test_br_12_the_producer_is_blocked_only_if_training_is_the_bottleneck(
    samples_per_s: float, train_bound: bool
) -> None:
    """Capacity floor(2.0 x 2) = 4 groups: full before every batch once the trainer is behind, and never above."""
    r = linear_run(
        rollout__admission={**ASYNC, "submission_granularity": "group"},
        training__cost={"type": "rate", "samples_per_s": samples_per_s},
        workload__reply=UNIFORM,
        workload__rewards={"latency": {"type": "fixed", "seconds": 0.0}},
        run__num_rollout=8,
        run__warmup_steps=3,
    )
    blocked = r.summary.buffer.producer_blocked_s
    dequeued = [i for i, (_, actions) in enumerate(r.records) if any(isinstance(a, do.Train) for a in actions)]
    before = [r.present[i - 1] for i in dequeued[3:]]
    assert max(r.present) <= 4
    if train_bound:
        assert blocked > 0 and "buffer_full" in {n.state for _, n in r.of(do.Note)}
        assert set(before) == {4}
        assert max(occupancy(r)) > 4, "what was in flight waits outside"
        engines = next(p for p in r.summary.pools if p.lane == "engines").gpu_seconds
        assert engines["idle_buffer_full"] > 0
    else:
        assert blocked == 0 and max(before) < 4
    r.checked()


def test_br_12_the_buffer_may_make_room_instead_of_blocking() -> None:
    r = linear_run(
        rollout__admission=ASYNC,
        experience__buffer={"type": "insert_when_ready", "put_when_full": "drop_oldest"},
        training__cost={"type": "rate", "samples_per_s": 0.5},
        run__num_rollout=6,
    )
    assert r.summary.buffer.producer_blocked_s == 0
    assert {a.reason for _, a in r.of(do.Retire) if a.outcome == "dropped"} == {"buffer_full"}
    assert max(occupancy(r)) == 4
    r.checked()


@pytest.mark.parametrize("action", ["drop", "retry"])
def test_br_13_what_is_too_old_is_dropped_or_its_task_is_run_again(action: str) -> None:
    """submitted = trained + dropped + what was open at the end, in groups; a recycled task is drawn again by its
    number."""
    r = linear_run(
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4},
        workload__reply={"type": "lognormal", "mean": 150, "sigma": 1.0},
        placement=split(2, 1),
        training__cost={"type": "rate", "samples_per_s": 2.0},
        experience__staleness={"bound": 1, "action": action},
        run__num_rollout=10,
    )
    draws = [a for _, a in r.of(do.DrawTask)]
    ends = Counter()
    for _, a in r.of(do.Retire):
        ends[a.outcome, a.reason] += 1
    assert ends["dropped", "stale"] > 0
    assert sum(ends.values()) == len(draws)
    assert ends["trained", ""] == 10 * 2
    again = [a.task for a in draws if a.task >= 0]
    stale = [a for _, a in r.of(do.Retire) if a.reason == "stale"]
    assert all(a.staleness >= 2 for a in stale)
    if action == "drop":
        assert not again
    else:
        tasks = {a.group: a.task for _, a in r.of(do.StartTurn)}
        assert again == [tasks[a.group] for a in stale][: len(again)] and len(stale) - len(again) <= 4
    r.checked()


# --- which baseline, what to wait for ---------------------------------------------------------------------------------


def test_lm_21_a_group_baseline_waits_for_the_group_and_a_critic_baseline_costs_a_forward_pass() -> None:
    """GRPO: no critic job, and nobody is trained before the group's last member. Critic: per response, after a job of
    its own."""
    changes = {k: v for k, v in ONE_GROUP.items() if k != "algorithm"}
    changes["run__num_rollout"] = 3
    shape = {"n_samples_per_prompt": 4, "rollout_batch_size": 1}
    group = linear_run(**changes, algorithm=shape)
    critic = linear_run(
        **changes, algorithm={**shape, "advantage": "critic"}, rollout__admission={"type": "one_step_ahead"}
    )
    assert {a.signal for _, a in group.of(do.ComputeSignals)} == {"reward"}
    jobs = [(t, a) for t, a in critic.of(do.ComputeSignals) if a.signal == "critic"]
    assert jobs and all(a.pool == critic.backend.core.layout.train_pool for _, a in jobs)
    assert Counter(i for _, a in jobs for i in a.trajectories) == Counter(
        set(i for _, a in jobs for i in a.trajectories)
    )
    done = {i: t for t, e in critic.of(said.SignalReady) if e.signal == "critic" for i in e.trajectories}
    for b in critic.batches:
        assert all(x.ready_t == x.group_ready_t == done[x.trajectory] for x in b.experiences), "ready one by one"
    assert any(len({x.ready_t for x in b.experiences}) > 1 for b in critic.batches)
    for b in group.batches:
        assert len({x.group_ready_t for x in b.experiences}) == 1
        assert max(x.ready_t for x in b.experiences) == b.experiences[0].group_ready_t
    # one forward pass of a trainer with a plain rate is a third of an update: here 1/3 s a trajectory
    start, job = jobs[0]
    assert done[job.trajectories[0]] - start == pytest.approx(len(job.trajectories) / 3)


def test_lm_03_another_evaluator_changes_time_and_score_and_nothing_else() -> None:
    """Answer check, code execution, reward model: same interface, other latencies and rates of success."""
    evaluators: list[dict[str, Any]] = [
        {"latency": {"type": "fixed", "seconds": 0.0}, "success_rate": 1.0},
        {"latency": {"type": "exponential", "mean_s": 20.0}, "servers": 2, "success_rate": 0.5},
        {"latency": {"type": "fixed", "seconds": 3.0}, "success_rate": 0.0},
    ]
    records = []
    for rewards in evaluators:
        r = linear_run(workload__rewards=rewards, workload__reply=UNIFORM)
        found = {x.trajectory: (x.prompt_tokens, x.output_tokens, x.turns) for b in r.batches for x in b.experiences}
        values = {x.trajectory: x.reward for b in r.batches for x in b.experiences}
        records.append((found, values, r.steps))
    assert records[0][0] == records[1][0] == records[2][0]
    assert set(records[0][1].values()) == {1.0} and set(records[2][1].values()) == {0.0}
    assert records[0][2] < records[2][2] < records[1][2]


def test_lm_02_one_reward_per_response_after_it_is_complete() -> None:
    r = linear_run(workload__turns=fixed(3), workload__reply=UNIFORM)
    counts = Counter(i for _, e in r.of(said.SignalReady) for i in e.trajectories)
    times = generated(r)
    assert set(counts.values()) == {1}
    assert all(t >= times[i] for i, t in scored(r).items())


def test_a_turn_takes_its_prefill_and_one_step_a_further_token() -> None:
    """The closed form that this file rests on."""
    r = linear_run(**ONE_GROUP)
    for sent, e, _ in r.turns():
        assert e.first_token_t - sent == pytest.approx(PREFILL)
        assert e.t - e.first_token_t == pytest.approx((e.output_tokens - 1) * STEP)
