"""Figures of runs that the core drives over a backend made of constants, against what must hold in any run."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.summary import RunSummary
from testbed.scenario import Scenario
from tests.metrics.builders import fold
from tests.support.scenarios import COLOCATED, scenario
from tests.support.scripted import Scripted

ASYNC: dict[str, Any] = {
    "rollout__admission": {"type": "bounded", "max_head_offpolicyness": 2},
    "weights__transition": {"pause_generation_mode": "in_place", "kv": "keep"},
    "experience__staleness": {"bound": 2},
}
RUN = {"run__num_rollout": 8, "run__warmup_steps": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "sync": {},
    "colocated": COLOCATED,
    "async": ASYNC,
    "tight": {**ASYNC, "experience__staleness": {"bound": 0}, "experience__buffer": {"type": "store_then_ready"}},
    "four_updates": {"algorithm__num_steps_per_rollout": 4, **ASYNC},
    "critic": {"algorithm__advantage": "critic"},
}


def carried_out(s: Scenario, **backend: Any) -> tuple[Scripted, RunSummary]:
    """Replies take 10 to 16 s, so that members of a group and engines differ."""
    run = Scripted(s, **{"turn": lambda a: 10.0 + a.trajectory % 4 * 2.0, "prepare": 1.0, "pause": 0.5, **backend})
    run.run()
    return run, fold(s, run.records).summary()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("turns", [1, 3])
def test_rp_06_gpu_time_closes_in_every_mode(name: str, turns: int) -> None:
    _, s = carried_out(scenario(**RUN, **VARIANTS[name]), turns=turns)
    assert s.measured_steps == 6
    for pool in s.pools:
        assert sum(pool.gpu_seconds.values()) == pytest.approx(pool.gpus * s.measured_s, rel=1e-6)
        assert all(v >= -1e-9 for v in pool.gpu_seconds.values())
    assert sum(p.gpus for p in s.pools) == s.num_gpus == 4


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("turns", [1, 3])
def test_rp_09_a_trajectorys_parts_sum_to_its_life(name: str, turns: int) -> None:
    _, s = carried_out(scenario(**RUN, **VARIANTS[name]), turns=turns)
    parts = {f: getattr(s.trajectory, f) for f in s.trajectory.__struct_fields__}
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total)
    assert all(v >= -1e-9 for v in parts.values()), parts
    assert s.trajectory.tool == pytest.approx(3.0 * (turns - 1))
    # a turn takes 10 + 0, 2, 4 or 6 s, or longer where the engine was held still
    assert s.trajectory.prefill + s.trajectory.decode + s.trajectory.paused >= 10 * turns


@pytest.mark.parametrize("name", VARIANTS)
def test_br_14_tokens_generated_are_trained_dropped_or_not_over_yet(name: str) -> None:
    """Up to the end of the last step, without warm-up."""
    run, s = carried_out(scenario(run__num_rollout=8, run__warmup_steps=0, **VARIANTS[name]))
    w = s.waste
    end = s.steps[-1].end_t
    finished = [e for t, e in run.of(said.TurnFinished, said.TurnFailed) if t <= end]
    assert w.generated_tokens == sum(e.output_tokens for e in finished)
    not_over = {i for _, a in run.of(do.Retire) if a.reason == "run_ended" for i in a.trajectories}
    left = sum(e.output_tokens for e in finished if e.trajectory in not_over)
    assert w.generated_tokens == w.trained_tokens + w.masked_tokens + sum(w.dropped_tokens.values()) + left
    assert w.trained_trajectories == 8 * 4


def test_as_11_pl_01_only_an_asynchronous_run_overlaps() -> None:
    overlap = {name: carried_out(scenario(**RUN, **VARIANTS[name]))[1].overlap_s_per_step for name in VARIANTS}
    assert overlap["sync"] == overlap["colocated"] == 0
    assert 0 < overlap["async"] <= 5.0


def test_staleness_of_a_synchronous_run_is_zero_and_of_an_asynchronous_one_within_its_bound() -> None:
    for name, largest in (("sync", 0), ("colocated", 0), ("async", 2)):
        run, s = carried_out(scenario(**RUN, **VARIANTS[name]))
        reading = s.staleness["oldest_token"].dequeue
        taken = [e for _, a in run.of(do.Train) if a.batch >= 2 for e in a.experiences]
        assert reading.count == len(taken) == 24
        assert reading.mean == pytest.approx(sum(e.dequeue_deployed - e.oldest_version for e in taken) / 24)
        assert reading.max <= largest
    assert s.staleness_in_generation + s.staleness_in_buffer == pytest.approx(1)


def test_as_05_staleness_in_versions_is_the_same_with_four_updates_a_batch() -> None:
    _, one = carried_out(scenario(**RUN, **ASYNC), train=5.0)
    _, four = carried_out(scenario(**RUN, **VARIANTS["four_updates"]), train=5.0 / 4)
    assert one.staleness["oldest_token"].dequeue.histogram == four.staleness["oldest_token"].dequeue.histogram
    assert one.staleness["create_step"].dequeue.histogram == four.staleness["create_step"].dequeue.histogram
    assert four.staleness["trainer_steps"].dequeue.mean > 2 * one.staleness["trainer_steps"].dequeue.mean


def test_ws_10_one_publication_a_step_and_its_parts() -> None:
    _, s = carried_out(scenario(**RUN), copy=lambda a: 1.0 + a.engine, resume=0.25)
    u = s.weight_update
    assert (u.count, u.failed, u.path) == (6, 0, "broadcast")
    assert (u.prepare_s, u.drain_s, u.copy_s, u.requantize_s) == (1.0, 0.5, 2.0, 0.0)
    assert u.pause_s == pytest.approx(2.0 + 0.25)
    assert u.total_s == pytest.approx(1.0 + 0.5 + 2.0 + 0.25)
    assert u.effective_to_first_request_s == 0


def test_br_10_the_trainer_waits_for_data_and_says_what_the_buffer_looked_like() -> None:
    _, s = carried_out(scenario(**RUN))
    trainer = next(p for p in s.pools if p.lane == "trainer")
    waits = s.buffer.empty_s + s.buffer.not_ready_s + s.buffer.too_few_ready_s
    assert waits == pytest.approx(trainer.gpu_seconds["idle_data"] / trainer.gpus / s.measured_steps)
    assert waits > 0


def test_memory_holds_only_what_is_alive() -> None:
    s = scenario(**RUN, **ASYNC)
    run, _ = carried_out(s)
    metrics = fold(s, run.records)
    retired = [i for _, a in run.of(do.Retire) for i in a.trajectories]
    started = {a.trajectory for _, a in run.of(do.StartTurn)}
    assert len(metrics._lives) == len(started - set(retired))
