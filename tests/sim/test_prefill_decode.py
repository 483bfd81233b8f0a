"""Prefill and decode on engines of their own, and KV that is fetched: whole simulated runs, times in closed form.

A decode step takes 10 ms, a prefill 0.1 ms a computed token. KV of Qwen3-8B: 36 layers x 8 heads x 128 x 2 x 2 bytes =
147,456 bytes a token; an H100 sends 45 GB/s over the network and 450 GB/s over NVLink, 10 us a message.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from testbed.scenario.rules import check
from tests.support.invariants import replayed
from tests.support.random_runs import random_scenario
from tests.support.scenarios import scenario
from tests.support.simulated import HERE, LINEAR, STEP, Run, fixed, linear_run

PER_TOKEN = 1e-4
COSTS = {**LINEAR, "prefill_base_s": 0.0, "prefill_per_token_s": PER_TOKEN}
KV_BYTES = 36 * 8 * 128 * 2 * 2
NVLINK, IB, LATENCY = 450e9, 45e9, 1e-5


def pd(prefill: int, decode: int, trainer: int = 1, policy: str = "least_load") -> dict[str, Any]:
    return {
        "mode": "disaggregated",
        "rollout_num_gpus": prefill + decode,
        "actor_num_gpus": trainer,
        "rollout_num_gpus_per_engine": 1,
        "pd_disaggregation": {"prefill_num_gpus": prefill, "decode_policy": policy},
    }


def split_run(prefill: int = 1, decode: int = 1, **changes: Any) -> Run:
    return linear_run(
        **{
            "placement": pd(prefill, decode),
            "cluster__gpus_per_node": 8,
            "algorithm": {"n_samples_per_prompt": 1, "rollout_batch_size": 4},
            "workload__prompt": fixed(1000),
            "simulation__engine_costs": COSTS,
            "rollout__engine": {"disable_overlap_schedule": True},
            "run__num_rollout": 1,
            **changes,
        }
    )


@pytest.mark.parametrize(("per_node", "rate"), [(8, NVLINK), (1, IB)])
def test_a_turn_is_prefill_hand_over_and_decode_one_after_another(per_node: int, rate: float) -> None:
    """Alone: 0.1 s of prefill gives the first token; 1,000 tokens of KV travel; one token is prefilled and 48 decode
    steps follow."""
    r = split_run(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 1},
        cluster__gpus_per_node=per_node,
        cluster__nodes=8 // per_node,
    )
    ((sent, e, _),) = r.turns()
    assert e.first_token_t - sent == pytest.approx(0.1)
    moved = LATENCY + 1000 * KV_BYTES / rate
    assert e.t - sent == pytest.approx(0.1 + moved + PER_TOKEN + 48 * STEP)
    assert (e.output_tokens, e.spans, e.cached_tokens) == (50, ((0, 0, 50),), 0)
    ((_, handed),) = r.of(do.HandOver)
    assert (handed.engine, handed.to, e.engine) == (0, 1, 1)
    r.checked()


def test_hand_overs_of_one_engine_share_its_links() -> None:
    """Four prompts in one batch are done at once: their KV leaves one after another."""
    r = split_run(cluster__gpus_per_node=1, cluster__nodes=8)
    each = LATENCY + 1000 * KV_BYTES / IB
    ends = sorted(e.t for _, e, _ in r.turns())
    arrived = [0.4 + (i + 1) * each for i in range(4)]
    # each begins with a prefill of one token; the others of the batch wait for it
    assert ends[0] > arrived[0] + 48 * STEP and ends[-1] >= arrived[-1] + PER_TOKEN + 48 * STEP
    assert ends[-1] < arrived[-1] + 4 * PER_TOKEN + 50 * STEP
    ib = r.backend.fleet._transfers.links["ib"][0]
    assert ib.transfers == 4 and ib.busy_s == pytest.approx(4 * each)


def test_decode_is_never_interrupted_by_a_prompt() -> None:
    """The point of the split. One engine for both: every prompt of 20,000 tokens (2 s) stands in the way of those that
    decode. Split: the gap is what one prefilled token takes."""
    changes: dict[str, Any] = {
        "workload__prompt": fixed(20_000),
        "workload__reply": {"type": "uniform", "low": 100, "high": 300},
        "rollout__engine": {"disable_overlap_schedule": True, "max_running_requests": 4},
        "algorithm": {"n_samples_per_prompt": 1, "rollout_batch_size": 8},
    }

    def slowest_token(r: Run) -> float:
        return max((e.t - e.first_token_t) / (e.output_tokens - 1) for _, e, _ in r.turns())

    together = linear_run(
        placement={
            "mode": "disaggregated",
            "rollout_num_gpus": 2,
            "actor_num_gpus": 1,
            "rollout_num_gpus_per_engine": 1,
        },
        cluster__gpus_per_node=8,
        simulation__engine_costs=COSTS,
        run__num_rollout=1,
        **changes,
    )
    split = split_run(**changes)
    assert slowest_token(together) > 2 * STEP
    moved = 8 * (LATENCY + 20_000 * KV_BYTES / NVLINK)
    assert slowest_token(split) < STEP + (moved + 8 * STEP) / 100


def test_a_reply_of_one_token_never_leaves_its_prefill_engine() -> None:
    r = split_run(workload__reply=fixed(1), workload__max_response_length=1)
    assert not r.of(do.HandOver) and {e.engine for _, e, _ in r.turns()} == {0}
    r.checked()


def test_prefix_reuse_is_the_prefill_engines_and_outputs_are_prefilled_again() -> None:
    """Turn 2's prompt is 1,000 + 50 + 30 tokens. The prefill engine has seen the prompt; the 50 outputs were made
    elsewhere."""
    r = split_run(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 1},
        workload__turns=fixed(2),
        workload__observation=fixed(30),
    )
    first, second = [e for _, e, _ in r.turns()]
    assert (first.prompt_tokens, first.cached_tokens) == (1000, 0)
    assert (second.prompt_tokens, second.cached_tokens, second.recomputed_tokens) == (1080, 1000, 49)


@pytest.mark.parametrize("policy", ["random", "round_robin", "power_of_two", "least_load"])
def test_every_decode_policy_ends_a_run_and_replays(policy: str) -> None:
    r = split_run(
        placement=pd(2, 3, policy=policy),
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 8},
        workload__reply={"type": "uniform", "low": 1, "high": 200},
        workload__turns=fixed(2),
        workload__observation=fixed(10),
        rollout__routing={"type": "cache_aware"},
        run__num_rollout=3,
    )
    r.checked()
    assert replayed(r.scenario, r.records) > 0
    assert {a.to for _, a in r.of(do.HandOver)} == {2, 3, 4}
    for _, e, _ in r.turns():
        assert e.cached_tokens < e.prompt_tokens


@pytest.mark.parametrize("admission", ["sync", "fully_async"])
@pytest.mark.parametrize(
    ("mode", "kv"),
    [
        (mode, kv)
        for mode in ("retract", "in_place", "abort", "finish")
        for kv in ("flush", "salt_by_version", "keep")
        if (mode, kv) != ("in_place", "flush")
    ],
)
def test_weights_change_under_every_rule_with_turns_in_both_stages(mode: str, kv: str, admission: str) -> None:
    """All invariants; KV of older weights is used only where the rule keeps it, spans rise across the hand-over."""
    if (mode, admission) == ("abort", "fully_async"):
        admission = "one_step_ahead"
    r = split_run(
        placement=pd(2, 2),
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 4},
        workload__prompt={"type": "uniform", "low": 500, "high": 9000},
        workload__reply={"type": "uniform", "low": 1, "high": 300},
        workload__shared_prefix_tokens=64,
        rollout__admission={"type": admission},
        experience={"buffer": {"type": "insert_when_ready", "async_data_buffer_capacity_factor": 4.0}},
        weights__transition={"pause_generation_mode": mode, "kv": kv},
        run__num_rollout=6,
    )
    r.checked()
    assert replayed(r.scenario, r.records) > 0
    summary = r.summary
    assert sum(sum(p.gpu_seconds.values()) for p in summary.pools) == pytest.approx(
        sum(p.gpus for p in summary.pools) * summary.measured_s, rel=1e-6
    )


@pytest.mark.parametrize("engine", [0, 1, 2, 3])
@pytest.mark.parametrize("when", [0.05, 0.25, 0.5, 0.8, 1.3])
def test_a_lost_engine_of_either_side_loses_no_trajectory(engine: int, when: float) -> None:
    r = linear_run(
        faults=[said.EngineLost(when, engine), said.EngineJoined(when + 3.0, engine, 0)],
        placement=pd(2, 2),
        cluster__gpus_per_node=1,
        cluster__nodes=8,
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 12},
        workload__prompt=fixed(4000),
        workload__reply={"type": "uniform", "low": 1, "high": 120},
        simulation__engine_costs=COSTS,
        run__num_rollout=1,
    )
    r.checked()
    assert {a.outcome for _, a in r.of(do.Retire)} == {"trained"}


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (3,), (2, 0), (3, 1), (0, 2)])
def test_engines_lost_while_kv_is_on_its_way_lose_no_trajectory(lost: tuple[int, ...]) -> None:
    """Hand-overs of 5.9 s each, from 0.4 s on: the sender is lost, or the receiver, or one after the other."""
    faults: list[said.Event] = []
    for i, engine in enumerate(lost):
        faults += [said.EngineLost(2.0 + i, engine), said.EngineJoined(40.0 + i, engine, 0)]
    r = linear_run(
        faults=sorted(faults, key=lambda e: e.t),
        placement=pd(2, 2),
        cluster={"gpu": "H100", "nodes": 8, "gpus_per_node": 1, "links": {"ib_gb_per_s": 0.1}},
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 4},
        workload__prompt=fixed(4000),
        simulation__engine_costs=COSTS,
        run__num_rollout=1,
    )
    r.checked()
    assert {a.outcome for _, a in r.of(do.Retire)} == {"trained"}
    again = [a for _, a in r.of(do.StartTurn) if a.attempt]
    assert again, "some were on their way"
    fleet = r.backend.fleet
    assert not fleet._sources and not any(slot.on_way for slot in fleet.slots)


def test_a_side_without_engines_ends_the_run() -> None:
    r = linear_run(
        faults=[said.EngineLost(0.1, 1)],
        placement=pd(1, 1),
        simulation__engine_costs=COSTS,
        run__num_rollout=1,
    )
    assert r.finish_reason == "no_engine_left"


@pytest.mark.parametrize("seed", range(60))
def test_random_scenarios_on_two_sides_keep_the_contract(seed: int) -> None:
    """All policies mixed, engines lost and back: invariants hold and a replay agrees."""
    r = random.Random(seed)
    data = random_scenario(r).model_dump()
    data["placement"] = pd(r.randint(1, 3), r.randint(1, 3))
    data["cluster"] = {"gpu": "H100", "nodes": 8, "gpus_per_node": r.choice([1, 8])}
    data["rollout"]["concurrency"] = {"type": "unlimited"}
    data["weights"]["participation"] = {"type": "all"}
    data["rollout"]["routing"] = r.choice(
        [
            {"type": "cache_aware"},
            {"type": "session_affinity"},
            {"type": "dynamo_kv"},
            {"type": "mooncake", "prefill_tokens_per_s": 1e3, "transfer_tokens_per_s": 1e5},
            {"type": "preble", "prefill_tokens_per_s": 1e3},
        ]
    )
    data["rollout"]["engine"] = {"max_running_requests": r.choice([2, 64]), "page_size": r.choice([1, 16])}
    if r.random() < 0.4:
        data["rollout"]["engine"]["hierarchical_cache"] = {}
        data["rollout"]["engine"]["max_total_num_tokens"] = 16384
    data["workload"] = scenario(
        workload__prompt={"type": "uniform", "low": 50, "high": 3000},
        workload__reply={"type": "uniform", "low": 1, "high": 300},
        workload__turns={"type": "uniform", "low": 1, "high": 4},
        workload__observation={"type": "fixed", "tokens": 20},
        workload__tool_time={"type": "exponential", "mean_s": 1.0},
    ).workload.model_dump()
    data["simulation"] = {"engine_costs": COSTS}
    data["training"] = {"cost": {"type": "rate", "samples_per_s": 5.0}}
    data["weights"]["requantize"] = "none"
    data["weights"]["path"]["update_weight_transfer_mode"] = r.choice(["broadcast", "p2p", "disk"])
    config = Scenario.model_validate(data)
    if check(config, HERE):
        pytest.skip("not a scenario that can run")
    engines = config.placement.rollout_num_gpus
    faults: list[said.Event] = []
    if r.random() < 0.5:
        engine, t = r.randrange(engines), r.uniform(0.5, 20)
        faults = [said.EngineLost(t, engine), said.EngineJoined(t + r.uniform(0.5, 10), engine, 0)]
    run = Run(config, faults).go()
    if run.finish_reason != "no_engine_left":
        run.checked()
    assert replayed(config, run.records) > 0


def test_skip_ahead_and_iterations_agree_on_two_sides() -> None:
    """The same times to rounding, in both stages."""
    ends = []
    for mode in ("skip", "iterate"):
        r = split_run(
            simulation__mode=mode,
            algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 6},
            workload__reply={"type": "uniform", "low": 1, "high": 400},
        )
        ends.append([(e.trajectory, e.t, e.first_token_t) for _, e, _ in r.turns()])
    for one, other in zip(*ends, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


# --- fetched prefixes -------------------------------------------------------------------------------------------------


def mooncake_trace(path: Path, rows: list[tuple[float, list[int], int]]) -> str:
    """(seconds, block ids, output tokens): prompts of whole 512-token blocks."""
    lines = [
        json.dumps({"timestamp": t * 1000, "input_length": 512 * len(ids), "output_length": n, "hash_ids": ids})
        for t, ids, n in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("split", [False, True])
def test_rk_11_a_fetched_prefix_arrives_before_its_prompt_is_computed(split: bool, tmp_path: Path) -> None:
    """Engine 0 computes 16 blocks (8,192 tokens, 0.82 s), then is busy with another 64. The last request, 16 blocks
    and one more, goes to engine 1 with the KV of engine 0: 8,192 tokens over the network, then 512 computed."""
    a, other = list(range(16)), list(range(100, 164))
    trace = mooncake_trace(tmp_path / "t.jsonl", [(0.0, a, 2), (2.0, other, 2), (2.0, [200], 2), (2.5, [*a, 300], 2)])
    r = linear_run(
        placement=pd(2, 2) if split else {**pd(1, 1), "pd_disaggregation": None},
        cluster__gpus_per_node=1,
        cluster__nodes=8,
        workload={"type": "trace", "trace": trace, "arrivals": "trace"},
        algorithm={"advantage": "distillation", "n_samples_per_prompt": 1, "rollout_batch_size": 4},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 8},
        rollout__routing={
            "type": "mooncake",
            "prefill_tokens_per_s": 1 / PER_TOKEN,
            "transfer_tokens_per_s": IB / KV_BYTES,
        },
        rollout__engine={"disable_overlap_schedule": True, "chunked_prefill_size": -1, "max_prefill_tokens": 65536},
        simulation__engine_costs=COSTS,
        run__num_rollout=1,
    )
    ((t, fetch),) = r.of(do.FetchPrefix)
    assert (t, fetch.source, fetch.engine, fetch.tokens) == (2.5, 0, 1, 8192)
    fetched = next(e for _, e, _ in r.turns() if e.prompt_tokens == 17 * 512)
    assert fetched.cached_tokens == 8192
    assert fetched.started_t - t == pytest.approx(LATENCY + 8192 * KV_BYTES / IB)
    assert fetched.first_token_t - fetched.started_t == pytest.approx(512 * PER_TOKEN)
    assert replayed(r.scenario, r.records) > 0


def test_a_fetch_brings_what_the_source_really_has(tmp_path: Path) -> None:
    """The router takes its account for true; the source has evicted the prefix: nothing travels, all is computed."""
    a, other = list(range(4)), list(range(100, 116))
    trace = mooncake_trace(tmp_path / "t.jsonl", [(0.0, a, 2), (2.0, other, 400), (3.5, [*a, 300], 2)])
    r = linear_run(
        placement={**pd(1, 1), "pd_disaggregation": None},
        workload={"type": "trace", "trace": trace, "arrivals": "trace", "max_response_length": 1000},
        algorithm={"advantage": "distillation", "n_samples_per_prompt": 1, "rollout_batch_size": 3},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 8},
        rollout__routing={"type": "mooncake", "prefill_tokens_per_s": 100.0, "transfer_tokens_per_s": 1e9},
        rollout__engine={"max_total_num_tokens": 10_000},
        simulation__engine_costs=COSTS,
        run__num_rollout=1,
    )
    ((t, fetch),) = r.of(do.FetchPrefix)
    assert (fetch.source, fetch.engine, fetch.tokens) == (0, 1, 2048)
    last = next(e for _, e, _ in r.turns() if e.prompt_tokens == 5 * 512)
    assert (last.cached_tokens, last.started_t) == (0, t)
    assert replayed(r.scenario, r.records) > 0
