"""Programs under KV pressure in the simulator (AP-04, AP-09 to AP-12): thrashing, and the rule that prevents it.

The linear engine: a decode step takes 10 ms, a prefill batch 100 ms and 0.5 ms a computed token, so that KV that is
gone costs time."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.summary import ProgramFigures
from tests.support.simulated import LINEAR, Run, fixed, linear_run, split

KV = 20_000
THUNDER: dict[str, Any] = {"type": "thunder_agent", "acting_half_life_s": 5.0}
CONTEXT = 1000 + 9 * (40 + 160)
"""Of a program at its last call."""


@cache
def pressed(n: int, programs: bool, **rule: Any) -> Run:
    """n programs of ten calls on one engine with KV for `KV` tokens, all started at once; tools of 1.5 s on average."""
    return linear_run(
        simulation__engine_costs=LINEAR | {"prefill_per_token_s": 5e-4},
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": n},
        cluster__gpus_per_node=8,
        placement=split(1, 1),
        workload__prompt=fixed(1000),
        workload__reply=fixed(40),
        workload__turns=fixed(10),
        workload__observation=fixed(160),
        workload__tool_time={"type": "exponential", "mean_s": 1.5},
        rollout__engine={"max_total_num_tokens": KV},
        rollout__routing={"type": "session_affinity"},
        rollout__programs=THUNDER | rule if programs else {"type": "none"},
        run__num_rollout=1,
    )


def hit_share(r: Run) -> float:
    """Of the tokens that a program had computed before, those that were still there."""
    later = [e for _, e, _ in r.turns() if e.turn]
    known = sum(e.prompt_tokens - 160 for e in later)
    return 1 - sum(e.recomputed_tokens for e in later) / known


def figures(r: Run) -> ProgramFigures:
    found = r.summary.programs
    assert found is not None
    return found


def test_ap_10_request_level_reuse_collapses_where_contexts_exceed_memory_and_program_level_holds() -> None:
    """The thrash point is where the sum of contexts passes C: 20,000 tokens are 7 programs at their longest (2,800)."""
    reuse = {n: (hit_share(pressed(n, False)), hit_share(pressed(n, True))) for n in (6, 12, 24, 48)}
    assert min(reuse[6]) > 0.999, "all fit: nothing is computed again but a token whose result came last"
    assert figures(pressed(6, False)).context_share_max <= 1.0 < figures(pressed(12, False)).context_share_max
    alone = [reuse[n][0] for n in (6, 12, 24, 48)]
    assert all(a > b for a, b in pairwise(alone)) and alone[-1] < 0.05, "request level: falls with every program more"
    assert min(reuse[n][1] for n in (12, 24, 48)) > 0.7


def test_ap_10_throughput_falls_past_the_thrash_point_and_programs_keep_it() -> None:
    rate = {n: [figures(pressed(n, p)).turns_per_min for p in (False, True)] for n in (6, 24, 48)}
    assert rate[48][0] < rate[24][0], "more programs, fewer calls a minute"
    assert rate[48][1] > 1.6 * rate[48][0] and rate[48][1] >= 0.9 * rate[24][1]


def test_ap_10_thrashing_is_visible_in_the_figures() -> None:
    thrashing, held = (pressed(48, p).summary for p in (False, True))
    share = [s.kv.recomputed_tokens / s.kv.prompt_tokens for s in (thrashing, held)]
    assert share[0] > 0.8 > 0.3 > share[1]
    assert figures(pressed(48, False)).context_share_mean > 1.5
    lost = [sum(p.gpu_seconds["recompute_kv"] for p in s.pools if p.lane == "engines") for s in (thrashing, held)]
    assert lost[0] > 2 * lost[1]


def test_ap_09_pauses_are_reported_and_the_parts_of_a_programs_time_still_sum_up() -> None:
    r = pressed(24, True)
    assert figures(r).pauses == len(r.of(do.PauseProgram)) > 0
    time = r.summary.trajectory
    assert time.held > 0
    parts = {f: getattr(time, f) for f in time.__struct_fields__ if f != "total"}
    assert min(parts.values()) >= -1e-9 and sum(parts.values()) == pytest.approx(time.total)


def test_a_call_that_was_taken_back_and_went_on_is_one_call() -> None:
    """24 programs of ten calls, whatever was taken back meanwhile."""
    r = pressed(24, True)
    assert any(e.finish_reason == "abort" for _, e in r.of(said.TurnFinished))
    assert figures(r).turns == 240


def test_ap_04_the_rule_reads_programs_and_not_requests() -> None:
    """One program that acts for very long and one that reasons: the same requests are waiting at the engine in both
    cases, and what is let in differs with the program's state alone."""
    r = pressed(24, True)
    acting: dict[int, float] = {}
    pausing: Counter[bool] = Counter()
    for t, x in r.log:
        if isinstance(x, do.RunTool):
            acting[x.trajectory] = t
        elif isinstance(x, said.ToolFinished):
            acting.pop(x.trajectory, None)
        elif isinstance(x, do.PauseProgram) and x.why == "over_capacity":
            pausing[x.trajectory in acting] += 1
    assert pausing[True] > pausing[False], "acting programs go first"
    r.checked()


