"""Publications of weights, part by part (WS-05, WS-06, WS-10, WS-11), from events written by hand."""

from __future__ import annotations

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.summary import WeightUpdate
from testbed.metrics.updates import Updates, mean_update
from tests.metrics.builders import start


def measure(*steps: tuple[float, said.Event | do.Action]) -> WeightUpdate:
    updates = Updates()
    for t, what in steps:
        if type(what) in updates.handlers:
            updates.handlers[type(what)](t, what)
    return mean_update(updates.take(), updates.path)


def prepare(version: int, engines: tuple[int, ...], path: str = "broadcast") -> do.PrepareWeights:
    return do.PrepareWeights(version, version, path, engines, 1, "interval")


def copy(engine: int, version: int, wave: tuple[int, ...]) -> do.CopyWeights:
    return do.CopyWeights(engine, version, "broadcast", wave)


V21 = (
    (0.0, prepare(21, (0, 1))),
    (10.0, said.WeightsPrepared(10.0, 21, 10.0, 64_000)),
    (10.0, do.PauseEngine(0, "retract", 21)),
    (10.0, do.PauseEngine(1, "retract", 21)),
    (11.0, said.EnginePaused(11.0, 0)),
    (12.0, said.EnginePaused(12.0, 1)),
    (12.0, copy(0, 21, (0, 1))),
    (12.0, copy(1, 21, (0, 1))),
    (15.0, said.WeightsCopied(15.0, 0, 21)),
    (16.0, said.WeightsCopied(16.0, 1, 21)),
    (18.0, said.EngineReady(18.0, 0, 21)),
    (24.0, said.EngineReady(24.0, 1, 21)),
    (25.0, said.EngineResumed(25.0, 0, 21)),
    (26.0, said.EngineResumed(26.0, 1, 21)),
)
"""WS-05: v21 to A and B; copied is not ready; A is ready first, B later."""


def test_ws_05_ws_06_v21_to_a_and_b() -> None:
    u = measure(*V21)
    assert (u.count, u.failed, u.path, u.bytes) == (1, 0, "broadcast", 64_000)
    assert u.prepare_s == 10
    assert u.drain_s == 2
    assert u.copy_s == 4
    assert u.requantize_s == (3 + 8) / 2
    assert u.barrier_s == 6


def test_ws_10_the_pause_is_not_the_whole_update() -> None:
    u = measure(*V21)
    assert u.pause_s == ((25 - 11) + (26 - 12)) / 2 == 14
    assert u.total_s == 26


def test_ws_11_from_effective_to_the_first_request_on_the_new_version() -> None:
    before = (25.5, start(0, 0))
    u = measure(*V21[:-1], before, V21[-1], (29.0, start(1, 0)), (40.0, start(2, 1)))
    assert u.effective_to_first_request_s == 3


def test_means_are_per_publication() -> None:
    later = []
    for t, what in V21:
        shifted = {"version": 22} if hasattr(what, "version") else {}
        fields = {f: getattr(what, f) for f in what.__struct_fields__} | shifted
        if "t" in fields:
            fields["t"] = t + 100
        later.append((t + 100, type(what)(**fields)))
    later[-1] = (130.0, said.EngineResumed(130.0, 1, 22))
    u = measure(*V21, *later)
    assert u.count == 2
    assert u.total_s == (26 + 30) / 2
    assert u.pause_s == (14 + (14 + 18) / 2) / 2


def test_requests_that_finish_first_are_part_of_the_drain() -> None:
    """Under `finish` an engine is asked to pause when its requests have ended: the drain begins when the weights are
    prepared."""
    u = measure(
        (0.0, prepare(1, (0, 1))),
        (1.0, said.WeightsPrepared(1.0, 1)),
        (1.0, do.PauseEngine(0, "retract", 1)),
        (1.0, said.EnginePaused(1.0, 0)),
        (9.0, do.PauseEngine(1, "retract", 1)),
        (9.0, said.EnginePaused(9.0, 1)),
        (9.0, copy(0, 1, (0, 1))),
        (9.0, copy(1, 1, (0, 1))),
        (11.0, said.WeightsCopied(11.0, 0, 1)),
        (11.0, said.WeightsCopied(11.0, 1, 1)),
        (11.0, said.EngineResumed(11.0, 0, 1)),
        (11.0, said.EngineResumed(11.0, 1, 1)),
    )
    assert (u.drain_s, u.copy_s, u.requantize_s, u.barrier_s) == (8, 2, 0, 0)
    assert u.pause_s == (10 + 2) / 2


