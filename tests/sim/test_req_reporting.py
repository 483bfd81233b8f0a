"""What a run reports (RP), shown by whole simulated runs: sums that close, hops of the loop, kinds of numbers."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

from sim.run import simulate
from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.summary import CAUSES
from tests.support.scenarios import COLOCATED, scenario
from tests.support.simulated import HERE, QUICK, Run, fixed, linear_run, run, split, turn_seconds

HYBRID = {"mode": "hybrid", "rollout_num_gpus": 2, "actor_num_gpus": 2, "rollout_num_gpus_per_engine": 1}
AGENTS: dict[str, Any] = {
    "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 2},
    "workload__prompt": {"type": "uniform", "low": 50, "high": 300},
    "workload__reply": {"type": "lognormal", "mean": 150, "sigma": 0.8},
    "workload__turns": {"type": "geometric", "mean": 2.5},
    "workload__observation": fixed(30),
    "workload__tool_time": {"type": "exponential", "mean_s": 2.0},
    "workload__tools": {
        "slots": 3,
        "environments": 6,
        "environment_prepare": {"type": "exponential", "mean_s": 1.0},
        "environment_release": {"type": "fixed", "seconds": 0.5},
    },
    "rollout__engine": {"max_total_num_tokens": 4000, "max_running_requests": 3},
    "run__num_rollout": 5,
}
"""Several turns, too few tool slots, environments and KV."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "one step ahead": {"rollout__admission": {"type": "one_step_ahead"}},
    "async, in place": {
        "rollout__admission": {"type": "fully_async", "async_max_concurrent_groups": 4},
        "weights__transition": {"pause_generation_mode": "in_place", "kv": "keep"},
        "training__cost": {"type": "rate", "samples_per_s": 0.8},
    },
    "drops": {
        "rollout__admission": {"type": "fully_async", "async_max_concurrent_groups": 5},
        "experience__staleness": {"bound": 0, "action": "drop"},
        "experience__selection": {"filter_zero_variance": True},
    },
    "colocated": COLOCATED,
    "hybrid": {"placement": HYBRID, "rollout__admission": {"type": "one_step_ahead"}},
    "critic": {
        "algorithm__advantage": "critic",
        "algorithm__kl_coef": 0.1,
        "rollout__admission": {"type": "one_step_ahead"},
    },
    "aborts": {
        "rollout__admission": {"type": "one_step_ahead"},
        "weights__transition": {"pause_generation_mode": "abort", "kv": "salt_by_version"},
        "training__cost": {"type": "rate", "samples_per_s": 0.8},
    },
    "early stop": {"rollout__admission": {"type": "over_sampling", "over_sampling_ratio": 1.5}},
}


def agents(name: str, **changes: Any) -> Run:
    return linear_run(**{**copy.deepcopy(AGENTS), **SYSTEMS[name], **changes})


# --- RP-06: time ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("name", SYSTEMS)
def test_rp_06_gpu_time_by_cause_sums_to_wall_time_times_gpus(name: str, warmup: int) -> None:
    """Per pool, per step and in all, to 1e-6."""
    s = agents(name, run__warmup_steps=warmup).summary
    assert s.measured_steps == 5 - warmup
    for pool in s.pools:
        assert sum(pool.gpu_seconds.values()) == pytest.approx(pool.gpus * s.measured_s, rel=1e-6)
        assert set(pool.gpu_seconds) == set(CAUSES) and all(v >= -1e-9 for v in pool.gpu_seconds.values())
    assert sum(p.gpus for p in s.pools) == s.num_gpus
    for step in s.steps:
        assert sum(step.gpu_seconds.values()) == pytest.approx(s.num_gpus * (step.end_t - step.start_t), rel=1e-6)
    ends = [step.end_t for step in s.steps]
    assert [step.start_t for step in s.steps] == [0.0, *ends[:-1]]


