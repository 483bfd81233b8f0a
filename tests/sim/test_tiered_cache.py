"""KV from host memory and from other engines: what a request finds, what it displaces, what it costs.

One second per batch unless said otherwise. Independent expectation of the two tiers: a plain list of prefixes per tier.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from sim.radix_cache import RadixCache
from sim.tiered_cache import TieredCache
from tests.support.engine_play import ask, engine, play, prefills, serve
from tests.support.engine_workloads import LinearCosts

BOTH = pytest.mark.parametrize("mode", ["skip", "iterate"])


def rounds(mode: str, pool: int, host: int) -> list[int]:
    """Ten prompts of 100 tokens, one after another, three rounds: cached tokens of each round."""
    e = engine(mode, max_total_num_tokens=pool, host_tokens=host)
    return [sum(serve(e, ask((r, i), ((i, 0, 100),)))[r, i].cached_tokens for i in range(10)) for r in range(3)]


@BOTH
def test_rk_13_what_the_gpu_evicted_comes_back_from_the_host(mode: str) -> None:
    """A cyclic scan of 1,000 tokens through 300 slots never hits under LRU; with 2,000 host slots all is there."""
    assert rounds(mode, 300, 0) == [0, 0, 0]
    assert rounds(mode, 300, 2000) == [0, 990, 990]


@BOTH
def test_rk_13_the_host_is_a_cache_of_bounded_size_too(mode: str) -> None:
    """The same scan through 800 host slots, fewer than the 1,010 it needs, hits nowhere."""
    assert rounds(mode, 300, 800) == [0, 0, 0]


def test_a_flush_empties_the_host_too() -> None:
    e = engine(max_total_num_tokens=300, host_tokens=2000)
    for i in range(5):
        serve(e, ask(i, ((i, 0, 100),)))
    assert e.flush(e.t)
    assert serve(e, ask("again", ((0, 0, 100),)))["again"].cached_tokens == 0


def test_namespaces_share_no_host_memory() -> None:
    e = engine(max_total_num_tokens=300, host_tokens=2000)
    for i in range(5):
        serve(e, ask(i, ((i, 0, 100),), namespace=0))
    assert serve(e, ask("salted", ((0, 0, 100),), namespace=1))["salted"].cached_tokens == 0
    assert serve(e, ask("same", ((1, 0, 100),), namespace=0))["same"].cached_tokens == 99


@pytest.mark.parametrize(("rate", "seconds"), [(1e9, 1.1), (99.0, 1.1), (33.0, 3.0)])
def test_loading_takes_its_time_unless_the_prefill_hides_it(rate: float, seconds: float) -> None:
    """1 + 0.1 x new tokens a prefill. 99 tokens are loaded beside one computed one: max(1.1 s, 99 / rate)."""
    costs = LinearCosts(1.0, 0.0, 0.0, 1.0, 0.1, 0.0)
    e = engine(costs=costs, max_total_num_tokens=300, host_tokens=2000, load_back_tokens_per_s=rate)
    for i in range(5):
        serve(e, ask(i, ((i, 0, 100),)))
    done = serve(e, ask("back", ((0, 0, 100),)))["back"]
    assert done.cached_tokens == 99
    assert done.first_token_t - done.started_t == pytest.approx(seconds)


def test_fewer_tokens_than_sglangs_threshold_are_computed_again() -> None:
    """9 tokens beyond the match on the GPU are not worth loading, 10 are."""
    for beyond, cached in ((9, 50), (10, 60)):
        e = engine(max_total_num_tokens=400, host_tokens=2000)
        p = ("p", 0, 50)
        serve(e, ask("long", (p, ("q", 0, beyond))))
        serve(e, ask("short", (p, ("r", 0, 1))))  # the shared part is the younger
        big = ask("big", 345, 1)
        serve(e, big)
        assert e.cache.match(e.cache.root(0), (p, ("q", 0, beyond)), 50 + beyond)[1] == 50
        done = serve(e, ask("again", (p, ("q", 0, beyond), ("s", 0, 5))))["again"]
        assert done.cached_tokens == cached


@BOTH
def test_brought_kv_is_a_prefix_like_any_other(mode: str) -> None:
    """80 of 100 tokens come from elsewhere: 20 are computed, and the next request finds 99 without help."""
    e = engine(mode, takes_in=True)
    r = ask("a", (("p", 0, 100),))
    r.brought = (80, 0)
    assert serve(e, r)["a"].cached_tokens == 80
    assert prefills(e)[-1] == [["a", 80, 20]]
    assert serve(e, ask("b", (("p", 0, 100),)))["b"].cached_tokens == 99


def test_brought_kv_takes_slots_from_what_is_least_recently_used() -> None:
    e = engine(max_total_num_tokens=300, takes_in=True)
    for i in (1, 2):
        serve(e, ask(i, ((i, 0, 100),)))
    r = ask("a", (("p", 0, 150),))
    r.brought = (140, 0)
    assert serve(e, r)["a"].cached_tokens == 140
    hits = [serve(e, ask((i, "again"), ((i, 0, 100),)))[i, "again"].cached_tokens for i in (2, 1)]
    assert hits == [99, 0]


def test_brought_kv_waits_outside_until_its_request_fits() -> None:
    """A running request holds the pool: the other one is not admitted, and its KV is in no slot meanwhile."""
    e = engine(max_total_num_tokens=300, takes_in=True, disable_overlap_schedule=True)
    r = ask("late", (("p", 0, 150),), 10)
    r.brought = (149, 0)
    done = serve(e, ask("first", 150, 100), r)
    assert done["late"].started_t >= done["first"].t and done["late"].cached_tokens == 149


def test_brought_kv_is_whole_pages_and_leaves_one_token_to_compute() -> None:
    e = engine(page_size=16, takes_in=True)
    r = ask("a", (("p", 0, 100),))
    r.brought = (100, 0)
    assert serve(e, r)["a"].cached_tokens == 96
    e = engine(takes_in=True)
    r = ask("a", (("p", 0, 100),))
    r.brought = (100, 0)
    assert serve(e, r)["a"].cached_tokens == 99


def test_brought_kv_is_lost_in_a_flush_and_tells_its_version() -> None:
    for flush in (True, False):
        e = engine(max_total_num_tokens=300, takes_in=True)
        e.pause(0.0, "in_place")
        e.advance(0.0)
        r = ask("a", (("p", 0, 100),))
        r.brought = (80, 3)
        e.submit(0.0, r)
        if flush:
            assert e.flush(0.0)
        e.set_version(0.0, 4)
        e.resume(0.0)
        (done,) = e.advance(e.wake_at) or e.advance(e.wake_at)
        assert (done.cached_tokens, done.kv_version) == ((0, -1) if flush else (80, 3))


@BOTH
def test_kv_that_was_retracted_is_brought_again(mode: str) -> None:
    """Two requests of 190 tokens outgrow 300 slots: one is sent back, and comes in again with its brought prompt,
    computing its outputs alone. The engine keeps nothing by itself."""
    e = engine(mode, max_total_num_tokens=300, takes_in=True, schedule_conservativeness=0.1, disable_radix_cache=True)
    asked = [ask(i, ((i, 0, 50),), 140) for i in range(2)]
    for r in asked:
        r.brought = (49, 0)
    done = play(e, [(5.0 * i, lambda t, r=r: e.submit(t, r)) for i, r in enumerate(asked)])
    (late,) = [n for n in done if n.retractions]
    (again,) = [row for batch in prefills(e) for row in batch if row[0] == late.rid and row[1] + row[2] > 50]
    assert again[1] == 49


def tokens_of(rng: random.Random) -> tuple[tuple[Any, int, int], ...]:
    """A path in a small tree of contents, 16 tokens a node."""
    path, node = [], "r"
    for _ in range(rng.randint(1, 5)):
        node += rng.choice("ab")
        path.append((node, 0, 16))
    return tuple(path)


@pytest.mark.parametrize("seed", range(8))
def test_the_host_holds_all_of_the_gpus_prefixes_and_is_the_larger_cache(seed: int) -> None:
    """Against the same publications into one cache of the host's size: what is found on the host is what that finds."""
    rng = random.Random(seed)
    tiers, alone = TieredCache(1, 160, 640), RadixCache(1, 640)
    for _ in range(400):
        runs = tokens_of(rng)
        n = 16 * len(runs)
        for cache in (tiers, alone):
            node, hit = cache.match(cache.root(0), runs, n)
            if cache is tiers:
                _, there = tiers.host.match(tiers.host.root(0), runs, n)
                assert there >= hit
            else:
                assert there == hit
            if hit < n:
                cache.pin(node)
                if cache.free < n - hit:
                    cache.evict(n - hit)
                cache.free -= n - hit
                tail = tuple(runs[hit // 16 :])
                cache.extend(node, tail, n - hit, 0, False)
                cache.unpin(node)
        assert tiers.host.free >= 0 and tiers.free >= 0
