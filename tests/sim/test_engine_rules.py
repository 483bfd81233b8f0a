"""The experiments that were made on a real SGLang 0.5.23 engine, with what was observed there (table of 20 rows).

The numbers are the real engine's. `n` tokens of a health probe are in its tree where the row needs them.
"""

from __future__ import annotations

import pytest

from sim.engine import EngineModel, Paused
from sim.engine_scheduler import DECODE, EXTEND
from tests.support.engine_play import ask, engine, kinds, play, prefills, serve

BOTH = pytest.mark.parametrize("mode", ["iterate", "skip"])


def probe(e) -> None:
    """The health probe's one token in the tree."""
    e.cache.extend(e.cache.root(0), ((0, 0, 1),), 1, 0, False)
    e.cache.free -= 1


@BOTH
def test_row_1_a_repeated_prompt_hits_all_but_its_last_token(mode: str) -> None:
    e = engine(mode)
    prompt = (("p", 0, 200),)
    assert serve(e, ask(1, prompt))[1].cached_tokens == 0
    assert serve(e, ask(2, prompt))[2].cached_tokens == 199


@BOTH
def test_row_2_a_shared_prefix_hits_exactly(mode: str) -> None:
    e = engine(mode)
    serve(e, ask(1, (("p", 0, 73), ("a", 0, 50))))
    assert serve(e, ask(2, (("p", 0, 73), ("b", 0, 50))))[2].cached_tokens == 73


@BOTH
def test_row_3_the_next_turn_hits_all_but_the_last_output_after_a_length_finish(mode: str) -> None:
    e = engine(mode)
    serve(e, ask(1, (("p", 0, 200),), 9))
    assert serve(e, ask(2, (("p", 0, 200), ("outputs of 1", 0, 9), ("x", 0, 20))))[2].cached_tokens == 208


@BOTH
@pytest.mark.parametrize(("overlap", "hit"), [(True, 162), (False, 161)])
def test_row_4_after_a_stop_token_the_overshoot_step_has_written_it(mode: str, overlap: bool, hit: int) -> None:
    e = engine(mode, disable_overlap_schedule=not overlap)
    serve(e, ask(1, (("p", 0, 150),), 12, max_new=50))
    assert serve(e, ask(2, (("p", 0, 150), ("outputs of 1", 0, 12), ("x", 0, 20))))[2].cached_tokens == hit


@BOTH
def test_row_5_simultaneous_equal_prompts_all_miss_in_one_batch(mode: str) -> None:
    e = engine(mode)
    said = serve(e, *(ask(i, (("p", 0, 300), (i, 0, 5))) for i in range(3)))
    assert [n.cached_tokens for n in said.values()] == [0, 0, 0]
    assert prefills(e) == [[[0, 0, 305], [1, 0, 305], [2, 0, 305]]]


@BOTH
def test_row_6_a_prefix_whose_prefill_runs_is_not_hit_yet(mode: str) -> None:
    e = engine(mode, max_total_num_tokens=8000)
    prompt = (("p", 0, 1800),)
    said = play(e, [(0.0, lambda t: e.submit(t, ask(1, prompt))), (0.5, lambda t: e.submit(t, ask(2, prompt)))])
    assert [n.cached_tokens for n in said] == [0, 0]
    assert prefills(e) == [[[1, 0, 1800]], [[2, 0, 1800]]]
    assert serve(e, ask(3, prompt))[3].cached_tokens == 1799


@BOTH
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_row_7_the_first_batch_is_charged_in_full(mode: str, ignore_eos: bool) -> None:
    """Pool 1000, ten requests of 50 + 100 at once: each is charged 50 + 100 + 1 page."""
    e = engine(mode, max_total_num_tokens=1000)
    serve(e, *(ask(i, 50, 100, ignore_eos=ignore_eos) for i in range(10)))
    assert len(prefills(e)[0]) == 6


