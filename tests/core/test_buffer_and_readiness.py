"""BR: generated is not ready, "in the buffer" is not ready, and what befalls ready groups before a batch takes them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.records import Group, Lot, Trajectory
from testbed.policies.buffer import ReadyBuffer, buffer
from testbed.policies.selection import order
from testbed.scenario.experience import Fifo, InsertWhenReady, OldestFirst, StoreThenReady
from tests.support.invariants import watched
from tests.support.scenarios import scenario
from tests.support.scripted import Scripted

ORDERS = ("fifo", "windowed_fifo", "freshest_first", "oldest_first")
BUFFERS: dict[str, dict[str, Any]] = {
    "insert_when_ready": {"type": "insert_when_ready"},
    "store_then_ready": {"type": "store_then_ready", "max_buffered_groups": 8},
}


def one_group_of_four(**changes: Any) -> Scripted:
    """The seeds' group: responses end at 10, 20, 30 and 40 s, each score takes 5 s. One engine with four slots."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 1},
        placement={"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1},
        rollout__concurrency={"type": "per_engine", "max_concurrent_per_engine": 4},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2},
        run__num_rollout=1,
        **changes,
    )
    return Scripted(config, turn=lambda a: 10.0 * (a.member + 1), reward=5.0)


def finished(run: Scripted, trajectory: int) -> float:
    return next(t for t, e in run.of(said.TurnFinished) if e.trajectory == trajectory)


def first_batch(run: Scripted) -> tuple[float, do.Train]:
    return run.of(do.Train)[0]


def test_br_01_slot_is_freed_at_10_and_the_group_is_ready_at_45() -> None:
    run = one_group_of_four().run()
    assert finished(run, 0) == 10
    t, train = first_batch(run)
    assert t == 45
    assert [x.generated_t for x in train.experiences] == [10, 20, 30, 40]
    assert [x.ready_t for x in train.experiences] == [15, 25, 35, 45]
    assert {x.group_ready_t for x in train.experiences} == {45}


def test_br_02_the_freed_slot_takes_another_request_at_10() -> None:
    run = one_group_of_four().run()
    starts = [(t, a.trajectory, a.group) for t, a in run.of(do.StartTurn)]
    assert starts[:5] == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (10, 4, 1)]


def test_br_03_scoring_overlaps_generation_of_the_other_responses() -> None:
    run = one_group_of_four().run()
    asked = next(t for t, a in run.of(do.ComputeSignals) if 0 in a.trajectories)
    scored = next(t for t, e in run.of(said.SignalReady) if 0 in e.trajectories)
    assert (asked, scored) == (10, 15) and finished(run, 1) == 20


def test_br_03_serial_scoring_is_possible_and_slower() -> None:
    """A slow score of the first response hides behind generation only if it may start before the group is generated."""
    runs = {stage: one_group_of_four(workload__rewards={"stage": stage}) for stage in ("streaming", "serial")}
    for run in runs.values():
        run._reward = lambda a: 30.0 if 0 in a.trajectories else 5.0
        run.run()
    assert first_batch(runs["streaming"])[0] == 45
    assert first_batch(runs["serial"])[0] == 40 + 30


@pytest.mark.parametrize("selection", ORDERS)
@pytest.mark.parametrize("kind", BUFFERS)
def test_br_04_with_three_of_four_scores_no_policy_selects_the_group(selection: str, kind: str) -> None:
    run = one_group_of_four(experience__selection={"order": {"type": selection}}, experience__buffer=BUFFERS[kind])
    run._reward = lambda a: 1000.0 if 2 in a.trajectories else 5.0
    run.run(until=1029)
    assert not [a for _, a in run.of(do.Train) if 0 in {x.group for x in a.experiences}]
    run.run(until=1031)
    assert run.of(do.Train)


