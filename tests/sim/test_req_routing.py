"""Routing and KV reuse (RK), shown by whole simulated runs. Reuse comes out of the cache's state, never from a
ratio."""

from __future__ import annotations

import json
from collections import Counter
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.workloads import workload
from tests.support.simulated import HERE, LINEAR, PREFILL, STEP, Run, fixed, linear_run, split, turn_seconds

PER_TOKEN = 1e-4
COSTS = {**LINEAR, "prefill_base_s": 0.0, "prefill_per_token_s": PER_TOKEN}
"""A prefill costs its new tokens, a decode step 10 ms."""
FREE_PREFILL = {**LINEAR, "prefill_base_s": 0.0}
ONE_ENGINE: dict[str, Any] = {"placement": split(1, 1), "run__num_rollout": 1}
RULES = [
    (mode, kv)
    for mode in ("retract", "in_place", "abort", "finish")
    for kv in ("flush", "salt_by_version", "keep")
    if (mode, kv) != ("in_place", "flush")
]
"""Requests that stay in place need their KV: that pair is refused."""
KEEP = {"pause_generation_mode": "retract", "kv": "keep"}


def hit_share(r: Run, from_turn: int = 0) -> float:
    turns = [e for _, e, _ in r.turns() if e.turn >= from_turn]
    return sum(e.cached_tokens for e in turns) / sum(e.prompt_tokens for e in turns)


def write_sessions(path: Path, sessions: list[list[tuple[int, int, float]]]) -> str:
    """Sessions of (input tokens, output tokens, tool seconds) calls."""
    lines = [
        json.dumps(
            {
                "session_id": i,
                "arrival_time_ns": i,
                "sub_requests": [{"input_toks": a, "output_toks": b, "tool_duration_ns": s * 1e9} for a, b, s in calls],
            }
        )
        for i, calls in enumerate(sessions)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


# --- what can be shared -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "shared"), [(1, 99), (16, 96)])
def test_rk_01_members_share_the_prompts_kv_and_nothing_else(page: int, shared: int) -> None:
    """One after the other: the prompt of 100 tokens, all but its last, in whole pages. Never a reply of another
    member."""
    r = linear_run(
        **ONE_ENGINE,
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 1},
        rollout__engine={"max_running_requests": 1, "page_size": page},
    )
    assert [e.cached_tokens for _, e, _ in r.turns()] == [0, shared, shared, shared]


@pytest.mark.parametrize(
    ("engine", "cap", "own"),
    [
        ({}, 1000, 150),
        ({"page_size": 16}, 1000, 144),
        ({"disable_overlap_schedule": True}, 1000, 149),
        ({}, 50, 149),
    ],
)
def test_rk_01_a_later_turn_finds_its_own_history(engine: dict[str, Any], cap: int, own: int) -> None:
    """After 100 tokens of prompt and a reply of 50: all that was fed back. The last token was not, unless it was a stop
    token under overlap, whose end is seen one step late."""
    r = linear_run(
        **ONE_ENGINE,
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 1},
        rollout__engine=engine,
        workload__turns=fixed(2),
        workload__observation=fixed(30),
        workload__max_response_length=cap,
    )
    second = [e for _, e, _ in r.turns() if e.turn == 1]
    assert [(e.prompt_tokens, e.cached_tokens) for e in second] == [(180, own)] * 4
    begun_page = 150 - own if "page_size" in engine else 0
    assert {e.recomputed_tokens for e in second} == {begun_page}, "whole pages only: the begun one is computed again"