def test_rp_06_a_synchronous_step_divides_as_the_closed_form_says() -> None:
    """Two engines of one GPU, two trainer GPUs: generation 0.59 s, score 1 s, training 4 s, then the update."""
    s = linear_run(run__num_rollout=5, run__warmup_steps=1).summary
    n, lanes = s.measured_steps, {p.lane: p.gpu_seconds for p in s.pools}
    update = s.weight_update
    assert lanes["engines"]["generate"] == pytest.approx(2 * n * turn_seconds(50))
    assert lanes["engines"]["idle_trainer"] == pytest.approx(2 * n * (1.0 + 4.0 + update.prepare_s))
    assert lanes["engines"]["weight_update"] == pytest.approx(2 * n * update.pause_s)
    assert lanes["trainer"]["train"] == pytest.approx(2 * n * 4.0)
    released = update.prepare_s + update.copy_s
    assert lanes["trainer"]["weight_update"] == pytest.approx(2 * n * released)
    assert lanes["trainer"]["idle_data"] == pytest.approx(2 * n * (turn_seconds(50) + 1.0 + update.total_s - released))


# --- RP-01, RP-02: the loop -------------------------------------------------------------------------------------------


def test_rp_01_the_loop_closes_and_each_hop_has_its_time() -> None:
    """Token choice -> evaluation -> update -> transfer -> next choice, for one trajectory of each step; the hops sum to
    the cycle."""
    r = linear_run(run__num_rollout=4)
    ends = r.steps
    effective: dict[int, float] = {e.version: t for t, e in r.of(said.EngineResumed)}
    first_token = {b.batch: min(x.dispatched_t for x in b.experiences) for b in r.batches}
    for b in r.batches[:-1]:
        x = b.experiences[0]
        hops = {
            "choice": x.generated_t - x.dispatched_t,
            "evaluation": x.group_ready_t - x.generated_t,
            "wait": x.dequeued_t - x.group_ready_t,
            "update": ends[b.batch] - x.dequeued_t,
            "transfer": effective[b.batch + 1] - ends[b.batch],
            "next choice": first_token[b.batch + 1] - effective[b.batch + 1],
        }
        assert all(v >= 0 for v in hops.values())
        assert (hops["choice"], hops["evaluation"], hops["update"]) == pytest.approx((turn_seconds(50), 1.0, 4.0))
        assert (hops["wait"], hops["next choice"]) == (0.0, 0.0)
        assert sum(hops.values()) == pytest.approx(first_token[b.batch + 1] - first_token[b.batch])
    s = r.summary
    assert s.trajectory.total + 4.0 + s.weight_update.total_s == pytest.approx(r.cycles[0])


def test_rp_02_two_arrows_with_their_size_and_their_waiting() -> None:
    """Experience to the learner: tokens, latency, waits. Weights to the engines: bytes, latency, pause."""
    r = agents("one step ahead", run__warmup_steps=1)
    s = r.summary
    experiences = [x for b in r.batches[1:] for x in b.experiences]
    assert s.waste.trained_tokens == sum(x.output_tokens for x in experiences)
    n = len(experiences)
    assert s.trajectory.total == pytest.approx(sum(x.dequeued_t - x.submitted_t for x in experiences) / n)
    assert s.trajectory.in_buffer == pytest.approx(sum(x.dequeued_t - x.group_ready_t for x in experiences) / n)
    assert s.trajectory.waits_for_signals == pytest.approx(sum(x.ready_t - x.generated_t for x in experiences) / n)
    assert s.trajectory.waits_for_group == pytest.approx(sum(x.group_ready_t - x.ready_t for x in experiences) / n)
    w = s.weight_update
    assert w.bytes == 2 * 8_190_735_360 and w.total_s > w.pause_s > 0


