"""Aborts, pauses, flushes and weight versions: what they do to requests, memory and the cache."""

from __future__ import annotations

import pytest

from sim.engine import Aborted, Finished, Paused
from tests.support.engine_play import ask, engine, kinds, play, prefills, serve

BOTH = pytest.mark.parametrize("mode", ["iterate", "skip"])


@BOTH
def test_a_waiting_request_is_aborted_at_the_next_boundary(mode: str) -> None:
    e = engine(mode, max_running_requests=1)
    script = [(0.0, lambda t: e.submit(t, ask(1, 20, 10))), (0.0, lambda t: e.submit(t, ask(2, 20, 10)))]
    said = play(e, [*script, (2.5, lambda t: e.abort(t, 2))])
    assert [(n.rid, n.t, type(n)) for n in said] == [(2, 3.0, Aborted), (1, 10.0, Finished)]
    assert (said[0].output_tokens, said[0].spans, said[0].started_t) == (0, (), -1.0)


@BOTH
def test_a_half_prefilled_request_is_aborted_with_its_last_chunk_unpublished(mode: str) -> None:
    """Chunks of 64: the abort comes during the third; two are in the tree, the third is given back."""
    e = engine(mode, chunked_prefill_size=64)
    said = play(e, [(0.0, lambda t: e.submit(t, ask(1, (("p", 0, 400),), 5))), (2.5, lambda t: e.abort(t, 1))])
    assert [(n.rid, n.t, n.reason) for n in said] == [(1, 3.0, "aborted")]
    assert len(prefills(e)) == 3
    assert e.cache.evictable == 128
    assert e.cache.free == e.slots - 128
    assert serve(e, ask(2, (("p", 0, 400),)))[2].cached_tokens == 128


@BOTH
def test_a_retract_pause_puts_an_abort_of_the_half_prefilled_off_to_its_first_token(mode: str) -> None:
    """SGLang drops the mark of a half prefilled request that the pause has sent back to the queue; its own stays."""
    e = engine(mode, chunked_prefill_size=64)
    script = [(0.0, lambda t: e.submit(t, ask(1, (("p", 0, 400),), 5))), (2.5, lambda t: e.abort(t, 1))]
    assert [type(n) for n in play(e, [*script, (2.6, lambda t: e.pause(t, "retract"))])] == [Paused]
    assert [r.rid for r in e.queue] == [1]
    e.resume(9.0)
    (gone,) = play(e, [])
    assert (type(gone), gone.reason, gone.output_tokens, gone.retractions) == (Aborted, "aborted", 1, 1)
    assert (e.cache.free + e.cache.evictable, e.rows) == (e.slots, e.max_run)


@BOTH
def test_aborting_what_is_not_open_is_ignored(mode: str) -> None:
    e = engine(mode)
    e.abort(0.0, 7)
    assert e.wake_at == float("inf")
    serve(e, ask(1, 5, 2))
    e.abort(5.0, 1)
    assert e.wake_at == float("inf")


@BOTH
def test_pause_with_abort_ends_everything_then_pauses(mode: str) -> None:
    e = engine(mode, max_running_requests=2)
    script = [(0.0, lambda t, i=i: e.submit(t, ask(i, 20, 50))) for i in range(4)]
    said = play(e, [*script, (4.5, lambda t: e.pause(t, "abort")), (4.6, lambda t: e.submit(t, ask(9, 5, 1)))])
    assert [(n.rid, n.t) for n in said[:-1]] == [(2, 5.0), (3, 5.0), (0, 6.0), (1, 6.0)]
    assert all(isinstance(n, Aborted) for n in said[:-1])
    assert isinstance(said[-1], Paused)
    assert e.waiting == 1, "what came after the pause waits outside"
    assert e.flush(20.0)
    e.resume(21.0)
    assert [(n.rid, type(n)) for n in play(e, [])] == [(9, Finished)]


@BOTH
def test_flush_is_refused_while_a_batch_exists_and_not_for_the_waiting_while_paused(mode: str) -> None:
    e = engine(mode, max_running_requests=1)
    script = [(0.0, lambda t, i=i: e.submit(t, ask(i, 20, 50))) for i in range(2)]
    play(e, script, until=3.5)
    assert not e.flush(3.5)
    play(e, [(3.5, lambda t: e.pause(t, "in_place"))])
    assert not e.flush(5.0), "in_place leaves the batch"
    e.resume(6.0)
    play(e, [(7.5, lambda t: e.pause(t, "retract"))], until=20.0)
    assert len(e.queue) == 2
    assert e.flush(9.0)
    assert (e.cache.free, e.cache.evictable) == (e.slots, 0)
    e.resume(10.0)
    assert {n.rid for n in play(e, [])} == {0, 1}