def test_ap_12_what_is_paused_is_computed_again_and_its_history_is_whole() -> None:
    r = pressed(24, True)
    back: set[int] = set()
    again: dict[bool, list[float]] = {True: [], False: []}
    for _, x in r.log:
        if isinstance(x, do.RestoreProgram):
            back.add(x.trajectory)
        elif isinstance(x, said.TurnFinished) and x.turn:
            whole = x.prompt_tokens + x.output_tokens == 1000 + x.turn * (40 + 160) + 40
            assert whole or x.finish_reason == "abort", "whole history, paused or not"
            again[x.trajectory in back].append(x.recomputed_tokens / x.prompt_tokens)
            back.discard(x.trajectory)
    first, others = (sum(shares) / len(shares) for shares in (again[True], again[False]))
    assert first > 0.5 > 0.3 > others, "the first call after a pause computes its history again"


def test_ap_11_preparing_ahead_hides_the_environments_behind_the_wait() -> None:
    """12 programs, room for two; preparing takes 10 s. Ahead of time the run is shorter, by as much as waits allow."""
    ends = {}
    for ahead in (0, 8):
        r = linear_run(
            simulation__engine_costs=LINEAR,
            algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 12},
            placement=split(1, 1),
            workload__prompt=fixed(1000),
            workload__turns=fixed(3),
            workload__tool_time={"type": "fixed", "seconds": 4.0},
            workload__tools={"environment_prepare": {"type": "fixed", "seconds": 10.0}},
            rollout__engine={"max_total_num_tokens": 2200},
            rollout__routing={"type": "session_affinity"},
            rollout__programs=THUNDER | {"acting_half_life_s": None, "prepare_ahead": ahead},
            run__num_rollout=1,
        )
        r.checked()
        ends[ahead] = max(e.t for _, e in r.of(said.TurnFinished))
    assert ends[0] - ends[8] >= 2 * 10.0


def test_ap_06_a_full_tool_queue_refuses_and_the_program_is_reclaimed() -> None:
    """One slot, one place to wait: of four calls at once two are refused; their programs fail, everything goes."""
    r = linear_run(
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 1},
        placement=split(1, 1),
        workload__turns=fixed(2),
        workload__tool_time={"type": "fixed", "seconds": 3.0},
        workload__tools={"slots": 1, "max_queued": 1, "environment_prepare": {"type": "fixed", "seconds": 1.0}},
        run__num_rollout=1,
    )
    r.checked()
    refused = {e.trajectory for _, e in r.of(said.ToolFinished) if e.fault == "queue"}
    ends = {i: (a.outcome, a.reason) for _, a in r.of(do.Retire) for i in a.trajectories}
    assert len(refused) == 2 and {ends[i] for i in refused} == {("failed", "tool_refused")}
    assert figures(r).tool_faults == {"queue": 2}
    assert not r.backend.services.environments._environments


@pytest.mark.parametrize(("parallel", "published"), [(24, 29.9), (48, 32.8), (72, 38.4), (96, 47.2)])
def test_environment_preparation_grows_with_parallelism_as_published(parallel: int, published: float) -> None:
    """ThunderAgent's four points from two numbers: the last of n preparations that start at once takes
    29 (1 + (n / 122)^2) seconds."""
    r = linear_run(
        algorithm={"n_samples_per_prompt": parallel, "rollout_batch_size": 1},
        placement=split(1, 1),
        workload__tools={"environment_prepare": {"type": "fixed", "seconds": 29.0}, "prepare_slows_at": 122},
        run__num_rollout=1,
    )
    last = max(t for t, _ in r.of(said.EnvironmentReady))
    assert last == pytest.approx(published, rel=0.03)
