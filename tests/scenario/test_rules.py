"""Impossible combinations are refused, documented ones pass, and what a refusal suggests works."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.scenario import Scenario
from testbed.scenario.errors import Fault
from testbed.scenario.load import build, with_overrides
from testbed.scenario.rules import check, remarks
from testbed.scenario.source import Source, parse

HERE = Path(__file__).parent

SPLIT = parse(
    """
cluster: {gpu: H100, nodes: 2}
model: {type: preset, name: Qwen3-8B}
workload: {type: lengths, reply: {type: lognormal, mean: 2000, sigma: 1.0}, max_response_length: 8192}
algorithm: {n_samples_per_prompt: 8, rollout_batch_size: 32}
placement: {mode: disaggregated, rollout_num_gpus: 8, actor_num_gpus: 8}
rollout: {admission: {type: sync}}
weights:
  path: {type: fixed, update_weight_transfer_mode: broadcast}
  transition: {pause_generation_mode: retract, kv: flush}
""",
    "split.yaml",
)
TOGETHER = (
    "placement={mode: colocated, num_gpus: 16}",
    "weights.path.update_weight_transfer_mode=cuda_ipc",
)
ANALYTIC = "simulation.engine_costs={type: analytic}"
ASYNC = "rollout.admission={type: fully_async}"
PROGRAMS = "rollout.programs={type: thunder_agent}"
STICKY = "rollout.routing={type: session_affinity}"


def scenario(*overrides: str, base: Source = SPLIT) -> Scenario:
    return build(with_overrides(base, overrides, Scenario), Scenario)


def faults(*overrides: str) -> list[Fault]:
    return check(scenario(*overrides), HERE)


def keys(*overrides: str) -> list[str]:
    return [fault.key for fault in faults(*overrides)]


# --- what works -------------------------------------------------------------------------------------------------------

DOCUMENTED = {
    # Miles: train.py colocated; train_async.py one step ahead; --fully-async with its buffer
    "miles_colocated": TOGETHER,
    "miles_one_step_ahead": ("rollout.admission={type: one_step_ahead}",),
    "miles_fully_async": (
        ASYNC,
        "experience.buffer={type: insert_when_ready, async_data_buffer_capacity_factor: 2.0}",
        "experience.staleness={bound: 2, action: retry}",
    ),
    "miles_in_place": (ASYNC, "weights.transition={pause_generation_mode: in_place, kv: keep}"),
    "miles_p2p": (ASYNC, "weights.path.update_weight_transfer_mode=p2p"),
    "miles_disk_delta": (ASYNC, "weights.path.update_weight_transfer_mode=disk_delta"),
    "miles_over_sampling": (*TOGETHER, "rollout.admission={type: over_sampling, over_sampling_ratio: 2.0}"),
    # NeMo RL: window of 1 version, buffer of prompts x (1 + 1), slots reserved at dispatch
    "nemo_rl_single_controller": (
        "rollout.admission={type: bounded, max_head_offpolicyness: 1}",
        "experience.buffer={type: store_then_ready, max_buffered_groups: 64}",
        "experience.selection.order={type: windowed_fifo, window: 1}",
        "experience.staleness.bound=1",
    ),
    # AReaL: eta 4, interrupt and recompute, oldest first
    "areal": (
        "rollout.admission={type: bounded, max_head_offpolicyness: 4}",
        "experience.selection.order={type: oldest_first}",
        "experience.staleness={bound: 4, action: correct}",
    ),
    # prime-rl: concurrency by KV pressure, at most 8 versions off policy
    "prime_rl": (
        ASYNC,
        "rollout.concurrency={type: kv_aimd}",
        "experience.staleness.bound=8",
        "weights.path.update_weight_transfer_mode=disk",
    ),
    "thunder_agent": (ASYNC, PROGRAMS, STICKY),
    "thunder_agent_as_deployed": (
        ASYNC,
        STICKY,
        "rollout.programs={type: thunder_agent, decay: restore, reserve_tokens: 100, pause_reasoning: next_tool, "
        "count_shared_prompts_once: true, restore_order: best_fit, tick_order: restore_first, forced_restore_s: 1800}",
    ),
    "thunder_agent_colocated": (*TOGETHER, PROGRAMS, STICKY),
    "pipeline_rl": (ASYNC, "weights.transition={pause_generation_mode: in_place, kv: salt_by_version}"),
    "rollpacker": (*TOGETHER, "rollout.admission={type: over_sampling, over_sampling_ratio: 1.25}"),
    "dapo": (*TOGETHER, "experience.selection.filter_zero_variance=true"),
    "ppo_with_critic_and_reference": (*TOGETHER, "algorithm.advantage=critic", "algorithm.kl_coef=0.01"),
    "distillation": (ASYNC, "algorithm.advantage=distillation"),
    "hybrid": ("placement.mode=hybrid", ASYNC),
    "waves": (ASYNC, "weights.participation={type: waves, size: 2}"),
    "reuse": (ASYNC, "experience.selection.use_count=2", "experience.staleness.bound=1"),
    "finish_and_keep": (ASYNC, "weights.transition={pause_generation_mode: finish, kv: keep}"),
    "abort_when_synchronous": ("weights.transition={pause_generation_mode: abort, kv: flush}",),
    "open_arrivals": (ASYNC, "workload={arrivals: poisson, arrival_rate_per_s: 4.0}"),
    "trace_prompts": (ASYNC, "workload.prompt={type: trace, trace: azure_conv}"),
    "cheapest_path": (ASYNC, "weights.path={type: cheapest}"),
    "moe_235b": (
        "model.name=Qwen3-235B-A22B",
        "cluster.nodes=16",
        "placement={rollout_num_gpus: 64, actor_num_gpus: 64, rollout_num_gpus_per_engine: 8}",
        "training={tensor_parallel: 4, pipeline_parallel: 2, expert_parallel: 8}",
    ),
    "fp8_rollout": (ASYNC, "rollout.engine.weight_precision=fp8", "weights.requantize=fp8", ANALYTIC),
    "nvfp4_recipe": (
        "cluster.gpu=B200",
        "model.name=Qwen3-30B-A3B",
        "rollout.engine.weight_precision=nvfp4",
        "training.precision=nvfp4",
        "weights.requantize=nvfp4",
        ANALYTIC,
    ),
}


@pytest.mark.parametrize("overrides", DOCUMENTED.values(), ids=DOCUMENTED.keys())
def test_documented_combinations_pass(overrides: tuple[str, ...]) -> None:
    assert faults(*overrides) == []


# --- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "admission", "allowed"),
    [
        ((), "sync", True),
        ((), "fully_async", True),
        (TOGETHER, "sync", True),
        (TOGETHER, "over_sampling", True),
        (TOGETHER, "fully_async", False),
        (TOGETHER, "one_step_ahead", False),
        (("placement.mode=hybrid",), "fully_async", True),
    ],
)
def test_pl_05_placement_and_asynchrony_are_two_settings(
    placement: tuple[str, ...], admission: str, allowed: bool
) -> None:
    """Separate GPUs do not make a run asynchronous; a shared pool that generates while it trains is refused by name."""
    found = keys(*placement, f"rollout.admission={{type: {admission}}}")
    assert found == ([] if allowed else ["rollout.admission.type"])


@pytest.mark.parametrize(("eta", "allowed"), [(0, True), (1, False)])
def test_pl_05_bound_zero_is_synchronous(eta: int, allowed: bool) -> None:
    found = keys(*TOGETHER, f"rollout.admission={{type: bounded, max_head_offpolicyness: {eta}}}")
    assert found == ([] if allowed else ["rollout.admission.type"])


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (("placement={mode: colocated, num_gpus: 1}",), 1),
        (("placement={mode: colocated, num_gpus: 2}",), 2),
        (("placement={mode: colocated, num_gpus: 3}",), 3),
    ],
)
def test_pl_07_four_roles_on_fewer_gpus(overrides: tuple[str, ...], gpus: int) -> None:
    """Actor, critic, reference and teacher are four roles, not four GPUs."""
    run = scenario(
        *TOGETHER,
        *overrides,
        "model.name=Qwen3-0.6B",
        "algorithm.advantage=critic",
        "algorithm.kl_coef=0.1",
        "placement.roles.teacher=trainer",
    )
    assert check(run, HERE) == []
    assert run.placement.model_dump()["num_gpus"] == gpus


def test_pl_07_one_role_on_four_gpus() -> None:
    assert keys(*TOGETHER, "placement.num_gpus=4", "model.name=Qwen3-0.6B") == []


def test_pl_12_phases_that_do_not_fit_need_offload() -> None:
    """32.8e9 parameters x 16 B / 16 GPUs = 32.8 GB of trainer state; an engine reserves 0.85 x 80 = 68 GB more."""
    plan = (*TOGETHER, "model.name=Qwen3-32B", "placement.rollout_num_gpus_per_engine=4")
    assert keys(*plan, "placement.switch.offload=true") == []
    host = "cluster.host_memory_gb_per_node"  # 8 GPUs of a node leave 8 x 32.8 GB = 262.1 GB behind
    assert keys(*plan, f"{host}=263") == []
    assert keys(*plan, f"{host}=262") == [host]
    assert keys(*plan, "placement.switch.offload=false") == ["placement.switch.offload"]
    assert keys(*plan, "placement.switch.offload=false", "rollout.engine.mem_fraction_static=0.59") == []
    assert keys(*plan, "placement.switch.offload=false", "rollout.engine.mem_fraction_static=0.60") == [
        "placement.switch.offload"
    ]


def test_pl_12_a_critic_on_the_pool_needs_memory_too() -> None:
    """Two trained models of 32.8 GB a GPU: 65.6 + 0.3 x 80 is over 80, 32.8 + 24 is not."""
    plan = (
        *TOGETHER,
        "model.name=Qwen3-32B",
        "placement.rollout_num_gpus_per_engine=4",
        "rollout.engine.mem_fraction_static=0.3",
        "placement.switch.offload=false",
    )
    assert keys(*plan) == []
    assert keys(*plan, "algorithm.advantage=critic") == ["placement.switch.offload"]
    assert keys(*plan, "algorithm.advantage=critic", "placement.roles.critic=external") == []


def test_pl_13_gpus_of_the_placement_are_in_the_cluster() -> None:
    assert keys("placement.actor_num_gpus=9") == ["placement.rollout_num_gpus"]
    assert faults("placement.actor_num_gpus=7") == []
    assert remarks(scenario("placement.actor_num_gpus=7"), HERE) == ["the placement uses 15 of 16 GPUs; 1 are unused"]


@given(
    st.integers(1, 24), st.integers(1, 24), st.integers(1, 12), st.sampled_from([4, 6, 8]), st.sampled_from([4, 8, 16])
)
@settings(max_examples=60, deadline=None)
def test_suggested_engine_sizes_and_splits_work(
    rollout: int, actor: int, per: int, per_node: int, kv_heads: int
) -> None:
    """Following what the message about an engine's size suggests leaves no fault about engines or GPUs."""
    placement = (
        f"placement={{rollout_num_gpus: {rollout}, actor_num_gpus: {actor}, rollout_num_gpus_per_engine: {per}}}"
    )
    model = (
        "model={type: inline, num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 2048, "
        f"num_attention_heads: 16, num_key_value_heads: {kv_heads}, vocab_size: 32000}}"
    )
    overrides = [placement, model, ANALYTIC, f"cluster={{nodes: 12, gpus_per_node: {per_node}}}"]
    while found := faults(*overrides):
        assert len(overrides) < 8
        key, _, value = found[0].nearest.partition(": ")
        assert key == "placement.rollout_num_gpus_per_engine", found[0]
        overrides.append(f"{key}={value}")