@BOTH
def test_in_place_goes_on_with_the_kv_it_has(mode: str) -> None:
    e = engine(mode)
    play(e, [(0.0, lambda t: e.submit(t, ask(1, 20, 30))), (7.5, lambda t: e.pause(t, "in_place"))])
    e.set_version(50.0, 4)
    e.resume(50.0)
    (done,) = play(e, [])
    assert kinds(e) == "P" + "D" * 29, "nothing is computed again"
    assert done.t == 30.0 + 42.0, "42 s later than without the pause (at 8)"
    assert (done.recomputed_tokens, done.retractions) == (0, 0)


@BOTH
def test_retract_computes_prompt_and_outputs_again_after_a_flush(mode: str) -> None:
    e = engine(mode)
    play(e, [(0.0, lambda t: e.submit(t, ask(1, 20, 30))), (7.5, lambda t: e.pause(t, "retract"))])
    e.set_version(50.0, 1)
    assert e.flush(50.0)
    e.resume(50.0)
    (done,) = play(e, [])
    assert prefills(e)[1] == [[1, 0, 28]], "20 prompt tokens and 8 outputs"
    assert done.recomputed_tokens == 27, "the last output's KV had not been written"
    assert done.kv_version == -1
    assert e.recomputed_tokens == 27


@BOTH
def test_a_second_change_without_a_token_between_leaves_no_empty_span(mode: str) -> None:
    e = engine(mode)
    play(e, [(0.0, lambda t: e.submit(t, ask(1, 20, 30))), (7.5, lambda t: e.pause(t, "retract"))])
    e.set_version(50.0, 1)
    e.set_version(51.0, 2)
    e.resume(52.0)
    (done,) = play(e, [])
    assert done.spans == ((0, 0, 8), (2, 8, 30))


@BOTH
def test_a_request_without_outputs_belongs_to_the_new_version_alone(mode: str) -> None:
    e = engine(mode, max_running_requests=1)
    script = [(0.0, lambda t, i=i: e.submit(t, ask(i, 20, 10))) for i in range(2)]
    play(e, [*script, (4.5, lambda t: e.pause(t, "retract"))])
    e.set_version(9.0, 1)
    e.resume(9.0)
    done = {n.rid: n for n in play(e, [])}
    assert done[1].spans == ((1, 0, 10),)
    assert done[0].spans == ((0, 0, 5), (1, 5, 10))


@BOTH
def test_a_half_prefilled_request_survives_a_retract_pause(mode: str) -> None:
    e = engine(mode, chunked_prefill_size=64)
    play(e, [(0.0, lambda t: e.submit(t, ask(1, 400, 5))), (2.5, lambda t: e.pause(t, "retract"))])
    assert (e.chunked, [r.rid for r in e.queue]) == (None, [1])
    e.resume(9.0)
    (done,) = play(e, [])
    assert done.retractions == 1
    assert prefills(e)[3] == [[1, 128, 64]], "two published chunks are hit"
    assert done.recomputed_tokens == 64, "the third is computed again"


@BOTH
def test_even_alone_it_does_not_fit(mode: str) -> None:
    """The last request of a batch that cannot get slots even alone is aborted, not waited for."""
    e = engine(mode, max_total_num_tokens=200)
    play(e, [(0.0, lambda t: e.submit(t, ask(1, 20, 100)))], until=5.5)
    e.sync(5.5)
    lost = e.cache.free - 3  # leave three slots
    e.cache.free -= lost
    e.slots -= lost
    e._plan()
    (gone,) = play(e, [])
    assert (type(gone), gone.reason) == (Aborted, "out_of_memory")
    assert e.cache.free + e.cache.evictable == e.slots
    assert e.rows == e.max_run


@BOTH
def test_abort_while_paused_takes_effect_at_once_for_the_waiting(mode: str) -> None:
    e = engine(mode, max_running_requests=1)
    script = [(0.0, lambda t, i=i: e.submit(t, ask(i, 20, 10))) for i in range(2)]
    play(e, [*script, (4.5, lambda t: e.pause(t, "in_place"))])
    e.submit(6.0, ask(5, 20, 10))
    said = play(e, [(7.0, lambda t: e.abort(t, 1)), (7.25, lambda t: e.abort(t, 0)), (7.5, lambda t: e.abort(t, 5))])
    assert [(n.rid, n.t) for n in said] == [(1, 7.0), (5, 7.5)]
    e.resume(10.0)
    (gone,) = play(e, [])
    assert (gone.rid, gone.reason, gone.output_tokens) == (0, "aborted", 5)


