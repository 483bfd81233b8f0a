"""The figures of a run: a synchronous run written by hand, warm-up, waste, waits, cost, and what is left in memory."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.meta import RunMeta
from testbed.metrics.run import EventCounter, RunMetrics
from testbed.metrics.summary import RunSummary
from testbed.scenario.layout import layout_of
from tests.metrics.builders import experience, finished, fold, nonzero, start, sync_step
from tests.support.scenarios import scenario


def sync_run(warmup: int, steps: int = 2, **changes: Any) -> RunSummary:
    """Steps end at 60, 131, 202, ...: the next one starts 0.5 s after the weights serve."""
    records = [r for i in range(steps) for r in sync_step(71.0 * i, i)]
    return fold(scenario(run__warmup_steps=warmup, run__num_rollout=10, **changes), records).summary()


def test_gpu_time_of_a_synchronous_step_after_warm_up() -> None:
    """The measured step lasts from 60 to 131 s."""
    s = sync_run(warmup=1)
    assert (s.measured_steps, s.warmup_steps, s.measured_s) == (1, 1, 71)
    engines, trainer = s.pools
    assert (engines.lane, trainer.lane, engines.gpus, trainer.gpus) == ("engines", "trainer", 2, 2)
    assert nonzero(engines.gpu_seconds) == pytest.approx(
        {
            "weight_update": 2 * 8,
            "generate": 20 + 40,
            "idle_longest": 20,
            # before the pause, before the first turn, and from the last turn to the end of the step
            "idle_trainer": 2 * 2.5 + 2 * 0.5 + 2 * 20,
        }
    )
    assert nonzero(trainer.gpu_seconds) == pytest.approx({"weight_update": 12, "idle_data": 100, "train": 30})


@pytest.mark.parametrize("warmup", [0, 1, 2, 3])
def test_rp_06_causes_sum_to_wall_time_times_gpus_whatever_the_warm_up(warmup: int) -> None:
    s = sync_run(warmup=warmup, steps=4)
    assert s.measured_steps == 4 - warmup
    for pool in s.pools:
        assert sum(pool.gpu_seconds.values()) == pytest.approx(pool.gpus * s.measured_s, rel=1e-6)
    for step in s.steps:
        assert sum(step.gpu_seconds.values()) == pytest.approx(s.num_gpus * (step.end_t - step.start_t), rel=1e-6)
    measured = s.steps[warmup:]
    for cause in measured[0].gpu_seconds:
        assert sum(x.gpu_seconds[cause] for x in measured) == pytest.approx(sum(p.gpu_seconds[cause] for p in s.pools))


def test_throughput_cost_and_step_time() -> None:
    s = sync_run(warmup=1, steps=3, cluster__price_usd_per_gpu_hour=3.6)
    assert s.step_time_mean_s == 71
    assert s.step_time.count == 2
    assert s.trained_tokens_per_s_per_gpu == pytest.approx(800 / (142 * 4))
    assert s.generated_tokens_per_s_per_gpu == pytest.approx(800 / (142 * 4))
    assert s.trajectories_per_s == pytest.approx(8 / 142)
    assert s.cost_usd_per_1000_steps == pytest.approx(1000 * 71 * 4 * 3.6 / 3600)
    # the second publication serves at 141.5, in the third step, which ends at 202
    assert (s.wall_s, s.events) == (142 + 70.5, 3 * 20)


def test_br_01_generated_is_not_ready() -> None:
    """Trajectories generated at 10, 20, 30, 40; ready 5 s later; groups ready at 25 and 45; the batch takes them at
    45."""
    t = sync_run(warmup=1).trajectory
    parts = {f: getattr(t, f) for f in t.__struct_fields__}
    assert nonzero(parts) == pytest.approx(
        {"prefill": 1, "decode": 24, "waits_for_signals": 5, "waits_for_group": 5, "in_buffer": 10, "total": 45}
    )


def test_br_06_br_07_waits_of_the_trainer_and_of_ready_groups() -> None:
    b = sync_run(warmup=1).buffer
    # from the trainer's release at 66 nothing is in the buffer until 86, then members without their group until 116
    assert (b.empty_s, b.not_ready_s, b.too_few_ready_s) == (20, 30, 0)
    assert b.ready_wait_s == (20 + 0) / 2
    assert b.producer_blocked_s == 0


def test_br_12_producer_blocked_is_the_time_of_a_full_buffer_per_step() -> None:
    records = [*sync_step(0.0, 0), *sync_step(71.0, 1), *sync_step(142.0, 2)]
    records += [
        (said.TimerFired(80.0, 1), [do.Note("admission", "buffer_full")]),
        (said.TimerFired(104.0, 1), [do.Note("admission", "barrier")]),
    ]
    records.sort(key=lambda r: r[0].t)
    s = fold(scenario(run__warmup_steps=1, run__num_rollout=10), records).summary()
    assert s.buffer.producer_blocked_s == 24 / 2


def test_as_01_a_synchronous_run_has_no_overlap_and_no_staleness() -> None:
    s = sync_run(warmup=0, steps=3)
    assert s.overlap_s_per_step == 0
    assert s.hidden_generation_share == 0
    for name, reading in s.staleness.items():
        assert (reading.completion.max, reading.dequeue.max) == (0, 0), name
        assert reading.dequeue.histogram == {0: 12}
    assert (s.staleness_in_generation, s.staleness_in_buffer) == (0, 0)


def test_as_02_training_while_engines_generate_is_overlap() -> None:
    """One engine generates from 0 to 100; the batch is trained from 40 to 60 and generation goes on."""
    records = [
        (said.RunStarted(0.0), [start(0, 0), start(1, 1)]),
        (finished(40.0, 0, 0, 0.0), [do.Train(0, 1, 1, (experience(trajectory=0),), "fifo")]),
        (said.TrainStepFinished(60.0, 0, 0), [do.Retire((0,), 0, "trained", "", 100)]),
    ]
    s = fold(scenario(), records).summary()
    assert s.overlap_s_per_step == 20
    assert s.hidden_generation_share == pytest.approx(20 / (40 + 60))


def as_06_run(**changes: Any) -> RunSummary:
    """Starts on v3, generated under v4, taken under v5; and one that is fresh."""
    stale = experience(
        trajectory=0, dispatch_version=3, oldest_version=3, newest_version=4, completion_deployed=4, dequeue_deployed=5
    )
    fresh = experience(
        trajectory=1,
        group=1,
        dispatch_version=5,
        oldest_version=5,
        newest_version=5,
        completion_deployed=5,
        dequeue_deployed=5,
    )
    records = [
        (said.RunStarted(0.0), [start(0, 0), start(1, 1, group=1)]),
        (finished(10.0, 0, 0, 0.0), []),
        (finished(10.0, 1, 1, 0.0), [do.Train(0, 1, 1, (stale, fresh), "fifo")]),
        (
            said.TrainStepFinished(20.0, 0, 0),
            [do.Retire((0,), 0, "trained", "", 100), do.Retire((1,), 1, "trained", "", 100)],
        ),
    ]
    return fold(scenario(**changes), records).summary()


def test_as_06_as_07_rp_07_both_readings_and_where_staleness_arose() -> None:
    s = as_06_run()
    assert s.staleness_measure == "oldest_token"
    reading = s.staleness["oldest_token"]
    assert reading.completion.histogram == {0: 1, 1: 1}
    assert reading.dequeue.histogram == {0: 1, 2: 1}
    assert (s.staleness_in_generation, s.staleness_in_buffer) == (0.5, 0.5)
    assert s.staleness["completion"].completion.histogram == {0: 2}
    assert (s.steps[0].staleness_mean, s.steps[0].staleness_max) == (1.0, 2)


def test_the_steps_state_the_measure_of_the_scenario() -> None:
    s = as_06_run(experience__staleness={"measure": "completion", "bound": 3})
    assert (s.staleness_measure, s.staleness_bound) == ("completion", 3)
    assert (s.steps[0].staleness_mean, s.steps[0].staleness_max) == (0.5, 1)


def test_trainer_steps_at_completion_are_read_from_the_updates_until_then() -> None:
    """Dispatched before the first update; 2 updates when it was generated at 25; 3 when it was taken."""
    e = experience(
        trajectory=9, group=9, generated_t=25.0, dequeued_t=30.0, dispatch_trainer_version=0, trainer_version=3
    )
    records = []
    for i, t in enumerate((10.0, 20.0, 30.0)):
        old = experience(trajectory=i, group=i, trainer_version=i, dispatch_trainer_version=i)
        records += [
            (said.TimerFired(t - 5, 0), [do.Train(i, 1, 1, (old,), "fifo")]),
            (said.TrainStepFinished(t, i, 0), []),
        ]
    records += [(said.TimerFired(30.0, 0), [do.Train(3, 1, 1, (e,), "fifo")]), (said.TrainStepFinished(35.0, 3, 0), [])]
    s = fold(scenario(run__warmup_steps=3, run__num_rollout=4), records).summary()
    assert s.staleness["trainer_steps"].completion.histogram == {2: 1}
    assert s.staleness["trainer_steps"].dequeue.histogram == {3: 1}


def waste_run() -> RunMetrics:
    """Tokens: 0 trained (100, 30 of them masked), 1 dropped as stale (100), 2 aborted with 7 lost, 3 trained after 9
    were lost, 4 not over yet (100)."""
    a = experience(trajectory=0, masked_tokens=30, corrected=True)
    b = experience(trajectory=3, group=3)
    return fold(
        scenario(),
        [
            (said.RunStarted(0.0), [start(i, i % 2, group=i) for i in range(5)]),
            (said.TurnFailed(5.0, 3, 0, 1, "aborted", 9), [start(3, 1, group=3, attempt=1)]),
            (finished(10.0, 0, 0, 0.0), []),
            (finished(10.0, 1, 1, 0.0), []),
            (finished(10.0, 4, 0, 0.0), []),
            (said.TurnFailed(12.0, 2, 0, 0, "aborted", 7), [do.Retire((2,), 2, "aborted", "over_sampled", 7)]),
            (
                finished(15.0, 3, 1, 5.0, finish_reason="length"),
                [do.Retire((1,), 1, "dropped", "stale", 100, 3), do.Train(0, 1, 1, (a, b), "fifo")],
            ),
            (
                said.TrainStepFinished(20.0, 0, 0),
                [do.Retire((0,), 0, "trained", "", 100), do.Retire((3,), 3, "trained", "", 109)],
            ),
        ],
    )


def test_waste_by_reason_and_the_conservation_of_tokens() -> None:
    metrics = waste_run()
    w = metrics.summary().waste
    assert w.generated_tokens == 4 * 100 + 7 + 9
    assert w.trained_tokens == 70 + 100
    assert w.masked_tokens == 30
    assert w.dropped_tokens == {"stale": 100, "over_sampled": 7, "lost_turn": 9}
    assert w.dropped_trajectories == {"stale": 1, "over_sampled": 1}
    assert (w.trained_trajectories, w.corrected_trajectories) == (2, 1)
    in_flight = 100
    assert w.generated_tokens == w.trained_tokens + w.masked_tokens + sum(w.dropped_tokens.values()) + in_flight


def test_generation_of_dropped_tokens_is_a_cause_of_its_own() -> None:
    s = waste_run().summary()
    seconds = s.pools[0].gpu_seconds
    # engine 0 works to 12, engine 1 to 15: 27 in all
    assert seconds["generate"] + seconds["generate_dropped"] == pytest.approx(27)
    assert seconds["generate_dropped"] == pytest.approx(27 * s.waste.share)


def test_capped_share_and_lengths_are_of_trained_trajectories() -> None:
    s = waste_run().summary()
    assert s.capped_share == 0.5
    assert (s.output_length.count, s.output_length.mean) == (2, 100)


def test_br_08_a_reused_trajectory_carries_loss_again_and_counts_once() -> None:
    e = experience(trajectory=0, submitted_t=0.0, dequeued_t=10.0, group_ready_t=10.0, ready_t=10.0, generated_t=10.0)
    again = experience(trajectory=0, use=1, dequeued_t=20.0, dequeue_deployed=1)
    s = fold(
        scenario(),
        [
            (said.RunStarted(0.0), [start(0, 0)]),
            (finished(10.0, 0, 0, 0.0), [do.Train(0, 1, 1, (e,), "fifo")]),
            (said.TrainStepFinished(20.0, 0, 0), [do.Train(1, 1, 1, (again,), "fifo")]),
            (said.TrainStepFinished(30.0, 1, 0), [do.Retire((0,), 0, "trained", "", 100)]),
        ],
    ).summary()
    assert s.trained_tokens_per_s_per_gpu == pytest.approx(200 / (30 * 4))
    assert (s.waste.trained_tokens, s.waste.trained_trajectories) == (100, 1)
    assert s.trajectory.total == 10
    assert [x.trained_tokens for x in s.steps] == [100, 100]


def test_rp_08_reuse_of_kv_and_its_age() -> None:
    records = [
        (said.RunStarted(0.0), [start(0, 0), start(1, 0)]),
        (said.EngineResumed(1.0, 0, 4), []),
        (
            finished(
                5.0, 0, 0, 1.0, prompt_tokens=80, cached_tokens=60, recomputed_tokens=5, kv_version=1, retractions=2
            ),
            [],
        ),
        (finished(9.0, 1, 0, 1.0, prompt_tokens=20), [do.Train(0, 1, 1, (experience(),), "fifo")]),
        (said.TrainStepFinished(10.0, 0, 0), []),
    ]
    keep = {"pause_generation_mode": "in_place", "kv": "keep"}
    kv = fold(scenario(weights__transition=keep), records).summary().kv
    assert (kv.prompt_tokens, kv.cached_tokens, kv.recomputed_tokens, kv.retractions) == (100, 60, 5, 2)
    assert kv.kv_age.histogram == {3: 1}


def test_recomputation_that_engines_report_is_moved_out_of_generation_by_step() -> None:
    records = [
        (said.RunStarted(0.0), [start(0, 0)]),
        (finished(10.0, 0, 0, 0.0), [do.Train(0, 1, 1, (experience(),), "fifo")]),
        (said.LoadReported(20.0, 0, 0, 0, 0, 0, 0, 1.0, 4.0, 5.0), []),
        (said.TrainStepFinished(20.0, 0, 0), []),
    ]
    s = fold(scenario(), records).summary()
    assert nonzero(s.pools[0].gpu_seconds) == {"generate": 6, "recompute_kv": 4, "idle_longest": 10, "idle_trainer": 20}


def test_a_run_that_ends_in_its_warm_up_measures_nothing() -> None:
    s = sync_run(warmup=5)
    assert (s.measured_steps, s.warmup_steps, s.measured_s, len(s.steps)) == (0, 2, 0, 2)
    assert s.step_time_mean_s == s.trained_tokens_per_s_per_gpu == s.cost_usd_per_1000_steps == 0
    assert all(not nonzero(p.gpu_seconds) for p in s.pools)


def test_what_happens_after_the_last_step_counts_only_in_wall_time() -> None:
    end = (said.TimerFired(500.0, 1), [do.Retire((77,), 9, "aborted", "run_ended", 0)])
    sc = scenario(run__warmup_steps=1, run__num_rollout=10)
    records = [*sync_step(0.0, 0), *sync_step(71.0, 1)]
    a, b = fold(sc, records).summary(), fold(sc, [*records, end]).summary()
    assert b.wall_s == 500.0
    assert (b.pools, b.waste, b.step_time, b.trajectory) == (a.pools, a.waste, a.step_time, a.trajectory)


def test_the_summary_may_be_asked_at_any_time_and_uses_nothing_up() -> None:
    metrics = fold(scenario(), sync_step(0.0, 0))
    assert metrics.summary() == metrics.summary()


def test_who_ran_it_is_handed_in() -> None:
    metrics = fold(scenario(), [])
    s = metrics.summary(RunMeta(backend="real", scenario_hash="abc"), seed=7, kinds={"engine_step": "measured"})
    assert (s.name, s.backend, s.scenario_hash, s.seed, s.kinds) == (
        "test",
        "real",
        "abc",
        7,
        {"engine_step": "measured"},
    )
    assert (metrics.summary().seed, metrics.summary().backend) == (0, "simulated")


def test_the_event_counter_counts() -> None:
    counter = EventCounter()
    for event, actions in sync_step(0.0, 0):
        counter.observe(event, actions)
    assert counter.events == 20


def test_no_object_is_kept_of_a_trajectory_that_is_over() -> None:
    """Everything but one record a step and the update times is the same after 80 steps and after 160."""
    sc = scenario(run__warmup_steps=1, run__num_rollout=1000)
    sizes = []
    metrics = RunMetrics(sc, layout_of(sc))
    for i in range(160):
        for event, actions in sync_step(71.0 * i, i):
            metrics.observe(event, actions)
        if i in (79, 159):
            metrics._steps, metrics._update_times, kept = [], [], (metrics._steps, metrics._update_times)
            sizes.append(_reachable(metrics))
            metrics._steps, metrics._update_times = kept
    assert sizes[0] == pytest.approx(sizes[1], abs=20)


def _reachable(root: object) -> int:
    """Objects that can be reached from `root` without passing through a class, a module or a function's globals."""
    import gc
    import types

    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, (type, types.ModuleType, types.FunctionType)):
            continue
        seen[id(x)] = x
        todo += gc.get_referents(x)
    return len(seen)