def test_experts_divide_over_ranks() -> None:
    moe = ("model.name=Qwen3-30B-A3B", ANALYTIC)
    assert keys(*moe, "training.expert_parallel=8") == []
    assert faults(*moe, "training.expert_parallel=6")[0].nearest == "training.expert_parallel: 4"


@pytest.mark.parametrize(
    ("training", "nearest"),
    [
        ("{tensor_parallel: 3}", "training.tensor_parallel: 2"),
        ("{tensor_parallel: 4, context_parallel: 4}", "training.tensor_parallel: 2"),
        ("{tensor_parallel: 16}", "training.tensor_parallel: 8"),
    ],
)
def test_trainer_split_divides(training: str, nearest: str) -> None:
    """8 trainer GPUs: the largest split with no dimension above the given one, with the fewest changes."""
    found = faults(f"training={training}")
    assert [(f.key, f.nearest) for f in found] == [("training.tensor_parallel", nearest)]


# --- flow -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        (("rollout.admission={type: bounded, max_head_offpolicyness: 3}", "experience.staleness.bound=3"), 32 * 4),
        (("rollout.admission={type: bounded, max_head_offpolicyness: 3}", "experience.staleness.bound=1"), 32 * 2),
        ((ASYNC, "experience.staleness.bound=3"), 32 * 4),
        ((ASYNC,), 32),
        (("rollout.admission={type: one_step_ahead}", "experience.staleness.bound=1"), 32 * 2),
        (("experience.staleness.bound=3",), 32),
        (("rollout.admission={type: over_sampling, over_sampling_ratio: 1.3}",), 42),
    ],
)
def test_capacity_below_groups_per_batch_times_bound_plus_one_deadlocks(overrides: tuple[str, ...], least: int) -> None:
    """32 x (3 + 1) = 128 is the published example; synchronous runs hold one batch at most; ceil(1.3 x 32) = 42."""

    def found(slots: int) -> list[str]:
        return keys(*overrides, f"experience.buffer={{type: store_then_ready, max_buffered_groups: {slots}}}")

    assert found(least) == []
    assert found(least - 1) == ["experience.buffer.max_buffered_groups"]