def readiness(kind: str) -> tuple[list[tuple[int, float, float]], list[int]]:
    """(group, its readiness, when it was taken) of every trained group, and the occupancy after every event."""
    config = scenario(
        rollout__admission={"type": "bounded", "max_head_offpolicyness": 1},
        experience__buffer=BUFFERS[kind],
        run__num_rollout=6,
    )
    run = Scripted(
        config, turn=lambda a: 5.0 + 3 * (a.trajectory * 7 % 5), reward=lambda a: 1.0 + a.trajectories[0] % 3
    )
    occupancy: list[int] = []
    tell = run.tell

    def counting(event: said.Event) -> list[do.Action]:
        actions = tell(event)
        occupancy.append(run.core.experience.buffer.present)
        return actions

    run.tell = counting  # type: ignore[method-assign]
    run.run()
    trained = [(x.group, x.group_ready_t, x.dequeued_t) for _, a in run.of(do.Train) for x in a.experiences]
    return trained, occupancy


def test_br_05_both_buffer_modes_consume_the_same_groups_at_the_same_times_and_differ_in_occupancy() -> None:
    inserted, early = readiness("insert_when_ready"), readiness("store_then_ready")
    assert inserted[0] == early[0]
    assert len(inserted[1]) == len(early[1])
    assert all(a <= b for a, b in zip(inserted[1], early[1], strict=True))
    assert sum(inserted[1]) < sum(early[1])


def test_br_06_dequeue_skips_what_is_present_but_not_ready() -> None:
    """Group 0 is stored first and slow; group 1 becomes ready first and is trained first."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 1},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2},
        experience__buffer={"type": "store_then_ready", "max_buffered_groups": 4},
        run__num_rollout=1,
    )
    run = Scripted(config, turn=lambda a: 100.0 if a.group == 0 else 10.0)
    run.run(until=10.5)
    assert run.core.experience.buffer.present >= 2 and run.core.experience.buffer.num_ready == 0
    run.run(until=11)
    assert {x.group for x in first_batch(run)[1].experiences} == {1}


@pytest.mark.parametrize(("kind", "cause"), [("insert_when_ready", "empty"), ("store_then_ready", "not_ready")])
def test_br_06_starvation_says_empty_or_present_but_not_ready(kind: str, cause: str) -> None:
    run = one_group_of_four(experience__buffer=BUFFERS[kind]).run()
    waits = [a.state for t, a in run.of(do.Note) if a.subject == "trainer" and t < 45]
    assert waits[-1] == cause


def test_br_07_a_ready_group_waits_for_the_batch_and_that_wait_is_no_readiness_delay() -> None:
    """Group 0 is generated at 10 and ready at 11; the batch of two waits for group 1, ready at 51."""
    run = Scripted(scenario(run__num_rollout=1), turn=lambda a: 50.0 if a.group else 10.0).run()
    t, train = first_batch(run)
    first = [x for x in train.experiences if x.group == 0]
    assert t == 51
    assert {(x.generated_t, x.group_ready_t, x.dequeued_t) for x in first} == {(10, 11, 51)}
    assert "too_few_ready" in [a.state for s, a in run.of(do.Note) if a.subject == "trainer" and s < 51]


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("kind", BUFFERS)
def test_br_08_a_group_is_used_exactly_k_times_and_its_staleness_is_read_at_each_use(uses: int, kind: str) -> None:
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 1},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 1},
        experience__buffer=BUFFERS[kind],
        experience__selection={"use_count": uses},
        run__num_rollout=9,
    )
    run = Scripted(config, turn=100.0).run()
    seen = Counter(x.trajectory for _, a in run.of(do.Train) for x in a.experiences)
    retired = {t for _, a in run.of(do.Retire) if a.outcome == "trained" for t in a.trajectories}
    assert retired and all(seen[t] == uses for t in retired)
    readings: dict[int, list[tuple[int, int]]] = {}
    for _, a in run.of(do.Train):
        for x in a.experiences:
            readings.setdefault(x.trajectory, []).append((x.use, x.staleness))
    # one batch after the other, each with the weights of the one before: one version older at every use
    assert [u for u, _ in readings[0]] == list(range(uses))
    assert [s for _, s in readings[0]] == list(range(uses))


def test_br_08_a_reuse_beyond_the_bound_is_refused_at_that_use() -> None:
    """Bound 1: the uses at staleness 0 and 1 happen, the one at 2 does not."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 1},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 1},
        experience={"selection": {"use_count": 3}, "staleness": {"bound": 1, "action": "drop"}},
        run__num_rollout=5,
    )
    run = Scripted(config, turn=100.0).run()
    uses = [x.staleness for _, a in run.of(do.Train) for x in a.experiences if x.trajectory == 0]
    drop = next(a for _, a in run.of(do.Retire) if 0 in a.trajectories)
    assert uses == [0, 1] and (drop.outcome, drop.reason, drop.staleness) == ("dropped", "stale", 2)