@BOTH
def test_row_8_a_freed_slot_is_filled_two_iterations_after_the_last_launch(mode: str) -> None:
    e = engine(mode, max_total_num_tokens=1000)
    serve(e, *(ask(i, 50, 100, ignore_eos=True) for i in range(10)))
    launched = [(kind, {row[0] for row in rows}) for kind, rows in e.trace]
    second = next(i for i, (kind, _) in enumerate(launched) if kind == EXTEND and i)
    assert launched[second][1] == {6, 7, 8, 9}
    assert second == 100, "a prefill, 99 decode steps, then (an iteration without a batch and) the next prefill"
    assert all(kind == DECODE for kind, _ in launched[1:second])


@BOTH
def test_row_8_with_a_client_iteration_count(mode: str) -> None:
    """4 slots, 6 requests, 5 tokens each: with overlap one iteration passes between the last decode and the next
    prefill."""
    e = engine(mode, max_running_requests=4)
    times = serve(e, *(ask(i, 20, 5) for i in range(6)))
    assert [n.started_t for n in times.values()] == [0.0] * 4 + [5.0] * 2
    assert kinds(e) == "PDDDDPDDDD"
    late = [n for n in times.values() if n.rid >= 4]
    assert {n.t for n in times.values() if n.rid < 4} == {5.0}
    assert {n.t for n in late} == {10.0}


@BOTH
def test_row_9_chunks_fill_the_budget_and_the_unfinished_prompt_goes_first(mode: str) -> None:
    e = engine(mode, chunked_prefill_size=64)
    serve(e, ask(0, 200), ask(1, 100))
    assert [[row[::2] for row in batch] for batch in prefills(e)] == [
        [[0, 64]],
        [[0, 64]],
        [[0, 64]],
        [[0, 8], [1, 56]],
        [[1, 44]],
    ]


@BOTH
def test_row_10_lpm_sorts_each_pass_anew(mode: str) -> None:
    e = engine(mode, schedule_policy="lpm", max_running_requests=1, max_total_num_tokens=4000)
    serve(e, ask("seed", (("s", 0, 120),)))
    asked = [
        ask("none", (("n", 0, 150),)),
        ask("hit60", (("s", 0, 60), ("x", 0, 10))),
        ask("dup", (("n", 0, 150), ("y", 0, 5))),
        ask("hit120", (("s", 0, 120), ("z", 0, 10))),
        ask("none2", (("m", 0, 30),)),
    ]
    e.trace.clear()
    serve(e, *asked)
    assert [batch[0][0] for batch in prefills(e)] == ["hit120", "hit60", "none", "dup", "none2"]
    assert next(batch[0][1] for batch in prefills(e) if batch[0][0] == "dup") == 150


@BOTH
def test_row_11_lpm_with_room_admits_duplicates_together(mode: str) -> None:
    e = engine(mode, schedule_policy="lpm")
    said = serve(e, *(ask(i, (("n", 0, 150), (i, 0, 5))) for i in range(3)))
    assert [n.cached_tokens for n in said.values()] == [0, 0, 0]
    assert len(prefills(e)) == 1


@BOTH
def test_row_12_the_least_recently_used_leaf_goes_whole(mode: str) -> None:
    e = engine(mode, max_total_num_tokens=600)
    probe(e)
    a, b, c = ((x, 0, 150) for x in "abc")
    for rid, run in enumerate((a, b, c, a)):
        serve(e, ask(rid, (run,)))
    e.cache.log.clear()
    serve(e, ask("d", 200))
    assert [(w, g) for w, g, _ in e.cache.log] == [(51, 151)], "the probe's token and all of b"
    assert serve(e, ask("a again", (a,)))["a again"].cached_tokens == 149
    assert serve(e, ask("c again", (c,)))["c again"].cached_tokens == 149


@BOTH
def test_row_13_outputs_are_evicted_without_their_prompt(mode: str) -> None:
    e = engine(mode, max_total_num_tokens=600)
    x = (("x", 0, 200),)
    serve(e, ask("x", x, 100))
    e.cache.log.clear()
    serve(e, ask("y", 350))
    assert [g for _, g, _ in e.cache.log] == [99]
    e.cache.log.clear()
    assert serve(e, ask("x2", (*x, ("new", 0, 3))))["x2"].cached_tokens == 200