def test_over_sampling_needs_more_slots_than_the_default() -> None:
    """Without a bound the default is one batch of slots, fewer than the 40 groups that a round of 1.25 x 32 starts."""
    found = faults("rollout.admission={type: over_sampling}", "experience.buffer={type: store_then_ready}")
    assert [(f.key, f.nearest) for f in found] == [
        ("experience.buffer.max_buffered_groups", "experience.buffer.max_buffered_groups: 40")
    ]


@pytest.mark.parametrize(("factor", "allowed"), [(1.0, True), (0.99, False), (2.0, True)])
def test_insert_when_ready_holds_one_batch(factor: float, allowed: bool) -> None:
    found = keys(f"experience.buffer={{type: insert_when_ready, async_data_buffer_capacity_factor: {factor}}}")
    assert found == ([] if allowed else ["experience.buffer.async_data_buffer_capacity_factor"])


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ((), "rollout.routing.type", "`least_load` would send its calls elsewhere"),
        ((STICKY, "rollout.concurrency={type: kv_aimd}"), "rollout.concurrency.type", "two throttles on one resource"),
        ((STICKY, "rollout.engine.disable_radix_cache=true"), "rollout.programs.type", "keeps none"),
        (
            (STICKY, "placement.pd_disaggregation={prefill_num_gpus: 4}"),
            "rollout.programs.type",
            "prefill and decode engines both hold it",
        ),
    ],
)
def test_ap_09_programs_need_one_place_and_one_throttle(overrides: tuple[str, ...], key: str, words: str) -> None:
    (found,) = faults(ASYNC, PROGRAMS, *overrides)
    assert found.key == key and words in found.what and found.nearest