# --- RP-05: kinds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "engine"),
    [({"type": "linear"}, "assumed"), ({"type": "measured"}, "measured"), ({"type": "analytic"}, "analytic")],
)
def test_rp_05_every_family_of_numbers_says_what_it_rests_on(costs: dict[str, Any], engine: str) -> None:
    s = simulate(scenario(simulation__engine_costs=costs), HERE).summary
    assert set(s.kinds) >= {"engine_step", "reply_lengths", "prompts", "trainer", "links", "tools", "rewards", "price"}
    assert set(s.kinds.values()) <= {"measured", "calibrated", "analytic", "published", "simulated", "assumed"}
    assert (s.kinds["engine_step"], s.kinds["trainer"]) == (engine, "analytic")
    assert simulate(scenario(**QUICK), HERE).summary.kinds["trainer"] == "assumed"
    assert s.backend == "simulated" and s.scenario_hash and s.workload_hash
    assert all(0.0 <= v <= 1.0 for v in s.marks.values())


# --- RP-07: staleness and waste ---------------------------------------------------------------------------------------


def test_rp_07_staleness_at_both_events_and_the_discarded_share() -> None:
    r = agents("drops", run__warmup_steps=0, run__num_rollout=8)
    s = r.summary
    trained = [x for b in r.batches for x in b.experiences]
    reading = s.staleness["oldest_token"]
    assert reading.dequeue.histogram == Counter(x.dequeue_deployed - x.oldest_version for x in trained)
    assert reading.completion.histogram == Counter(x.completion_deployed - x.oldest_version for x in trained)
    assert reading.dequeue.count == len(trained) == s.waste.trained_trajectories
    last = r.steps[-1]
    lost: Counter[str] = Counter()
    for t, a in r.of(do.Retire):
        if a.outcome == "dropped" and t < last:
            lost[a.reason] += len(a.trajectories)
    assert lost["stale"] > 0 and lost["zero_variance"] > 0
    assert s.waste.dropped_trajectories == lost
    assert s.waste.share == pytest.approx(sum(s.waste.dropped_tokens.values()) / s.waste.generated_tokens)
    assert 0 < s.waste.share < 1


@pytest.mark.parametrize("action", ["correct", "mask", "none"])
def test_rp_07_the_corrected_share_and_masked_tokens(action: str) -> None:
    rule = {"bound": 0, "action": action}
    r = agents("drops", experience__staleness=rule, run__warmup_steps=0, run__num_rollout=8)
    w = r.summary.waste
    old = [x for b in r.batches for x in b.experiences if x.staleness > 0]
    assert old
    if action == "correct":
        groups = {x.group for x in old}
        beyond = sum(x.group in groups for b in r.batches for x in b.experiences)
        assert w.corrected_trajectories == beyond and w.masked_tokens == 0
    else:
        assert w.corrected_trajectories == 0
        spans: Counter[int] = Counter()
        deployed = {x.trajectory: x.dequeue_deployed for b in r.batches for x in b.experiences}
        for _, e, _ in r.turns():
            spans[e.trajectory] += sum(
                b - a for v, a, b in e.spans if e.trajectory in deployed and v < deployed[e.trajectory]
            )
        masked = sum(spans[i] for i in deployed)
        assert masked > 0 and w.masked_tokens == (masked if action == "mask" else 0)


# --- RP-08: KV, queue -------------------------------------------------------------------------------------------------


def test_rp_08_cache_hits_recomputation_and_queueing_are_those_of_the_turns() -> None:
    r = agents("sync", run__warmup_steps=0)
    s, last = r.summary, r.steps[-1]
    turns = [e for _, e, _ in r.turns() if e.t <= last]
    assert s.kv.prompt_tokens == sum(e.prompt_tokens for e in turns)
    assert s.kv.cached_tokens == sum(e.cached_tokens for e in turns) > 0
    assert s.kv.recomputed_tokens == sum(e.recomputed_tokens for e in turns) > 0
    assert s.kv.retractions == sum(e.retractions for e in turns)
    queued: Counter[int] = Counter()
    for sent, e, _ in r.turns():
        queued[e.trajectory] += e.started_t - sent
    trained = {x.trajectory for b in r.batches for x in b.experiences}
    waited = sum(queued[i] for i in trained) / len(trained)
    assert s.trajectory.queue >= waited > 0, "and what it waited for before it was sent"
    engines = next(p for p in s.pools if p.lane == "engines").gpu_seconds
    assert engines["recompute_kv"] > 0