@pytest.mark.parametrize(("seconds_per_turn", "engine"), [(0.973, 0), (0.974, 1), (0.975, 1)])
def test_rk_02_wait_at_the_cache_or_compute_it_again(seconds_per_turn: float, engine: int, tmp_path: Path) -> None:
    """A iff wait_A + prefill(suffix) < wait_B + prefill(P + suffix); a tie goes where fewer turns are.

    When the first session comes back, A has its prefix of 1,024 tokens and one turn of another session, whose prompt
    was 50 tokens; B is empty. Its prompt has 1,134 tokens by now. At 1,000 tokens per second: A = d + 0.050 + 0.110, B
    = 1.134, equal at d = 0.974.
    """
    sessions = write_sessions(
        tmp_path / "s.jsonl", [[(1024, 10, 10.0), (100, 10, 0.0)], [(5000, 1, 0.0)], [(50, 5000, 0.0)]]
    )
    r = linear_run(
        workload={"type": "sessions", "path": sessions, "max_response_length": 6000},
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 3},
        placement=split(2, 1),
        rollout__routing={"type": "cost", "prefill_tokens_per_s": 1000.0, "decode_seconds_per_turn": seconds_per_turn},
        run__num_rollout=1,
    )
    sent = {(a.trajectory, a.turn): a for _, a in r.of(do.StartTurn)}
    assert [sent[i, 0].engine for i in range(3)] == [0, 1, 0]
    assert sent[0, 1].engine == engine and sent[0, 1].why == "cost"
    back = next(e for _, e, _ in r.turns() if (e.trajectory, e.turn) == (0, 1))
    assert (back.prompt_tokens, back.cached_tokens) == (1134, 1034 if engine == 0 else 0)


@pytest.mark.parametrize("caching", [True, False])
def test_rk_03_reuse_shortens_prefill_and_not_decode(caching: bool) -> None:
    """One trajectory to an engine: prefill takes the tokens that are not cached, decode the same 49 steps."""
    r = linear_run(
        placement=split(3, 1),
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 3},
        workload__prompt=fixed(2000),
        workload__turns=fixed(3),
        workload__observation=fixed(100),
        workload__max_response_length=200,
        rollout__engine={"disable_radix_cache": not caching, "disable_overlap_schedule": True},
        rollout__routing={"type": "session_affinity"},
        simulation__engine_costs=COSTS,
        run__num_rollout=1,
    )
    for _, e, _ in r.turns():
        known = 2000 + (e.turn - 1) * 150 + 49 if e.turn else 0
        assert e.cached_tokens == (known if caching else 0)
        assert e.first_token_t - e.started_t == pytest.approx((e.prompt_tokens - e.cached_tokens) * PER_TOKEN)
        assert e.t - e.first_token_t == pytest.approx(49 * STEP)


def greedy(lengths: list[int], slots: int) -> float:
    """Makespan of continuous batching with steps that cost the same at any batch size: a list schedule."""
    free = [0.0] * slots
    heapify(free)
    for n in lengths:
        heapreplace(free, free[0] + (n - 1) * STEP)
    return max(free)


def test_rk_04_a_freed_slot_is_taken_at_the_next_step() -> None:
    r = linear_run(
        **ONE_ENGINE,
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 12},
        workload__reply={"type": "uniform", "low": 10, "high": 400},
        rollout__engine={"max_running_requests": 3, "disable_overlap_schedule": True},
        simulation__engine_costs=FREE_PREFILL,
    )
    source = workload(r.scenario, HERE)
    lengths = [task.plans[0].output_tokens[0] for task in (source.draw() for _ in range(12)) if task]
    makespan = max(e.t for _, e, _ in r.turns())
    assert makespan == pytest.approx(greedy(lengths, 3))
    static = sum(max(lengths[i : i + 3]) - 1 for i in range(0, 12, 3)) * STEP
    work = sum(n - 1 for n in lengths) * STEP
    assert work / (3 * makespan) > work / (3 * static), "slots are used better than by batches that end together"