@BOTH
def test_row_14_pages_floor_hits(mode: str) -> None:
    for n, hit in ((200, 192), (193, 192), (192, 176), (15, 0)):
        e = engine(mode, page_size=16)
        serve(e, ask(1, (("p", 0, n),)))
        assert serve(e, ask(2, (("p", 0, n),)))[2].cached_tokens == hit, n
    e = engine(mode, page_size=16)
    serve(e, ask(1, (("p", 0, 73), ("a", 0, 50))))
    assert serve(e, ask(2, (("p", 0, 73), ("b", 0, 50))))[2].cached_tokens == 64
    e = engine(mode, page_size=16)
    serve(e, ask(1, (("p", 0, 200),), 9))
    assert serve(e, ask(2, (("p", 0, 200), ("outputs of 1", 0, 9), ("x", 0, 20))))[2].cached_tokens == 208


@BOTH
@pytest.mark.parametrize(("start", "hit"), [(0, 0), (50, 50), (200, 199)])
def test_row_15_logprob_start_caps_the_hit(mode: str, start: int, hit: int) -> None:
    e = engine(mode)
    prompt = (("p", 0, 200),)
    serve(e, ask(1, prompt))
    assert serve(e, ask(2, prompt, logprob_start=start))[2].cached_tokens == hit


@BOTH
def test_row_15_an_extra_key_is_a_separate_namespace(mode: str) -> None:
    e = engine(mode)
    prompt = (("p", 0, 200),)
    serve(e, ask(1, prompt))
    assert serve(e, ask(2, prompt, namespace="k"))[2].cached_tokens == 0
    assert serve(e, ask(3, prompt, namespace="k"))[3].cached_tokens == 199


@BOTH
def test_row_16_flush_and_weight_updates(mode: str) -> None:
    e = engine(mode)
    prompt = (("p", 0, 100),)
    serve(e, ask(1, prompt))
    assert e.flush(e.t)
    assert serve(e, ask(2, prompt))[2].cached_tokens == 0
    e.set_version(e.t, 1)  # flush_cache=false
    kept = serve(e, ask(3, prompt))[3]
    assert (kept.cached_tokens, kept.kv_version) == (99, 0), "old KV is reused, and its age is recorded"
    assert kept.spans == ((1, 0, 1),)
    e.set_version(e.t, 2)
    assert e.flush(e.t)
    assert serve(e, ask(4, prompt))[4].cached_tokens == 0


@BOTH
def test_row_17_retract_pause_puts_running_requests_behind_the_waiting(mode: str) -> None:
    e = engine(mode, max_running_requests=4)
    asked = [ask(f"R{i}", 60, 100) for i in range(6)]
    said = play(e, [(0.0, lambda t, r=r: e.submit(t, r)) for r in asked] + [(9.5, lambda t: e.pause(t, "retract"))])
    assert said == [Paused(10.0, "retract")]
    assert [r.rid for r in e.queue] == ["R4", "R5", "R0", "R1", "R2", "R3"]
    assert e.cache.evictable == 240, "the prompts stay"
    assert not e.busy
    e.trace.clear()
    e.resume(20.0)
    done = {n.rid: n for n in play(e, [])}
    assert [row[:2] for row in prefills(e)[0]] == [["R4", 0], ["R5", 0], ["R0", 60], ["R1", 60]]
    assert [done[f"R{i}"].cached_tokens for i in range(4)] == [0, 0, 0, 0]
    assert [done[f"R{i}"].retractions for i in range(6)] == [1, 1, 1, 1, 0, 0]
    assert e.retractions == 0, "memory has retracted nobody"