# --- RP-09, RP-10: tasks and updates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_rp_09_the_life_of_a_trajectory_divides_without_a_rest(name: str) -> None:
    """Queue, prefill, decode, tools, environment, pauses, signals, group, buffer: none negative, and they sum to the
    whole."""
    s = agents(name, run__warmup_steps=0).summary
    t = s.trajectory
    parts = {f: getattr(t, f) for f in t.__struct_fields__ if f != "total"}
    assert sum(parts.values()) == pytest.approx(t.total, rel=1e-9)
    assert all(v >= -1e-9 for v in parts.values()), parts
    assert all(parts[p] > 0 for p in ("queue", "prefill", "decode", "tool", "environment"))


def test_rp_09_tools_and_environments_are_those_of_the_log() -> None:
    r = agents("sync", run__warmup_steps=0)
    since: dict[tuple[str, int], float] = {}
    tool: Counter[int] = Counter()
    environment: Counter[int] = Counter()
    for t, x in r.log:
        if isinstance(x, do.RunTool | do.PrepareEnvironment):
            since[type(x).__name__, x.trajectory] = t
        elif isinstance(x, said.ToolFinished):
            tool[x.trajectory] += t - since["RunTool", x.trajectory]
        elif isinstance(x, said.EnvironmentReady):
            environment[x.trajectory] += t - since["PrepareEnvironment", x.trajectory]
    trained = [x.trajectory for b in r.batches for x in b.experiences]
    assert r.summary.trajectory.tool == pytest.approx(sum(tool[i] for i in trained) / len(trained))
    assert r.summary.trajectory.environment == pytest.approx(sum(environment[i] for i in trained) / len(trained))


@pytest.mark.parametrize("path", ["broadcast", "p2p", "disk", "disk_delta"])
def test_rp_10_an_update_divides_into_its_parts(path: str) -> None:
    """Synchronous, so nothing waits for requests: prepare + copy + barrier + pause overhead = total."""
    r = linear_run(
        weights__path={"type": "fixed", "update_weight_transfer_mode": path}, run__num_rollout=4, run__warmup_steps=1
    )
    w = r.summary.weight_update
    expected = r.backend.paths.expected(path)
    assert w.count == 3 and w.path == path
    assert w.total_s == pytest.approx(expected.total_s + 0.05)
    copied = expected.transfer_s + expected.apply_s
    assert w.prepare_s + w.copy_s == pytest.approx(expected.prepare_s + copied)
    assert (w.drain_s, w.requantize_s) == pytest.approx((0.0, 0.0))
    assert w.total_s == pytest.approx(w.prepare_s + w.drain_s + w.copy_s + 0.05)
    assert w.barrier_s < w.copy_s


# --- RP-13: comparisons -----------------------------------------------------------------------------------------------


def test_rp_13_what_is_compared_has_the_same_work_and_the_same_gpus() -> None:
    """Placement and admission change; the workload's hash, the seed and the GPU total do not."""
    configs = [
        {},
        {"rollout__admission": {"type": "one_step_ahead"}},
        COLOCATED,
        {"placement": split(3, 1)},
        {"experience__staleness": {"bound": 1, "action": "drop"}},
    ]
    summaries = [simulate(scenario(**QUICK, **c), HERE).summary for c in configs]
    assert len({s.workload_hash for s in summaries}) == 1
    assert len({s.scenario_hash for s in summaries}) == len(configs)
    assert {s.num_gpus for s in summaries} == {4} and {s.seed for s in summaries} == {0}
    other = simulate(scenario(**QUICK, run__seed=1), HERE).summary
    assert other.workload_hash != summaries[0].workload_hash


def test_rp_13_repeats_differ_by_the_seed_alone_and_spread() -> None:
    steps = {
        seed: run(
            scenario(
                **{**QUICK, "workload__reply": {"type": "lognormal", "mean": 200, "sigma": 1.0}, "run__seed": seed}
            )
        ).steps[-1]
        for seed in range(4)
    }
    assert len(set(steps.values())) == 4
