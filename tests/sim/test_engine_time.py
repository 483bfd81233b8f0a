"""When things happen: both kinds of forward against schedules worked out by hand, and what cuts a run of decode
steps."""

from __future__ import annotations

import pytest

from sim.engine import EngineModel, EngineModelOptions, EngineStuck, Finished, Paused
from tests.support.engine_play import ask, engine, kinds, play, serve
from tests.support.engine_workloads import LinearCosts

BOTH = pytest.mark.parametrize("mode", ["iterate", "skip"])
TEN = LinearCosts(1.0, 0.0, 0.0, 10.0, 0.0, 0.0)
"""Prefill 10 s, decode step 1 s."""

# (forward, overlap, ends by): first token, finish, GPU seconds of decode steps; three output tokens
SCHEDULES = {
    # host: the results of a batch are handled after the next batch has run: P 0-10, D1 10-11 (first token), D2 11-12,
    # then no batch
    ("host", True, "length"): (11.0, 12.0, 2.0),
    # a stop is only known a step later: D3 12-13 is an overshoot
    ("host", True, "stop"): (11.0, 13.0, 3.0),
    # device: P is launched at 0 and ends at 10, when D1 (launched at 0 too) starts; D1 ends at 11, D2 at 12
    ("device", True, "length"): (10.0, 12.0, 2.0),
    ("device", True, "stop"): (10.0, 12.0, 3.0),
    ("host", False, "length"): (10.0, 12.0, 2.0),
    ("host", False, "stop"): (10.0, 12.0, 2.0),
    ("device", False, "length"): (10.0, 12.0, 2.0),
    ("device", False, "stop"): (10.0, 12.0, 2.0),
}


@BOTH
@pytest.mark.parametrize(("forward", "overlap", "ends"), SCHEDULES)
def test_schedule_of_one_request(mode: str, forward: str, overlap: bool, ends: str) -> None:
    first, finish, decode = SCHEDULES[forward, overlap, ends]
    e = engine(mode, TEN, forward=forward, disable_overlap_schedule=not overlap)
    done = serve(e, ask(1, 5, 3, max_new=9 if ends == "stop" else None))[1]
    assert (done.started_t, done.first_token_t, done.t, done.finish_reason) == (0.0, first, finish, ends)
    assert (e.decode_s, e.prefill_s, e.recompute_s) == (decode, 10.0, 0.0)


@BOTH
def test_an_arrival_cuts_the_run_at_the_end_of_the_step_in_progress(mode: str) -> None:
    """Device: D1 10-11, D2 11-12, D3 12-13. An arrival at 11.5 is taken in at 12, when D3 has been launched (at 11):
    prefill 13-23."""
    e = engine(mode, TEN, forward="device")
    said = play(e, [(0.0, lambda t: e.submit(t, ask(1, 5, 30))), (11.5, lambda t: e.submit(t, ask(2, 5, 2)))])
    second = next(n for n in said if n.rid == 2)
    assert (second.started_t, second.first_token_t, second.t) == (12.0, 23.0, 24.0)
    assert kinds(e)[:6] == "PDDDPD"


@BOTH
def test_an_arrival_at_a_boundary_is_taken_in_there(mode: str) -> None:
    e = engine(mode, TEN, forward="device")
    said = play(e, [(0.0, lambda t: e.submit(t, ask(1, 5, 30))), (11.0, lambda t: e.submit(t, ask(2, 5, 2)))])
    assert next(n for n in said if n.rid == 2).started_t == 11.0


@BOTH
def test_a_request_that_answers_a_finish_joins_the_very_next_iteration(mode: str) -> None:
    e = engine(mode, TEN, forward="host")
    e.submit(0.0, ask(1, 5, 3))
    e.submit(0.0, ask(2, 5, 30))
    while not (said := e.advance(e.wake_at)):
        pass
    assert said[0].t == 13.0, "the other request's next step has run meanwhile"
    e.submit(13.0, ask(3, 5, 1))
    assert next(n for n in play(e, []) if n.rid == 3).started_t == 13.0


def test_a_request_that_can_only_queue_does_not_cut_a_run() -> None:
    e = engine("skip", TEN, forward="device", max_running_requests=1)
    e.submit(0.0, ask(1, 5, 1000))
    e.advance(0.0)
    wake = e.wake_at
    for k in range(50):
        e.submit(20.0 + k, ask(2 + k, 5, 1))
        assert e.wake_at == wake
    assert e.waiting == 50
    done = play(e, [])
    assert [n.rid for n in done] == list(range(1, 52))


def test_wake_ups_do_not_grow_with_the_tokens() -> None:
    for n in (100, 100_000):
        e = EngineModel(EngineModelOptions(max_total_num_tokens=10**6), TEN)
        wakes = 0
        e.submit(0.0, ask(1, 5, n))
        while e.wake_at < float("inf"):
            e.advance(e.wake_at)
            wakes += 1
        assert wakes <= 4


@BOTH
def test_an_idle_engine_resets_the_ratio_once_it_has_been_idle(mode: str) -> None:
    e = engine(mode, TEN)
    e.submit(0.0, ask(1, 5, 100))
    said = []
    while not said:
        said = e.advance(e.wake_at)
    t = said[0].t
    assert e.ratio.taken == 99
    e.submit(t, ask(2, 5, 11))  # at the same instant: no idle iteration comes between
    (second,) = play(e, [])
    assert e.ratio.taken == 109
    e.submit(second.t + 1e-9, ask(3, 5, 11))
    play(e, [])
    assert e.ratio.taken == 10


