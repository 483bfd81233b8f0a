"""Routers of other systems against their published rules: closed forms, and plain versions written here that look at
every engine and every prompt ever sent.

All rates and lengths are powers of two or small multiples of them, so that sums are exact and ties are ties.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.policies.routing import RouteRequest, router
from testbed.policies.routing.base import NO_FETCH
from testbed.scenario.routing import (
    BoundedConsistentHashing,
    ConsistentHashing,
    DynamoKv,
    LeastLoad,
    Mooncake,
    Preble,
    PrefixHash,
)

BLOCK = 64


def make(config, engines: int, seed: int = 0):
    return router(config, engines, np.random.default_rng(seed))


def request(blocks=(), *, tail: int = 0, group: int = 0, trajectory: int = 0, t: float = 0.0) -> RouteRequest:
    prompt = BLOCK * len(blocks) + tail
    return RouteRequest(trajectory, group, 0, group, prompt, tuple(blocks), BLOCK, -1, t)


def common(one, two) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


class Turn:
    def __init__(self, req: RouteRequest, engine: int, uncached: int, seconds: float) -> None:
        self.req, self.engine, self.uncached, self.seconds, self.over = req, engine, uncached, seconds, False


class Plain:
    """What happened so far, as lists."""

    def __init__(self, engines: int) -> None:
        self.engines = range(engines)
        self.open = set(self.engines)
        self.sent: list[list[tuple[int, ...]]] = [[] for _ in self.engines]
        self.turns: list[Turn] = []

    def cached(self, engine: int, req: RouteRequest) -> int:
        return BLOCK * max((common(p, req.blocks) for p in self.sent[engine]), default=0)

    def running(self, engine: int) -> list[Turn]:
        return [turn for turn in self.turns if turn.engine == engine and not turn.over]

    def start(self, req: RouteRequest, engine: int, seconds: float = 0.0) -> None:
        self.turns.append(Turn(req, engine, req.prompt_tokens - self.cached(engine, req), seconds))
        self.sent[engine].append(req.blocks)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.lists(st.integers(1, 2), min_size=1, max_size=5), st.sampled_from([0, 1, 37])),
        st.tuples(st.sampled_from(["finish", "open", "close", "drop", "wait"]), st.integers(0, 4)),
    ),
    max_size=60,
)


def follow(policy, plain: Plain, steps, chosen) -> None:
    """Walk the steps; at every turn `chosen(req)` is (engine, what `started` is told to cost) by the plain rule."""
    t, trajectory = 0.0, 0
    for kind, value, *more in steps:
        engine = value % len(plain.engines) if kind != "turn" else -1
        if kind == "turn":
            trajectory += 1
            req = request(value, tail=more[0], trajectory=trajectory, t=t)
            expected, seconds = chosen(req)
            assert policy.choose(req) == expected
            if expected is not None:
                policy.started(expected, req)
                plain.start(req, expected, seconds)
        elif kind == "finish":
            running = plain.running(engine)
            if running:
                turn = running[len(running) // 2]  # any of them, not the first alone
                turn.over = True
                policy.finished(engine, turn.req.trajectory)
        elif kind == "open":
            policy.open(engine)
            plain.open.add(engine)
        elif kind == "close":
            policy.close(engine)
            plain.open.discard(engine)
        elif kind == "drop":
            policy.cache_dropped(engine)
            plain.sent[engine] = []
        else:
            t += 32.0 * value


# --- Dynamo -----------------------------------------------------------------------------------------------------------


def dynamo_cost(plain: Plain, engine: int, req: RouteRequest, config: DynamoKv) -> float:
    """prefill_load_scale x (active prefill + prompt - credit x cached) + blocks of all, none twice; in blocks."""
    size = config.kv_cache_block_size
    prefill = sum(turn.uncached for turn in plain.running(engine)) + req.prompt_tokens
    used: dict[object, int] = {}
    for r in [turn.req for turn in plain.running(engine)] + [req]:
        for n in range(1, len(r.blocks) + 1):
            used[r.blocks[:n]] = BLOCK // size
        used["tail", r.trajectory] = -(-(r.prompt_tokens - BLOCK * len(r.blocks)) // size)
    overlap = config.overlap_score_credit * plain.cached(engine, req)
    return config.prefill_load_scale * (prefill - overlap) / size + sum(used.values())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), STEPS, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 4.0]))
def test_rk_11_dynamos_cost_is_the_smallest_of_all_engines(engines, steps, credit, scale):
    config = DynamoKv(overlap_score_credit=credit, prefill_load_scale=scale, kv_cache_block_size=16)
    policy, plain = make(config, engines), Plain(engines)

    def chosen(req: RouteRequest):
        costs = [(dynamo_cost(plain, e, req, config), len(plain.running(e)), e) for e in plain.open]
        return (min(costs)[2] if costs else None), 0.0

    follow(policy, plain, steps, chosen)


def test_rk_11_dynamo_at_a_temperature_draws_by_softmax_of_scaled_costs():
    """Costs 0, 32 and 64 blocks more than the lowest: weights 1, e^(-1/2T) and e^(-1/T), T = 0.5."""
    policy = make(DynamoKv(router_temperature=0.5, kv_cache_block_size=16), 3)
    for turn, engine in enumerate((1, 2, 2)):  # 16 blocks to prefill and 16 in use: 32 a turn
        policy.started(engine, request((), tail=256, group=turn, trajectory=turn))
    drawn = Counter(policy.choose(request((), tail=256, group=9, trajectory=1)) for _ in range(6000))
    weights = np.exp([0.0, -1.0, -2.0])
    expected = 6000 * weights / weights.sum()
    # chi-square with 2 degrees of freedom: 1e-6 quantile 27.6
    assert sum((drawn[e] - expected[e]) ** 2 / expected[e] for e in range(3)) < 27.6


# --- Mooncake ---------------------------------------------------------------------------------------------------------

TOKENS_PER_S, PAIRS_PER_S = 64.0, 4096.0


def prefill(prompt: int, cached: int, pairs: float | None) -> float:
    new = prompt - cached
    return new * (1 / TOKENS_PER_S + ((cached + new / 2) / pairs if pairs else 0.0))


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 5),
    STEPS,
    st.sampled_from([None, 32.0, 256.0]),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.sampled_from([None, PAIRS_PER_S]),
)
def test_rk_11_mooncakes_time_to_first_token_is_the_smallest_of_all_engines(engines, steps, rate, threshold, pairs):
    config = Mooncake(
        prefill_tokens_per_s=TOKENS_PER_S,
        attention_pairs_per_s=pairs,
        transfer_tokens_per_s=rate,
        kvcache_balancing_threshold=threshold,
    )
    policy, plain = make(config, engines), Plain(engines)

    def chosen(req: RouteRequest):
        if not plain.open:
            return None, 0.0
        best = max(plain.cached(e, req) for e in plain.open)
        guesses = []
        for e in plain.open:
            queue, here = sum(turn.seconds for turn in plain.running(e)), plain.cached(e, req)
            if rate and best > here and (here == 0 or best / here >= threshold):
                ttft = queue + (best - here) / rate + prefill(req.prompt_tokens, best, pairs)
                guesses.append((ttft, len(plain.running(e)), e, best))
            else:
                ttft = queue + prefill(req.prompt_tokens, here, pairs)
                guesses.append((ttft, len(plain.running(e)), e, here))
        _, _, engine, held = min(guesses)
        fetched = held > plain.cached(engine, req)
        assert policy.choose(req) == engine
        assert bool(policy.fetch[1]) == fetched == (policy.why == "fetch_prefix")
        if fetched:
            source, tokens = policy.fetch
            assert tokens == best == plain.cached(source, req) and source in plain.open
        else:
            assert policy.fetch == NO_FETCH
        return engine, prefill(req.prompt_tokens, held, pairs)

    follow(policy, plain, steps, chosen)


@pytest.mark.parametrize(
    ("queued", "choice", "why"), [(0, 0, "local_prefix"), (64, 0, "local_prefix"), (65, 1, "fetch_prefix")]
)
def test_rk_11_mooncake_fetches_where_waiting_takes_longer_than_the_transfer(queued, choice, why):
    """Engine 0 holds 256 of 320 tokens, engine 1 nothing. At 64 tokens a second to compute and 256 to send: 0 takes the
    queue + 1 s, 1 takes 1 s of transfer + 1 s; equal at 64 tokens of queue (then 0 by the tie of turns).
    """
    policy = make(Mooncake(prefill_tokens_per_s=64.0, transfer_tokens_per_s=256.0), 2)
    policy.started(0, request((1, 2, 3, 4)))
    policy.finished(0)
    if queued:
        policy.started(0, request((), tail=queued, group=8, trajectory=8))
        policy.started(1, request((), tail=0, group=9, trajectory=9))
    assert (policy.choose(request((1, 2, 3, 4, 5), trajectory=1)), policy.why) == (choice, why)
    assert policy.fetch == ((0, 256) if why == "fetch_prefix" else NO_FETCH)


@pytest.mark.parametrize(("held", "fetches"), [(1, True), (2, True), (3, False)])
def test_rk_11_mooncakes_threshold_compares_the_longest_prefix_with_the_own(held, fetches):
    """Longest 4 blocks, threshold 2: 4/1 and 4/2 reach it, 4/3 does not. Engine 0, which has all, waits for long."""
    policy = make(Mooncake(prefill_tokens_per_s=64.0, transfer_tokens_per_s=1024.0), 2)
    policy.started(0, request((1, 2, 3, 4)))
    policy.started(1, request((1, 2, 3, 4)[:held]))
    for _ in range(2):
        policy.started(0, request((), tail=6400, group=8, trajectory=8))
    policy.finished(1)
    assert policy.choose(request((1, 2, 3, 4, 5), trajectory=1)) == 1
    assert (policy.why == "fetch_prefix") == fetches


def test_mooncake_prefers_a_fetch_elsewhere_to_a_part_of_the_prefix_here():
    """Engine 0 holds all 5 blocks and waits for long; 1 waits least and holds 3 (5/3 < 2: it computes the rest, 2 s); 2
    waits 0.25 s more and fetches 5 blocks at 1,024 tokens a second: 0.3125 s."""
    policy = make(Mooncake(prefill_tokens_per_s=64.0, transfer_tokens_per_s=1024.0), 3)
    whole = (1, 2, 3, 4, 5)
    policy.started(0, request(whole))
    policy.started(0, request((), tail=6400, group=8, trajectory=8))
    policy.started(1, request(whole[:3], trajectory=2))
    policy.finished(1)
    policy.started(2, request((), tail=16, group=9, trajectory=9))
    assert policy.choose(request(whole, trajectory=3)) == 2
    assert (policy.why, policy.fetch) == ("fetch_prefix", (0, 320))


def test_mooncake_replicates_what_it_fetches():
    policy = make(Mooncake(prefill_tokens_per_s=64.0, transfer_tokens_per_s=1024.0), 2)
    policy.started(0, request((1, 2, 3, 4)))
    req = request((1, 2, 3, 4), tail=1, trajectory=1)
    assert policy.choose(req) == 1 and policy.fetch == (0, 256)
    policy.started(1, req)
    assert policy.tree.cached_tokens(1, request((1, 2, 3, 4), tail=1, trajectory=2)) == 256


# --- Preble -----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), STEPS, st.sampled_from([0.0, 0.5]), st.sampled_from([1.0, 2.0, 15.0]), st.booleans())
def test_rk_11_preble_exploits_or_explores_by_its_rule(engines, steps, decode_s, high, late):
    config = Preble(
        prefill_tokens_per_s=TOKENS_PER_S, decode_seconds_per_turn=decode_s, window_s=64.0, high_load_threshold=high
    )
    policy, plain = make(config, engines), Plain(engines)

    def chosen(req: RouteRequest):
        if not plain.open:
            return None, 0.0
        load = {
            e: (
                sum(x.seconds for x in plain.turns if x.engine == e and x.req.t >= req.t - 64.0),
                len(plain.running(e)),
                e,
            )
            for e in plain.open
        }
        cached = {e: plain.cached(e, req) for e in plain.open}
        best = max(cached.values())
        if best > req.prompt_tokens - best:
            engine = min(load[e] for e in plain.open if cached[e] == best)[2]
            if len(plain.turns) >= 50 and load[engine][0] > high * min(load.values())[0]:
                engine = min(load.values())[2]
        else:
            engine = min((load[e][0] + (req.prompt_tokens - cached[e]) / 64, *load[e][1:]) for e in plain.open)[2]
        return engine, (req.prompt_tokens - cached[engine]) / 64 + decode_s

    # loads are compared from 50 requests on; those 50 have left the window when the steps begin
    first = [("turn", [9, 9], 0)] * 50 + [("wait", 4)] if late else []
    follow(policy, plain, first + steps, chosen)


def test_preble_exploits_only_a_prefix_longer_than_the_rest():
    policy = make(Preble(prefill_tokens_per_s=64.0), 2)
    policy.started(0, request((1, 2)))
    assert policy.choose(request((1, 2, 3), trajectory=1)) == 0 and policy.why == "exploit"
    assert policy.choose(request((1, 2, 3, 4), trajectory=1)) == 1 and policy.why == "explore"  # 2 of 4: not more


# --- hashing with a bound ---------------------------------------------------------------------------------------------

HASH_STEPS = st.lists(
    st.tuples(st.sampled_from(["turn", "turn", "turn", "finish", "open", "close"]), st.integers(0, 9)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), HASH_STEPS, st.sampled_from([1.0, 1.25, 1.5, 3.0]))
def test_bounded_consistent_hashing_walks_the_ring_to_the_first_engine_within_the_bound(engines, steps, skew):
    """The ring's order of engines, seen from a key, is what plain consistent hashing gives as engines close one by
    one."""
    policy = make(BoundedConsistentHashing(virtual_nodes=20, max_load_skew=skew), engines)
    turns, opened = [0] * engines, set(range(engines))
    for kind, value in steps:
        engine = value % engines
        if kind == "turn":
            req = request((), tail=10, group=value)
            ring = make(ConsistentHashing(virtual_nodes=20), engines)
            for e in set(range(engines)) - opened:
                ring.close(e)
            order = []
            while (e := ring.choose(req)) is not None:
                order.append(e)
                ring.close(e)
            total = sum(turns[e] for e in opened)
            within = [e for e in order if total == 0 or turns[e] <= total / len(opened) * skew]
            expected = (within or order or [None])[0]
            assert policy.choose(req) == expected
            if expected is not None:
                turns[expected] += 1
                policy.started(expected, req)
        elif kind == "finish":
            if turns[engine]:
                turns[engine] -= 1
                policy.finished(engine)
        elif kind == "open":
            policy.open(engine)
            opened.add(engine)
        else:
            policy.close(engine)
            opened.discard(engine)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), HASH_STEPS, st.sampled_from([1.0, 1.25, 2.0]))
def test_prefix_hash_takes_the_ring_or_the_least_loaded_within_the_bound(engines, steps, factor):
    config = PrefixHash(virtual_nodes=20, load_factor=factor)
    policy, free = make(config, engines), make(config, engines)
    turns, opened = [0] * engines, set(range(engines))
    for kind, value in steps:
        engine = value % engines
        if kind == "turn":
            req = request((value, 1, 2, 3, 4), trajectory=value)
            owner = free.choose(req)  # nobody has turns there
            total, least = sum(turns[e] for e in opened), min((turns[e], e) for e in opened) if opened else None
            expected = owner
            if owner is not None and total and turns[owner] > (total + 1) / len(opened) * factor:
                expected = least[1] if least[0] <= (total + 1) / len(opened) * factor else owner
            assert policy.choose(req) == expected
            if expected is not None:
                turns[expected] += 1
                policy.started(expected, req)
        elif kind == "finish":
            if turns[engine]:
                turns[engine] -= 1
                policy.finished(engine)
        elif kind == "open":
            policy.open(engine)
            free.open(engine)
            opened.add(engine)
        else:
            policy.close(engine)
            free.close(engine)
            opened.discard(engine)


def test_prefix_hash_looks_at_the_first_tokens_alone():
    policy = make(PrefixHash(prefix_token_count=256), 8)
    for first in range(50):
        home = policy.choose(request((first, 2, 3, 4, 5, 6)))
        assert policy.choose(request((first, 2, 3, 4, 7), group=1, trajectory=3)) == home  # 4 blocks of 64 are 256
    spread = Counter(policy.choose(request((first, 2, 3, 4))) for first in range(4000))
    assert len(spread) == 8
    differ = [policy.choose(request((1, 2, 3, last))) for last in range(50)]
    assert len(set(differ)) > 1


def test_defaults_of_the_hashing_policies_are_sglangs():
    assert BoundedConsistentHashing().max_load_skew == 1.5
    assert (PrefixHash().prefix_token_count, PrefixHash().load_factor) == (256, 1.25)


# --- least load by prompts --------------------------------------------------------------------------------------------


def test_least_load_by_prompts_counts_their_tokens():
    policy = make(LeastLoad(load="prompt_tokens"), 2)
    policy.started(0, request((), tail=100, trajectory=1))
    for trajectory in (2, 3, 4):
        policy.started(1, request((), tail=30, trajectory=trajectory))
    assert policy.choose(request()) == 1  # 90 against 100
    policy.started(1, request((), tail=30, trajectory=5))
    assert policy.choose(request()) == 0  # 120
    policy.finished(0, 1)
    policy.started(0, request((), tail=91, trajectory=6))
    policy.finished(1, 3)
    assert policy.choose(request()) == 1  # 90 against 91
    policy.close(1)
    assert policy.choose(request()) == 0
    policy.open(1)
    assert policy.choose(request()) == 1