PARTIAL = "rollout.admission={type: over_sampling, long_rounds: false, partial_rollout: true}"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("rollout.redundant_members=2", "algorithm.advantage=critic"), "rollout.redundant_members", "singly"),
        (("rollout.turn_order={type: group_length}",), "rollout.turn_order.type", "no order is left to choose"),
        ((PARTIAL, "algorithm.advantage=critic"), "rollout.admission.partial_rollout", "and then lack them"),
        (
            (PARTIAL, "experience.selection.order={type: oldest_first}"),
            "experience.selection.order.type",
            "deadlock: `oldest_first` waits",
        ),
        (
            (PARTIAL, "experience.staleness={bound: 1, action: wait}"),
            "experience.staleness.action",
            "deadlock: `wait` holds the publication",
        ),
        (
            (PARTIAL, "placement.pd_disaggregation={prefill_num_gpus: 4}"),
            "rollout.admission.partial_rollout",
            "a prompt between two is in none",
        ),
        (
            (ASYNC, PROGRAMS, STICKY, "experience.selection.order={type: oldest_first}"),
            "rollout.programs.forced_restore_s",
            "may never restore",
        ),
    ],
)
def test_tail_rules_that_cannot_work_are_refused(overrides: tuple[str, ...], key: str, words: str) -> None:
    (found,) = faults(*overrides)
    assert found.key == key and words in found.what and found.nearest