# --- prefix reuse (RK) -----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("page", [1, 16])
def test_rk_01_only_the_matching_prefix_is_shared(mode: str, page: int) -> None:
    """a and b branch from P: they share KV(P), rounded down to the page, never each other's outputs."""
    e = engine(mode, page_size=page)
    p = ("p", 0, 100)
    serve(e, ask("a", (p,), 40))
    done = serve(e, ask("b", (p, ("outputs of b", 0, 40))))["b"]
    assert done.cached_tokens == 100 // page * page
    mine = serve(e, ask("a2", (p, ("outputs of a", 0, 40), ("x", 0, 1))))["a2"]
    assert mine.cached_tokens == 139 // page * page


@BOTH
def test_rk_03_reuse_saves_prompt_computation_and_nothing_else(mode: str) -> None:
    """The decode steps of a hit take as long as those of a miss."""
    seconds = {}
    for hit in (True, False):
        e = engine(mode)
        serve(e, ask(1, (("p", 0, 500),)))
        decode, prefill = e.decode_s, e.prefill_tokens
        done = serve(e, ask(2, (("p" if hit else "q", 0, 500),), 50))[2]
        seconds[hit] = (e.decode_s - decode, e.prefill_tokens - prefill, done.cached_tokens)
    assert seconds[True] == (49.0, 1, 499)
    assert seconds[False] == (49.0, 500, 0)


@BOTH
@pytest.mark.parametrize(("forward", "overlap"), [("host", True), ("host", False), ("device", True)])
def test_rk_04_a_freed_slot_is_taken_at_the_next_iteration(mode: str, forward: str, overlap: bool) -> None:
    e = engine(mode, max_running_requests=2, forward=forward, disable_overlap_schedule=not overlap)
    done = serve(e, ask(0, 5, 4), ask(1, 5, 40), ask(2, 5, 4))
    assert done[2].started_t == done[0].t


@BOTH
def test_rk_04_continuous_batching_beats_static_batching(mode: str) -> None:
    """Slots in use: static batches of 4 wait for their longest member, so 4 of 8 lengths decide; the engine fills
    vacant slots."""
    lengths = [100, 10, 10, 10] * 4
    e = engine(mode, max_running_requests=4, disable_overlap_schedule=True)
    done = serve(e, *(ask(i, 1, n) for i, n in enumerate(lengths)))
    busy = sum(lengths)
    static = 4 * 100  # four batches, each as long as its longest reply (a prefill step and 99 decode steps)
    makespan = max(n.t for n in done.values())
    assert busy / (4 * static) == 0.325
    assert busy / (4 * makespan) > 0.6


@BOTH
def test_rk_08_old_kv_is_not_reused_under_a_new_salt_and_its_age_is_known_if_kept(mode: str) -> None:
    e = engine(mode)
    prompt = (("p", 0, 100),)
    serve(e, ask(1, prompt, namespace=0))
    e.set_version(e.t, 1)
    salted = serve(e, ask(2, prompt, namespace=1))[2]
    assert (salted.cached_tokens, salted.kv_version) == (0, -1)
    kept = serve(e, ask(3, prompt, namespace=0))[3]
    assert (kept.cached_tokens, kept.kv_version) == (99, 0)
    again = serve(e, ask(4, prompt, namespace=1))[4]
    assert (again.cached_tokens, again.kv_version) == (99, 1)


@BOTH
def test_rk_08_the_oldest_version_on_the_path_is_reported(mode: str) -> None:
    """A turn computed with version 1 on top of a prefix of version 0: the next turn's KV goes back to version 0."""
    e = engine(mode)
    p, q = ("p", 0, 100), ("q", 0, 50)
    serve(e, ask(1, (p,)))
    e.set_version(e.t, 1)
    serve(e, ask(2, (p, q)))
    e.set_version(e.t, 2)
    done = serve(e, ask(3, (p, q, ("r", 0, 5))))[3]
    assert (done.cached_tokens, done.kv_version) == (150, 0)


def _hit_share(mode: str, pool: int) -> float:
    """Ten prompts of 100 tokens, one after another, three rounds."""
    e = engine(mode, max_total_num_tokens=pool)
    hits = 0
    for round_ in range(3):
        for i in range(10):
            hits += serve(e, ask((round_, i), ((i, 0, 100),)))[round_, i].cached_tokens
    return hits / 3000


@BOTH
def test_rk_13_hits_fall_with_the_capacity(mode: str) -> None:
    """All ten fit: 2 rounds x 99 of 100. A cyclic scan of more than fits never hits under LRU: evicted KV is not
    reused."""
    shares = [_hit_share(mode, pool) for pool in (5000, 1500, 700, 300)]
    assert shares[0] == pytest.approx(0.66)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.0


def test_a_disabled_cache_never_hits_and_keeps_nothing() -> None:
    e = engine(disable_radix_cache=True)
    for rid in (1, 2):
        assert serve(e, ask(rid, (("p", 0, 100),), 20))[rid].cached_tokens == 0
    assert (e.cache.free, e.cache.evictable) == (e.slots, 0)