@pytest.mark.parametrize("config", [InsertWhenReady(), StoreThenReady(max_buffered_groups=4)], ids=lambda c: c.type)
def test_br_09_the_buffer_is_a_role_with_two_implementations_of_one_contract(config: Any) -> None:
    held = buffer(config, order(Fifo()), 2, 1)
    lots = [ready_lot(i) for i in range(3)]
    for _ in lots:
        assert held.admits(1)
        held.reserve(1)
    assert held.num_ready == 0
    for lot in lots:
        assert held.ready(lot) == (None, None)
    assert held.num_ready == held.present == 3
    assert held.take() is lots[0]
    held.give_back(lots[0])
    assert held.take() is lots[0] and held.num_ready == held.present == 2
    assert [held.take(), held.take()] == lots[1:]
    with pytest.raises(IndexError):
        held.take()


def ready_lot(sequence: int) -> Lot:
    group = Group(sequence, 0.0, "test")
    lot = Lot(group, [Trajectory(sequence, group, 0, 0.0, sequence)])
    lot.sequence = sequence
    return lot


def test_br_10_training_waits_for_data_in_async_mode_and_says_why() -> None:
    config = scenario(
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2},
        experience__buffer=BUFFERS["store_then_ready"],
    )
    run = Scripted(config, turn=100.0, train=5.0).run()
    done = [t for t, _ in run.of(said.TrainStepFinished)]
    trains = [t for t, _ in run.of(do.Train)]
    notes = [(t, a.state) for t, a in run.of(do.Note) if a.subject == "trainer"]
    for idle_from, idle_to in zip(done, trains[1:], strict=False):
        causes = {state for t, state in notes if idle_from <= t < idle_to}
        assert idle_to - idle_from > 50 and "not_ready" in causes


@pytest.mark.parametrize(("reward", "teacher", "ready"), [(5.0, 1.0, 15.0), (1.0, 7.0, 17.0)])
def test_br_11_no_fixed_order_of_signals_only_the_last_one_counts(reward: float, teacher: float, ready: float) -> None:
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 1, "advantage": "group_with_distillation"},
        run__num_rollout=1,
    )
    run = Scripted(config, reward=reward, signal=teacher).run()
    assert {x.ready_t for x in first_batch(run)[1].experiences} == {ready}


def test_br_12_capacity_of_32_groups_a_batch_is_64() -> None:
    held = buffer(InsertWhenReady(async_data_buffer_capacity_factor=2.0), order(Fifo()), 32, 0)
    assert isinstance(held, ReadyBuffer) and held.capacity == 64


@pytest.mark.parametrize(("train", "bound_by_training"), [(200.0, True), (1.0, False)])
def test_br_12_the_producer_is_blocked_only_if_training_is_the_bottleneck(
    train: float, bound_by_training: bool
) -> None:
    """Two groups in flight take 11 s; a batch of two groups takes 200 s or 1 s. Capacity: floor(2.0 x 2) = 4 groups."""
    config = scenario(rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 2}, run__num_rollout=8)
    run = Scripted(config, train=train)
    highest = 0
    tell = run.tell

    def watching(event: said.Event) -> list[do.Action]:
        nonlocal highest
        actions = tell(event)
        highest = max(highest, run.core.experience.buffer.present)
        return actions

    run.tell = watching  # type: ignore[method-assign]
    run.run()
    notes = [(t, a.state) for t, a in run.of(do.Note) if a.subject == "admission"]
    blocked = sum(end - start for (start, state), (end, _) in pairwise(notes) if state == "buffer_full")
    assert (blocked > 0) == bound_by_training
    assert highest <= 4 and (highest == 4) == bound_by_training