@BOTH
@pytest.mark.parametrize("forward", ["host", "device"])
def test_seconds_of_recomputed_tokens_are_told_apart(mode: str, forward: str) -> None:
    """A prompt of 100 known tokens of which 40 are cached: 60 of 80 computed tokens are recomputation."""
    e = engine(mode, LinearCosts(1.0, 0.0, 0.0, 0.0, 0.5, 0.0), forward=forward)
    serve(e, ask(1, (("p", 0, 40),)))
    before = e.prefill_s
    done = serve(e, ask(2, (("p", 0, 120),), known_tokens=100))[2]
    assert (done.cached_tokens, done.recomputed_tokens) == (40, 60)
    assert e.recompute_s == pytest.approx(30.0)
    assert e.prefill_s - before == pytest.approx(10.0)
    assert (e.prefill_tokens, e.cached_tokens, e.recomputed_tokens) == (120, 40, 60)


@BOTH
@pytest.mark.parametrize("padded", [False, True])
def test_the_cost_model_is_asked_for_tokens_pairs_and_requests(mode: str, padded: bool) -> None:
    """Prompts of 40, then of 100 with 40 cached and of 10; padded pairs are squares of whole contexts."""
    asked = []

    class Costs(LinearCosts):
        def prefill_time(self, new_tokens: int, attention: float, requests: int) -> float:
            asked.append((new_tokens, attention, requests))
            return 1.0

    Costs.padded_attention = padded
    e = engine(mode, Costs(1.0, 0.0, 0.0))
    serve(e, ask(1, (("p", 0, 40),)))
    serve(e, ask(2, (("p", 0, 100),)), ask(3, 10))
    pairs = (40**2, 100**2 + 10**2) if padded else (800, 60 * (40 + 30) + 50)
    assert asked == [(40, pairs[0], 1), (70, pairs[1], 2)]


@BOTH
def test_a_request_that_never_fits_is_reported(mode: str) -> None:
    e = engine(mode, max_total_num_tokens=100)
    e.slots = e.cache.free = 50  # someone else holds half of the pool
    e.submit(0.0, ask("big", 60, 10))
    with pytest.raises(EngineStuck, match="'big' \\(60 prompt tokens"):
        e.advance(0.0)


@BOTH
def test_a_prompt_that_is_too_long_is_refused_after_one_prefill(mode: str) -> None:
    """Prompts of max_req_len - 5 and more become a one-token prompt that is aborted with its first result."""
    e = engine(mode, max_total_num_tokens=100)
    said = serve(e, ask(1, 94), ask(2, 93))
    assert (said[1].reason, said[1].t) == ("refused", 1.0)
    assert isinstance(said[2], Finished)


@BOTH
@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_an_idle_engine_pauses_at_once_and_holds_what_comes(mode: str, pause: str) -> None:
    e = engine(mode)
    e.pause(5.0, pause)
    assert e.advance(e.wake_at) == [Paused(5.0, pause)]
    e.submit(6.0, ask(1, 5, 2))
    assert e.wake_at == float("inf")
    assert e.waiting == 1
    e.resume(9.0)
    assert play(e, [])[0].started_t == 9.0


@BOTH
@pytest.mark.parametrize("forward", ["host", "device"])
@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_a_pause_waits_for_the_forward_in_flight(mode: str, forward: str, pause: str) -> None:
    """Pause asked at 11.5: the boundary is 12; on a device D3, launched at 11, runs until 13, and nothing is computed
    after it."""
    e = engine(mode, TEN, forward=forward)
    said = play(e, [(0.0, lambda t: e.submit(t, ask(1, 5, 30))), (11.5, lambda t: e.pause(t, pause))])
    assert said == [Paused(13.0 if forward == "device" else 12.0, pause)]
    assert e.decode_s == (3.0 if forward == "device" else 2.0)


@BOTH
def test_memory_is_released_only_when_nothing_runs(mode: str) -> None:
    e = engine(mode)
    e.submit(0.0, ask(1, (("p", 0, 50),), 5))
    e.advance(0.0)
    with pytest.raises(RuntimeError, match="running or waiting"):
        e.release_memory(0.5)
    play(e, [])
    e.release_memory(10.0)
    assert e.cache.free == e.slots, "KV and tree are gone"
    e.submit(11.0, ask(2, (("p", 0, 50),), 5))
    assert e.wake_at == float("inf")
    e.resume_memory(30.0)
    (done,) = play(e, [])
    assert (done.started_t, done.cached_tokens) == (30.0, 0)


def test_misuse_is_an_error() -> None:
    e = engine()
    with pytest.raises(ValueError, match="pause mode 'freeze'"):
        e.pause(0.0, "freeze")
    with pytest.raises(RuntimeError, match="not paused"):
        e.resume(0.0)
    with pytest.raises(RuntimeError, match="not released"):
        e.resume_memory(0.0)
    with pytest.raises(ValueError, match="mode 'jump'"):
        engine("jump")
    with pytest.raises(ValueError, match="schedule_policy"):
        engine(schedule_policy="lof")
    with pytest.raises(ValueError, match="chunked_prefill_size"):
        engine(chunked_prefill_size=8, page_size=16)
    e.submit(0.0, ask(1, 5, 10))
    with pytest.raises(ValueError, match="open already"):
        e.submit(0.0, ask(1, 5, 10))
    e.advance(0.0)
    with pytest.raises(RuntimeError, match="paused or idle"):
        e.set_version(0.5, 1)
    e.pause(1.0, "in_place")
    with pytest.raises(RuntimeError, match="paused already"):
        e.pause(1.0, "in_place")