@pytest.mark.parametrize(
    "overrides",
    [
        (PARTIAL,),
        (*TOGETHER, PARTIAL),
        ("rollout.redundant_members=2",),
        ("rollout.turn_order={type: group_length}", "rollout.concurrency={type: fixed, max_concurrent: 64}"),
    ],
)
def test_tail_rules_that_work_pass(overrides: tuple[str, ...]) -> None:
    assert faults(*overrides) == []


@pytest.mark.parametrize(
    ("concurrency", "key"),
    [
        ("{type: fixed, max_concurrent: 8}", ""),
        ("{type: fixed, max_concurrent: 7}", "max_concurrent"),
        ("{type: per_engine, max_concurrent_per_engine: 1}", ""),
        ("{type: kv_aimd, max_inflight: 8, initial_inflight: 8}", ""),
        ("{type: kv_aimd, max_inflight: 7, initial_inflight: 7}", "max_inflight"),
        ("{type: kv_aimd, initial_inflight: 2000}", "initial_inflight"),
        ("{type: kv_aimd, grow_below_kv_usage: 0.9}", "grow_below_kv_usage"),
        ("{type: kv_aimd, trim_to: 0.9}", "trim_to"),
    ],
)
def test_concurrency_admits_a_group(concurrency: str, key: str) -> None:
    """8 members over 8 engines."""
    assert keys(ASYNC, f"rollout.concurrency={concurrency}") == ([f"rollout.concurrency.{key}"] if key else [])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("experience.staleness={bound: 1, action: wait}", ASYNC), ""),
        (("experience.staleness={bound: 0, action: wait}", ASYNC), "experience.staleness.bound"),
        (
            ("experience.staleness={bound: 0, action: wait}", "rollout.admission={type: one_step_ahead}"),
            "experience.staleness.bound",
        ),
        (("experience.staleness={bound: 0, action: wait}",), ""),
        (("experience.staleness={action: mask}", ASYNC), "experience.staleness.action"),
        (
            ("experience.staleness={action: mask, bound: 1, event: publication}", ASYNC),
            "experience.staleness.event",
        ),
        (("experience.staleness={action: wait, bound: 1, event: completion}", ASYNC), "experience.staleness.event"),
        (("experience.staleness={action: none}", ASYNC), ""),
        (("experience={selection: {use_count: 3}, staleness: {bound: 1}}", ASYNC), "experience.selection.use_count"),
        (
            (
                "experience={selection: {use_count: 3}, staleness: {bound: 1}}",
                ASYNC,
                "weights.update_weights_interval=2",
            ),
            "",
        ),
        (("weights.update_weights_interval=2",), ""),
    ],
)
def test_staleness_and_publication_reach_each_other(overrides: tuple[str, ...], key: str) -> None:
    assert keys(*overrides) == ([key] if key else [])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            ("algorithm.advantage=critic", "experience.selection.filter_zero_variance=true"),
            "experience.selection.filter_zero_variance",
        ),
        (
            ("workload.rewards.success_rate=0", "experience.selection.filter_zero_variance=true"),
            "experience.selection.filter_zero_variance",
        ),
        (
            (
                "workload={arrivals: poisson, arrival_rate_per_s: 1.0}",
                "rollout.admission={type: over_sampling}",
            ),
            "workload.arrivals",
        ),
        (("rollout.routing={type: cache_aware}", "rollout.engine.disable_radix_cache=true"), "rollout.routing.type"),
        (
            ("rollout.routing={type: dynamo_kv}", "rollout.engine.disable_radix_cache=true"),
            "rollout.routing.type",
        ),
        (("rollout.engine={page_size: 64, chunked_prefill_size: 100}",), "rollout.engine.chunked_prefill_size"),
        (("workload.reply={type: uniform, low: 20, high: 10}",), "workload.reply.low"),
        (("workload.turns={type: geometric, mean: 0.5}",), "workload.turns.mean"),
        (("workload.prompt={type: lognormal, mean: 500, capped_share: 0.1}",), "workload.prompt.capped_share"),
        (("workload.reply={mean: 700, capped_share: 0.1, sigma: null}",), "workload.reply.capped_share"),
        (("training.cost={type: rate}",), "training.cost"),
        (("run.num_rollout=1",), "run.warmup_steps"),
        (("workload={type: journal, run: no_such_run}",), "workload.run"),
        (("simulation.engine_costs={type: calibrated, profile: none.json}",), "simulation.engine_costs.profile"),
        (("model={type: config_json, path: none.json}",), "model.path"),
    ],
)
def test_other_impossible_settings(overrides: tuple[str, ...], key: str) -> None:
    """0.1 x 8192 tokens at the cap alone is a mean of 819, above 700."""
    assert keys(*overrides) == [key]