@BOTH
def test_row_18_retraction_takes_the_longest_prompt_of_those_with_fewest_outputs(mode: str, monkeypatch) -> None:
    """Pool 600, prompts 40, 60, 30, 50, 70. The first pass admits V0 to V2 (charged in full), the second V3 and V4;
    nobody decodes meanwhile, so all have equally many outputs. Observed: V4 (70), later V1 (60)."""
    gone = []
    retract = EngineModel._retract

    def noting(self) -> None:
        n = len(self.queue)
        retract(self)
        gone.append([r.rid for r in list(self.queue)[n:]])

    monkeypatch.setattr(EngineModel, "_retract", noting)
    e = engine(mode, max_total_num_tokens=600, schedule_conservativeness=0.02)
    done = serve(e, *(ask(f"V{i}", n, 150) for i, n in enumerate((40, 60, 30, 50, 70))))
    assert [[row[0] for row in b] for b in prefills(e)[:2]] == [["V0", "V1", "V2"], ["V3", "V4"]]
    assert gone[0] == ["V4"]
    assert gone[1] == ["V1"]
    assert e.retractions == sum(len(g) for g in gone)
    assert all(n.output_tokens == 150 for n in done.values())
    assert done["V4"].retractions >= 1
    assert done["V4"].recomputed_tokens > 0


@BOTH
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("forward", ["host", "device"])
def test_row_19_in_place_under_overlap_reports_one_token_too_few(mode: str, exact: bool, forward: str) -> None:
    """After the pause the old weights have made 8 tokens (1 by the prefill, 7 by decode steps); the engine reports
    7."""
    e = engine(mode, exact_spans=exact, forward=forward)
    script = [(0.0, lambda t: e.submit(t, ask(1, 20, 30))), (7.5, lambda t: e.pause(t, "in_place"))]
    play(e, script)
    made = sum(kind == DECODE for kind, _ in e.trace) + 1
    e.set_version(20.0, 1)
    e.resume(20.0)
    (done,) = play(e, [])
    assert done.spans[0] == (0, 0, made if exact else made - 1)
    assert done.spans[1] == (1, done.spans[0][2], 30)


@BOTH
def test_row_19_retract_is_exact(mode: str) -> None:
    e = engine(mode)
    play(e, [(0.0, lambda t: e.submit(t, ask(1, 20, 30))), (7.5, lambda t: e.pause(t, "retract"))])
    made = sum(kind == DECODE for kind, _ in e.trace) + 1
    e.set_version(20.0, 1)
    e.resume(20.0)
    (done,) = play(e, [])
    assert done.spans == ((0, 0, made), (1, made, 30))


@BOTH
def test_row_20_n_tokens_are_a_prefill_and_n_minus_1_steps(mode: str) -> None:
    e = engine(mode)
    serve(e, ask(1, 120, 12))
    assert kinds(e) == "P" + "D" * 11


@BOTH
def test_row_20_parallel_sampling_prefills_the_prompt_first(mode: str) -> None:
    """n = 4: a request with max_new_tokens = 0 publishes the prompt, then four samples hit 119 of 120."""
    e = engine(mode)
    prompt = (("p", 0, 120),)
    first = serve(e, ask(0, prompt, 1, max_new=0))[0]
    assert (first.output_tokens, first.spans) == (0, ())
    assert kinds(e) == "P"
    said = serve(e, *(ask(i, prompt, 10) for i in range(1, 5)))
    assert [n.cached_tokens for n in said.values()] == [119] * 4


@BOTH
def test_row_20_an_abort_finishes_in_the_iteration_that_receives_it(mode: str) -> None:
    """Received at 6.0 (the start of the seventh iteration), finished when that iteration's results are handled; its
    token is kept."""
    e = engine(mode)
    script = [(0.0, lambda t: e.submit(t, ask(1, 20, 100))), (5.5, lambda t: e.abort(t, 1))]
    (gone,) = play(e, script)
    assert (gone.t, gone.output_tokens, gone.reason) == (7.0, 6, "aborted")
    assert kinds(e) == "PDDDDDD", "the last step is an overshoot"
    again = serve(e, ask(2, (("prompt of 1", 0, 20), ("outputs of 1", 0, 6), ("x", 0, 1))))[2]
    assert again.cached_tokens == 26, "an aborted running request is published, the overshoot included"