def test_rk_07_prefix_reuse_and_slots_save_different_times() -> None:
    """Each can be switched off alone. Without reuse prefill grows and nothing else; without slots there is waiting and
    nothing else."""
    changes: dict[str, Any] = {
        "placement": split(2, 1),
        "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 4},
        "workload__prompt": fixed(1000),
        "workload__turns": fixed(3),
        "workload__observation": fixed(100),
        "rollout__routing": {"type": "session_affinity"},
        "rollout__engine__disable_overlap_schedule": True,
        "simulation__engine_costs": {**COSTS, "prefill_per_token_s": 1e-5},
        "run__num_rollout": 3,
    }
    both = linear_run(**changes).summary
    no_reuse = linear_run(**changes, rollout__engine__disable_radix_cache=True).summary
    no_slots = linear_run(**changes, rollout__engine__max_running_requests=1).summary
    assert both.kv.cached_tokens > 0 == no_reuse.kv.cached_tokens
    assert no_slots.kv.cached_tokens > 0
    assert no_reuse.trajectory.prefill > 2 * both.trajectory.prefill
    assert no_slots.trajectory.prefill <= both.trajectory.prefill
    assert no_slots.trajectory.queue > 10 * both.trajectory.queue
    assert no_slots.trajectory.decode == pytest.approx(3 * 49 * STEP), "nobody interrupts"
    assert no_slots.step_time_mean_s > both.step_time_mean_s


# --- versions of KV ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "kv"), RULES)
def test_rk_08_kv_of_a_former_version_is_not_reused_unless_the_rule_says_so(mode: str, kv: str) -> None:
    """A system prompt of 64 tokens in front of every task, an update after every step."""
    r = linear_run(
        rollout__admission={"type": "one_step_ahead"},
        workload__shared_prefix_tokens=64,
        workload__reply={"type": "uniform", "low": 50, "high": 400},
        weights__transition={"pause_generation_mode": mode, "kv": kv},
        run__num_rollout=6,
    )
    version = [0] * 2
    sent: dict[tuple[int, int], int] = {}
    older = 0
    for _, x in r.log:
        if isinstance(x, said.EngineResumed):
            version[x.engine] = x.version
        elif isinstance(x, do.StartTurn):
            sent[x.trajectory, x.turn] = version[x.engine]
        elif isinstance(x, said.TurnFinished):
            assert (x.kv_version >= 0) == (x.cached_tokens > 0)
            older += 0 <= x.kv_version < sent[x.trajectory, x.turn]
    assert bool(older) == (kv == "keep")
    age = r.summary.kv.kv_age
    assert (age.max > 0) == (kv == "keep"), "its age is recorded, and only then"
    assert {a.kv for _, a in r.of(do.ResumeEngine)} == {kv}
    assert bool(r.of(do.FlushCache)) == (kv == "flush")


# --- where to go ------------------------------------------------------------------------------------------------------

HOT: dict[str, Any] = {
    "placement": split(4, 1),
    "cluster__gpus_per_node": 8,
    "algorithm": {"n_samples_per_prompt": 1, "rollout_batch_size": 120},
    "workload__shared_prefix_tokens": 2048,
    "workload__prompt": fixed(20),
    "workload__reply": fixed(100),
    "rollout__engine": {"max_running_requests": 8},
    "simulation__engine_costs": COSTS,
    "weights__transition": KEEP,
    "run__num_rollout": 2,
}
"""Everybody begins with the same 2,048 tokens."""


def p99(r: Run) -> float:
    """Seconds from dispatch to the end of a turn, 99th percentile."""
    return float(np.percentile([e.t - sent for sent, e, _ in r.turns()], 99))


def test_rk_09_affinity_without_the_queue_loses_on_a_hot_prefix() -> None:
    affinity = linear_run(
        **HOT,
        rollout__routing={"type": "cache_aware", "cache_threshold": 0.0, "balance_abs_threshold": 10_000},
    )
    cost = linear_run(
        **HOT,
        rollout__routing={"type": "cost", "prefill_tokens_per_s": 1 / PER_TOKEN, "decode_seconds_per_turn": 0.1},
    )
    assert len({e.engine for _, e, _ in affinity.turns()}) == 1, "where the prefix is, and nowhere else"
    assert len({e.engine for _, e, _ in cost.turns()}) == 4
    assert hit_share(affinity) >= hit_share(cost) > 0.9
    assert p99(cost) < 0.5 * p99(affinity)


