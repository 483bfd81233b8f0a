"""Where a trajectory's time goes: parts from events written by hand; they sum to the whole."""

from __future__ import annotations

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.trajectory import Lives, PauseClock
from testbed.scenario.layout import layout_of
from tests.metrics.builders import experience, finished, fold, nonzero, start
from tests.support.scenarios import COLOCATED, scenario


def live(*steps: tuple[float, said.Event | do.Action], colocated: bool = False) -> Lives:
    lives = Lives(layout_of(scenario(**COLOCATED) if colocated else scenario()))
    for t, what in steps:
        if type(what) in lives.handlers:
            lives.handlers[type(what)](t, what)
    return lives


def test_turns_and_tools_add_up_over_a_trajectory() -> None:
    lives = live(
        (0, do.PrepareEnvironment(7, 0, 0, 0)),
        (4, said.EnvironmentReady(4, 7)),
        (5, start(7, 0)),
        (16, finished(16, 7, 0, started=6, continues=True, finish_reason="tool_calls")),
        (16, do.RunTool(7, 0)),
        (19, said.ToolFinished(19, 7, 20)),
        (19, start(7, 1, turn=1)),
        (30, finished(30, 7, 1, started=20, turn=1, finish_reason="length", output_tokens=40)),
    )
    life = lives.get(7)
    assert life is not None
    assert (life.environment, life.prefill, life.decode, life.tool, life.paused) == (4, 2, 9 + 9, 3, 0)
    assert (life.tokens, life.capped) == (140, True)


def test_a_pause_during_a_turn_is_taken_from_what_it_interrupted() -> None:
    """Paused 8-12 while queued in the engine (started at 10 only), prefill 10-20 of which 2 s paused, decode 20-40 of
    which 5."""
    lives = live(
        (5, start(0, 0)),
        (8, said.EnginePaused(8, 0)),
        (12, said.EngineResumed(12, 0, 1)),
        (30, said.EnginePaused(30, 0)),
        (35, said.EngineResumed(35, 0, 2)),
        (40, finished(40, 0, 0, started=10, first_token_t=20.0)),
    )
    life = lives.get(0)
    assert life is not None
    assert (life.prefill, life.decode, life.paused) == (8, 15, 4 + 5)


def test_a_turn_that_ends_while_its_engine_is_paused_counts_the_pause_so_far() -> None:
    lives = live((0, start(0, 0)), (4, said.EnginePaused(4, 0)), (6, finished(6, 0, 0, started=0)))
    life = lives.get(0)
    assert life is not None
    assert (life.prefill, life.decode, life.paused) == (1, 3, 2)


def test_a_pause_on_another_engine_or_before_the_turn_does_not_count() -> None:
    lives = live(
        (0, said.EnginePaused(0, 0)),
        (3, said.EngineResumed(3, 0, 1)),
        (3, start(0, 0)),
        (5, said.EnginePaused(5, 1)),
        (10, finished(10, 0, 0, started=3)),
    )
    life = lives.get(0)
    assert life is not None
    assert (life.prefill, life.decode, life.paused) == (1, 6, 0)


def test_a_phase_switch_pauses_the_engines_of_a_shared_pool_and_overlaps_with_an_update_once() -> None:
    lives = live(
        (0, start(0, 0)),
        (10, do.SwitchPool(0, "train", "")),
        (12, said.PoolSwitched(12, 0, "train")),
        (20, do.SwitchPool(0, "generate", "")),
        (21, said.EnginePaused(21, 0)),
        (23, said.PoolSwitched(23, 0, "generate")),
        (25, said.EngineResumed(25, 0, 1)),
        (30, finished(30, 0, 0, started=0)),
        colocated=True,
    )
    life = lives.get(0)
    assert life is not None
    assert (life.prefill, life.decode, life.paused) == (1, 30 - 1 - 15, 15)


def test_pauses_within_an_interval() -> None:
    clock = PauseClock()
    for since, until in ((1.0, 2.0), (4.0, 6.0), (9.0, 10.0)):
        clock.stop(since, "update")
        clock.go(until, "update")
    assert clock.total(10.0) == 4.0
    assert clock.within(0.0, 10.0) == 4.0
    assert clock.within(1.5, 5.0) == 1.5
    assert clock.within(6.0, 9.0) == 0.0


def test_nothing_is_kept_of_a_retired_trajectory_nor_of_one_that_is_not_known() -> None:
    lives = live((0, start(0, 0)), (5, finished(5, 0, 0, started=0)))
    assert lives.pop(0) is not None
    assert len(lives) == 0
    for t, what in (
        (6, finished(6, 0, 0, started=0)),
        (7, said.TurnFailed(7, 3, 0, 0, "aborted", 9)),
        (8, said.ToolFinished(8, 3, 1)),
    ):
        lives.handlers[type(what)](t, what)
    assert len(lives) == 0


def test_rp_09_the_parts_of_a_trained_trajectory_sum_to_its_life() -> None:
    """Submitted 0; environment 1-4; first turn sent 6, lost 8, sent again 9, works 10 to 20, paused 15-17; tool 20-23;
    second turn sent 23, works 24 to 30; signals there at 33, the group at 40, the batch at 44."""
    e = experience(
        submitted_t=0.0, dispatched_t=6.0, generated_t=30.0, ready_t=33.0, group_ready_t=40.0, dequeued_t=44.0, turns=2
    )
    metrics = fold(
        scenario(),
        [
            (said.RunStarted(0.0), []),
            (said.TimerFired(1.0, 0), [do.PrepareEnvironment(0, 0, 0, 0)]),
            (said.EnvironmentReady(4.0, 0), []),
            (said.TimerFired(6.0, 0), [start(0, 0)]),
            (said.TurnFailed(8.0, 0, 0, 0, "aborted", 7), []),
            (said.TimerFired(9.0, 0), [start(0, 0, attempt=1)]),
            (said.EnginePaused(15.0, 0), []),
            (said.EngineResumed(17.0, 0, 0), []),
            (finished(20.0, 0, 0, started=10.0, continues=True), [do.RunTool(0, 0)]),
            (said.ToolFinished(23.0, 0, 5), [start(0, 1, turn=1)]),
            (finished(30.0, 0, 1, started=24.0, turn=1), []),
            (said.SignalReady(44.0, "reward", (0,), (1.0,)), [do.Train(0, 1, 1, (e,), "fifo")]),
            (said.TrainStepFinished(50.0, 0, 0), [do.Retire((0,), 0, "trained", "", 207)]),
        ],
    )
    time = metrics.summary().trajectory
    parts = {f: getattr(time, f) for f in time.__struct_fields__}
    assert nonzero(parts) == pytest.approx(
        {
            "environment": 3,
            "queue": 1 + 2 + 4 + 1,
            "prefill": 2,
            "decode": 7 + 5,
            "paused": 2,
            "tool": 3,
            "waits_for_signals": 3,
            "waits_for_group": 7,
            "in_buffer": 4,
            "total": 44,
        }
    )
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total)