def test_ws_06_waves_have_their_own_barriers_and_add_up() -> None:
    steps: list[tuple[float, said.Event | do.Action]] = [(0.0, prepare(1, (0, 1))), (2.0, said.WeightsPrepared(2.0, 1))]
    for engine, t in ((0, 2.0), (1, 8.0)):
        steps += [
            (t, do.PauseEngine(engine, "in_place", 1)),
            (t + 1, said.EnginePaused(t + 1, engine)),
            (t + 1, copy(engine, 1, (engine,))),
            (t + 4, said.WeightsCopied(t + 4, engine, 1)),
            (t + 5, said.EngineReady(t + 5, engine, 1)),
            (t + 6, said.EngineResumed(t + 6, engine, 1)),
        ]
    u = measure(*steps)
    assert (u.drain_s, u.copy_s, u.requantize_s, u.barrier_s, u.pause_s, u.total_s) == (2, 6, 2, 0, 5, 14)


def test_on_a_shared_pool_the_drain_begins_when_its_engines_are_back() -> None:
    u = measure(
        (0.0, prepare(1, (0,), "cuda_ipc")),
        (1.0, said.WeightsPrepared(1.0, 1)),
        (1.0, do.SwitchPool(0, "generate", "")),
        (4.0, said.PoolSwitched(4.0, 0, "generate")),
        (4.0, do.PauseEngine(0, "retract", 1)),
        (4.5, said.EnginePaused(4.5, 0)),
        (4.5, copy(0, 1, (0,))),
        (6.0, said.WeightsCopied(6.0, 0, 1)),
        (7.0, said.EngineResumed(7.0, 0, 1)),
    )
    assert (u.prepare_s, u.drain_s, u.copy_s, u.pause_s, u.total_s) == (1, 0.5, 1.5, 2.5, 7)


def test_ws_14_a_failed_update_is_counted_and_not_measured() -> None:
    old = [
        (15.5, said.WeightUpdateFailed(15.5, 1, 21, "copy", "link down")),
        (16.0, said.EngineResumed(16.0, 0, 20)),
        (16.0, said.EngineResumed(16.0, 1, 20)),
    ]
    u = measure(*[s for s in V21 if s[0] <= 15.0], *old)
    assert (u.count, u.failed, u.total_s) == (0, 1, 0)


def test_a_failed_preparation_is_counted() -> None:
    u = measure((0.0, prepare(1, (0,))), (3.0, said.WeightUpdateFailed(3.0, -1, 1, "prepare", "disk full")))
    assert (u.count, u.failed) == (0, 1)


def test_a_copy_that_is_sent_again_and_succeeds_is_both_failed_and_measured() -> None:
    retry = [(15.5, said.WeightUpdateFailed(15.5, 1, 21, "copy", "link down")), (15.5, copy(1, 21, (0, 1)))]
    u = measure(*[s for s in V21 if s[0] <= 15.0], *retry, *[s for s in V21 if s[0] > 15.0])
    assert (u.count, u.failed, u.total_s) == (1, 1, 26)


def test_a_participant_that_is_lost_does_not_hold_the_update() -> None:
    lost = [s for s in V21 if s[0] <= 18.0] + [
        (20.0, said.EngineLost(20.0, 1)),
        (21.0, said.EngineResumed(21.0, 0, 21)),
    ]
    u = measure(*lost)
    assert (u.count, u.total_s, u.pause_s, u.barrier_s) == (1, 21, 10, 0)


def test_engines_that_catch_up_later_are_no_publication() -> None:
    u = measure(
        *V21,
        (50.0, do.PauseEngine(2, "retract", 21)),
        (51.0, said.EnginePaused(51.0, 2)),
        (51.0, copy(2, 21, (2,))),
        (55.0, said.WeightsCopied(55.0, 2, 21)),
        (56.0, said.EngineResumed(56.0, 2, 21)),
    )
    assert (u.count, u.total_s) == (1, pytest.approx(26))