# --- KV ---------------------------------------------------------------------------------------------------------------

PD = "placement.pd_disaggregation={prefill_num_gpus: 4}"
TIER = "rollout.engine.hierarchical_cache"


@pytest.mark.parametrize(
    ("overrides", "key", "mended"),
    [
        ((PD,), "", ()),
        ((PD.replace("4", "8"),), "placement.pd_disaggregation.prefill_num_gpus", (PD.replace("4", "7"),)),
        (
            (PD.replace("4", "3"), "placement.rollout_num_gpus_per_engine=2"),
            "placement.pd_disaggregation.prefill_num_gpus",
            (PD,),
        ),
        (
            (PD, "weights.participation={type: waves, size: 2}"),
            "weights.participation.type",
            ("weights.participation={type: all}",),
        ),
        (
            (PD, "rollout.concurrency={type: per_engine, max_concurrent_per_engine: 8}"),
            "rollout.concurrency.type",
            ("rollout.concurrency={type: fixed, max_concurrent: 256}",),
        ),
        ((f"{TIER}={{}}",), "", ()),
        ((f"{TIER}={{hicache_ratio: 0.5}}",), f"{TIER}.hicache_ratio", (f"{TIER}={{hicache_ratio: 2}}",)),
        # 8 GPUs with 51.6 GB of KV each (0.85 x 80 - 16.4), ratio 5: 258 GB each of 2,048 / 8 = 256
        ((f"{TIER}={{hicache_ratio: 5}}",), f"{TIER}.hicache_ratio", (f"{TIER}={{hicache_ratio: 4.9}}",)),
        ((f"{TIER}={{hicache_size: 200}}",), "", ()),
        ((f"{TIER}={{hicache_size: 300}}",), f"{TIER}.hicache_size", (f"{TIER}={{hicache_size: 256}}",)),
        ((f"{TIER}={{}}", "rollout.engine.disable_radix_cache=true"), TIER, (f"{TIER}=null",)),
    ],
)
def test_where_kv_lives_and_travels(overrides: tuple[str, ...], key: str, mended: tuple[str, ...]) -> None:
    assert keys(*overrides) == ([key] if key else [])
    assert keys(*overrides, *mended) == []


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "path", "allowed"),
    [
        ("colocated", "cuda_ipc", True),
        ("colocated", "disk", True),
        ("colocated", "broadcast", False),
        ("colocated", "p2p", False),
        ("colocated", "disk_delta", False),
        ("disaggregated", "cuda_ipc", False),
        ("disaggregated", "broadcast", True),
        ("disaggregated", "p2p", True),
        ("disaggregated", "disk", True),
        ("disaggregated", "disk_delta", True),
        ("hybrid", "broadcast", True),
        ("hybrid", "cuda_ipc", True),
    ],
)
def test_paths_by_placement(placement: str, path: str, allowed: bool) -> None:
    where = TOGETHER if placement == "colocated" else (f"placement.mode={placement}",)
    found = faults(*where, f"weights.path.update_weight_transfer_mode={path}")
    assert [f.key for f in found] == ([] if allowed else ["weights.path.update_weight_transfer_mode"])