def test_br_12_filters_at_put_and_at_get() -> None:
    """Put: groups of equal rewards never enter. Get: what is too old leaves when it would be taken."""
    config = scenario(
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4},
        experience={"selection": {"filter_zero_variance": True}, "staleness": {"bound": 0}},
        run__num_rollout=4,
    )
    run = Scripted(
        config,
        turn=lambda a: 10.0 + a.group,
        train=30.0,
        values=lambda i: float(i % 2) if i // 2 % 3 else 1.0,
    ).run()
    reasons = Counter(a.reason for _, a in run.of(do.Retire) if a.outcome == "dropped")
    assert reasons["zero_variance"] and reasons["stale"]
    flat = [a.group for _, a in run.of(do.Retire) if a.reason == "zero_variance"]
    assert all(group % 3 == 0 for group in flat)


@pytest.mark.parametrize("action", ["drop", "retry"])
def test_br_13_a_group_that_is_too_old_is_dropped_or_its_task_recycled_and_nothing_is_lost(action: str) -> None:
    config = scenario(
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4},
        experience__staleness={"bound": 0, "action": action},
        run__num_rollout=8,
    )
    run = Scripted(config, turn=lambda a: 10.0 + 5 * (a.group % 4)).run()
    stale = [a for _, a in run.of(do.Retire) if a.reason == "stale"]
    draws = [a.task for _, a in run.of(do.DrawTask)]
    tasks = {e.group: e.task for _, e in run.of(said.TaskArrived)}
    assert stale and all(a.staleness > 0 for a in stale)
    recycled = [task for task in draws if task >= 0]
    expected = [tasks[a.group] for a in stale] if action == "retry" else []
    assert recycled == expected[: len(recycled)] and len(expected) - len(recycled) <= 4
    ends = Counter(a.outcome for _, a in run.of(do.Retire))
    # groups: submitted = trained + dropped + (in flight and queued, which the end of the run aborts)
    assert len(tasks) == ends["trained"] + ends["dropped"] + ends["aborted"]
    assert ends["trained"] == 8 * 2
    watched(config, run.records)


def test_br_15_dropping_by_age_prefers_short_responses_and_dropping_by_arrival_does_not() -> None:
    """Mean duration of what is trained, over mean duration of what was started; durations cycle through 10 .. 90 s."""

    def share(**experience: Any) -> float:
        config = scenario(
            algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 2},
            rollout__admission={
                "type": "fully_async",
                "async_max_concurrent_groups": 12,
                "submission_granularity": "sample",
            },
            experience=experience,
            run__num_rollout=150,
        )
        seconds: dict[int, float] = {}

        def duration(a: do.StartTurn) -> float:
            return seconds.setdefault(a.trajectory, 10.0 + a.trajectory * 37 % 81)

        run = Scripted(config, turn=duration, train=12.0).run()
        trained = [seconds[x.trajectory] for _, a in run.of(do.Train) for x in a.experiences]
        return sum(trained) / len(trained) / (sum(seconds.values()) / len(seconds))

    by_age = share(staleness={"bound": 3, "action": "drop"})
    by_arrival = share(
        buffer={
            "type": "insert_when_ready",
            "async_data_buffer_capacity_factor": 1.0,
            "put_when_full": "drop_oldest",
        }
    )
    assert by_age < 0.9 < by_arrival
    assert by_arrival == pytest.approx(1.0, abs=0.08)


def test_oldest_first_waits_outside_in_turn() -> None:
    """A full buffer: an older lot takes the place of the youngest; those outside come in by age, not by arrival."""
    held = buffer(InsertWhenReady(async_data_buffer_capacity_factor=1.0), order(OldestFirst()), 2, 0)
    lots = [ready_lot(i) for i in range(3)]
    assert held.ready(lots[1]) == (None, None) and held.ready(lots[2]) == (None, None)
    waits, evicted = held.ready(lots[0])
    assert waits is lots[2] and evicted is None and not held.admits(1)
    assert [held.take(), held.take()] == lots[:2]
    assert held.taken() == [lots[2]] and held.take() is lots[2]


def test_oldest_first_comes_in_from_outside_in_turn() -> None:
    held = buffer(InsertWhenReady(async_data_buffer_capacity_factor=1.0), order(OldestFirst()), 1, 0)
    lots = [ready_lot(i) for i in range(3)]
    for lot in (lots[0], lots[2], lots[1]):
        held.ready(lot)
    taken = []
    for _ in lots:
        taken.append(held.take())
        held.taken()
    assert taken == lots