SPREAD: dict[str, dict[str, Any]] = {
    "random": {},
    "round_robin": {},
    "power_of_two": {},
    "least_load": {"load": "prompt_tokens"},
    "consistent_hashing": {},
    "bounded_consistent_hashing": {},
    "prefix_hash": {},
    "session_affinity": {},
    "cache_aware": {},
    "cost": {"prefill_tokens_per_s": 1 / PER_TOKEN, "decode_seconds_per_turn": 0.1},
    "dynamo_kv": {},
    "mooncake": {"prefill_tokens_per_s": 1 / PER_TOKEN, "transfer_tokens_per_s": None},
    "preble": {"prefill_tokens_per_s": 1 / PER_TOKEN, "decode_seconds_per_turn": 0.1},
}
"""Every routing type with its options."""


@pytest.mark.parametrize("kind", SPREAD)
def test_rk_11_every_policy_carries_a_run_of_groups_and_tools_to_its_end(kind: str) -> None:
    """All invariants hold, every engine is used, and later turns find what was said where a policy looks for it."""
    r = linear_run(
        placement=split(4, 1),
        cluster__gpus_per_node=8,
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 8},
        workload__prompt=fixed(2000),
        workload__reply={"type": "uniform", "low": 20, "high": 100},
        workload__turns=fixed(3),
        workload__observation=fixed(50),
        workload__tool_time={"type": "exponential", "mean_s": 1.0},
        simulation__engine_costs=COSTS,
        rollout__routing={"type": kind, **SPREAD[kind]},
        run__num_rollout=2,
    )
    r.checked()
    assert {e.engine for _, e, _ in r.turns()} == {0, 1, 2, 3}
    later = hit_share(r, from_turn=1)
    if kind in ("random", "power_of_two"):
        assert later < 0.85
    elif kind not in ("round_robin", "least_load"):
        assert later > 0.9


def test_rk_10_a_router_that_is_not_told_of_flushes_goes_where_nothing_is_left() -> None:
    """Every update empties all caches. SGLang's router still sends everybody to the engine that once had the prefix."""
    for told in (False, True):
        r = linear_run(
            **{
                **HOT,
                "run__num_rollout": 3,
                "weights__transition": {"pause_generation_mode": "retract", "kv": "flush"},
            },
            rollout__routing={
                "type": "cache_aware",
                "balance_abs_threshold": 10_000,
                "cache_threshold": 0.5,
                "told_of_flushes": told,
            },
        )
        first: dict[int, tuple[float, int, int, str]] = {}
        for sent, e, start in r.turns():
            turn = (sent, start.trajectory, e.cached_tokens, start.why)
            first[e.spans[0][0]] = min(first.get(e.spans[0][0], turn), turn)
        assert sorted(first) == [0, 1, 2]
        assert [cached for _, _, cached, _ in first.values()] == [0, 0, 0], "the first of a version finds nothing"
        after = "least_load" if told else "prefix_match"
        assert [first[version][3] for version in range(3)] == ["least_load", after, after]