def test_cheapest_path_needs_one_that_exists() -> None:
    assert keys(*TOGETHER, "weights.path={type: cheapest}") == ["weights.path.among"]
    assert keys(*TOGETHER, "weights.path={type: cheapest, among: [broadcast, cuda_ipc]}") == []


@pytest.mark.parametrize(
    ("requests", "kv", "admission", "key"),
    [
        ("finish", "keep", "fully_async", ""),
        ("finish", "flush", "fully_async", ""),
        ("retract", "flush", "fully_async", ""),
        ("retract", "salt_by_version", "fully_async", ""),
        ("in_place", "keep", "fully_async", ""),
        ("in_place", "salt_by_version", "fully_async", ""),
        ("in_place", "flush", "fully_async", "weights.transition.kv"),
        ("abort", "flush", "sync", ""),
        ("abort", "flush", "one_step_ahead", ""),
        ("abort", "flush", "fully_async", "weights.transition.pause_generation_mode"),
        ("abort", "flush", "bounded", "weights.transition.pause_generation_mode"),
    ],
)
def test_as_09_what_happens_to_running_requests_is_a_setting(requests: str, kv: str, admission: str, key: str) -> None:
    """Continue with old KV, continue after recomputing it, or abort: each can be chosen where it can work."""
    found = keys(
        f"rollout.admission={{type: {admission}}}",
        f"weights.transition={{pause_generation_mode: {requests}, kv: {kv}}}",
    )
    assert found == ([key] if key else [])


MATRIX = {
    "bf16": {"bf16"},
    "fp8": {"bf16", "fp8"},
    "mxfp8": {"bf16", "mxfp8"},
    "nvfp4": {"nvfp4"},
}
"""Miles' documentation: engine weights -> allowed training forward."""

FLASH_AND_QAT = {"int8": {"bf16", "int8"}, "int4": {"int4"}}
"""FlashRL's INT8 rollouts, and the seeds' configuration A; Miles' INT4 quantisation-aware training."""


@pytest.mark.parametrize("engine", MATRIX)
@pytest.mark.parametrize("training", MATRIX)
def test_qm_08_precision_matrix(engine: str, training: str) -> None:
    """NVFP4 generation with BF16 training is not the NVFP4 recipe."""
    found = faults(
        "cluster.gpu=B200",
        f"rollout.engine.weight_precision={engine}",
        f"training.precision={training}",
        f"weights.requantize={'none' if engine in ('bf16', training) else engine}",
        ANALYTIC,
    )
    assert [f.key for f in found] == ([] if training in MATRIX[engine] else ["training.precision"])
    if (engine, training) == ("nvfp4", "bf16"):
        assert "not the NVFP4 recipe (miles-nvfp4)" in found[0].what
        assert found[0].nearest.startswith("training.precision: nvfp4")


@pytest.mark.parametrize(
    ("engine", "training", "requantize", "allowed"),
    [
        ("bf16", "bf16", "none", True),
        ("bf16", "bf16", "fp8", False),
        ("fp8", "bf16", "none", False),
        ("fp8", "bf16", "int8", False),
        ("fp8", "bf16", "fp8", True),
        ("int4", "int4", "none", True),
        ("int4", "int4", "int4", True),
        ("int4", "int4", "fp8", False),
    ],
)
def test_requantised_as_served(engine: str, training: str, requantize: str, allowed: bool) -> None:
    found = keys(
        f"rollout.engine.weight_precision={engine}",
        f"training.precision={training}",
        f"weights.requantize={requantize}",
        ANALYTIC,
    )
    assert found == ([] if allowed else ["weights.requantize"])


@pytest.mark.parametrize("engine", FLASH_AND_QAT)
@pytest.mark.parametrize("training", ["bf16", "int8", "int4"])
def test_qm_08_integers(engine: str, training: str) -> None:
    found = faults(
        f"rollout.engine.weight_precision={engine}",
        f"training.precision={training}",
        f"weights.requantize={engine}",
        ANALYTIC,
    )
    assert [f.key for f in found] == ([] if training in FLASH_AND_QAT[engine] else ["training.precision"])
    if (engine, training) == ("int4", "bf16"):
        assert "quantisation-aware" in found[0].what and "training.precision: int4" in found[0].nearest


@pytest.mark.parametrize(("gpu", "allowed"), [("B200", True), ("H100", False), ("H200", False), ("CPU", True)])
def test_block_formats_need_blackwell(gpu: str, allowed: bool) -> None:
    """A CPU emulates every format, and says so."""
    small = ("model.name=tiny-qwen3", "rollout.engine={max_total_num_tokens: 32768}") if gpu == "CPU" else ()
    overrides = (f"cluster.gpu={gpu}", "rollout.engine.weight_precision=mxfp8", "weights.requantize=mxfp8", ANALYTIC)
    assert keys(*overrides, *small) == ([] if allowed else ["rollout.engine.weight_precision"])
    said = [x for x in remarks(scenario(*overrides, *small), HERE) if "emulated" in x]
    assert len(said) == (gpu == "CPU") and all(x.startswith("mxfp8 on a CPU is emulated") for x in said)


# --- measured tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "nearest"),
    [
        (("placement.rollout_num_gpus_per_engine=4",), "placement.rollout_num_gpus_per_engine: 2, or "),
        (("cluster.gpu=B200",), "cluster.gpu: H100 or H200, or "),
        (("model.name=Qwen3-4B",), "model.name: "),
        (("rollout.engine.kv_cache_dtype=fp8",), ""),
    ],
)
def test_tables_that_lack_an_engine_name_the_nearest(overrides: tuple[str, ...], nearest: str) -> None:
    found = faults(*overrides)
    assert [f.key for f in found] == ["simulation.engine_costs.type"]
    assert nearest in found[0].nearest
    assert "simulation.engine_costs: {type: analytic}" in found[0].nearest
    assert check(scenario(*overrides), HERE, simulated=False) == []
    assert faults(*overrides, ANALYTIC) == []