@pytest.mark.parametrize(("absolute", "relative", "threshold"), [(64, 1.5, 0.3), (32, 1.1, 0.5)])
def test_rk_10_every_choice_of_cache_aware_follows_its_rule(absolute: int, relative: float, threshold: float) -> None:
    """Loads counted from the log: imbalanced -> shortest queue; else a match above the threshold -> its engine; else
    least loaded."""
    r = linear_run(
        **{**HOT, "run__num_rollout": 1, "workload__prompt": {"type": "uniform", "low": 20, "high": 4000}},
        rollout__routing={
            "type": "cache_aware",
            "balance_abs_threshold": absolute,
            "balance_rel_threshold": relative,
            "cache_threshold": threshold,
        },
    )
    load = [0] * 4
    prompts = {e.task: e.prompt_tokens for _, e in r.of(said.TaskArrived)}
    had: set[int] = set()
    reasons: Counter[str] = Counter()
    for _, x in r.log:
        if isinstance(x, said.TurnFinished):
            load[x.engine] -= 1
        elif isinstance(x, do.StartTurn):
            most, least = max(load), min(load)
            share = 2048 / prompts[x.task] if had else 0.0
            if most - least > absolute and most > relative * least:
                assert x.why == "shortest_queue" and load[x.engine] == least
            elif share > threshold:
                assert x.why == "prefix_match" and x.engine in had
            else:
                assert x.why == "least_load" and load[x.engine] == least
            reasons[x.why] += 1
            load[x.engine] += 1
            had.add(x.engine)
    assert reasons["shortest_queue"] and reasons["prefix_match"]


def test_rk_12_a_sticky_trajectory_finds_its_history_and_a_random_one_does_not() -> None:
    """Turn n's prompt contains turn n - 1 whole. Four engines, six turns."""
    shares = {}
    for routing in ("session_affinity", "random"):
        r = linear_run(
            placement=split(4, 1),
            cluster__gpus_per_node=8,
            algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 8},
            workload__prompt=fixed(300),
            workload__reply={"type": "uniform", "low": 100, "high": 300},
            workload__turns=fixed(6),
            workload__observation=fixed(20),
            rollout__routing={"type": routing},
            run__num_rollout=2,
        )
        shares[routing] = hit_share(r, from_turn=1)
    assert shares["session_affinity"] > 0.9
    assert shares["random"] < 0.6


def test_rk_13_hits_fall_with_the_capacity_of_the_cache() -> None:
    """Eight programs of up to 1,000 tokens share an engine: the smaller the pool, the more is evicted while they use
    tools."""
    shares, recomputed = [], []
    for slots in (20_000, 6000, 4000, 2000):
        r = linear_run(
            **ONE_ENGINE,
            algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 8},
            workload__prompt=fixed(400),
            workload__reply=fixed(100),
            workload__turns=fixed(5),
            workload__observation=fixed(20),
            workload__max_response_length=100,
            workload__tool_time={"type": "fixed", "seconds": 5.0},
            rollout__engine={"max_total_num_tokens": slots},
        )
        shares.append(hit_share(r, from_turn=1))
        recomputed.append(sum(e.recomputed_tokens for _, e, _ in r.turns()))
        r.checked()
        for _, e, _ in r.turns():
            assert e.cached_tokens < e.prompt_tokens
            assert e.retractions or e.cached_tokens + e.recomputed_tokens <= e.prompt_tokens
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.9 > shares[-1]
    assert recomputed == sorted(recomputed) and recomputed[0] == 0 < recomputed[-1]


def test_rk_13_what_was_evicted_is_computed_again_to_the_token() -> None:
    """cached + recomputed = what the trajectory had computed before, at every later turn."""
    r = linear_run(
        **ONE_ENGINE,
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 8},
        workload__prompt=fixed(400),
        workload__reply=fixed(100),
        workload__turns=fixed(5),
        workload__observation=fixed(20),
        workload__max_response_length=100,
        rollout__engine={"max_total_num_tokens": 3000},
    )
    later = [e for _, e, _ in r.turns() if e.turn and not e.retractions]
    assert any(e.recomputed_tokens for e in later)
    for e in later:
        assert e.cached_tokens + e.recomputed_tokens == 400 + e.turn * 100 + (e.turn - 1) * 20 - 1


def test_the_closed_form_of_a_turn_holds_on_every_engine() -> None:
    r = linear_run(placement=split(3, 1), algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 3})
    assert {round(e.t - sent, 9) for sent, e, _ in r.turns()} == {round(turn_seconds(50), 9)}
    assert {round(e.first_token_t - sent, 9) for sent, e, _ in r.turns()} == {PREFILL}
