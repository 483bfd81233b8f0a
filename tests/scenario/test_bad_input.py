"""Broken files: every one is refused with file, line, key, reason and the nearest thing that works.

Each row has the whole message. That its line is right is checked against the file itself, and that the nearest thing
works by following it: with the overrides of the last column the file loads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.scenario.errors import ScenarioError
from testbed.scenario.load import load_scenario

FOLDER = Path(__file__).parent.parent / "data" / "broken"


@dataclass(frozen=True)
class Broken:
    file: str
    message: tuple[str, ...]
    fix: tuple[str, ...] = ()
    """Overrides that follow the message; empty where a line must go or the text is no YAML."""


CASES = (
    Broken(
        "abort_starves",
        (
            "abort_starves.yaml:26: weights.transition.pause_generation_mode: `abort` with `fully_async` "
            "starves: every update throws away the replies in flight, and long ones never end (nearest: "
            "weights.transition.pause_generation_mode: retract)",
        ),
        ("weights.transition.pause_generation_mode=retract",),
    ),
    Broken(
        "action_without_bound",
        (
            "action_without_bound.yaml:24: experience.staleness.action: `retry` never acts: without a bound "
            "nothing is too old (nearest: experience.staleness.bound: 1)",
        ),
        ("experience.staleness.bound=1",),
    ),
    Broken(
        "all_warm_up",
        (
            "all_warm_up.yaml:23: run.warmup_steps: all 3 steps are warm-up, nothing is left to average "
            "(nearest: run.warmup_steps: 2, or run.num_rollout: 4)",
        ),
        ("run.warmup_steps=2",),
    ),
    Broken(
        "broadcast_within_gpus",
        (
            "broadcast_within_gpus.yaml:23: weights.path.update_weight_transfer_mode: `broadcast` on a "
            "colocated placement: it needs engines on other GPUs than the trainer's (nearest: "
            "weights.path.update_weight_transfer_mode: cuda_ipc)",
        ),
        ("weights.path.update_weight_transfer_mode=cuda_ipc",),
    ),
    Broken(
        "colocated_async",
        (
            "colocated_async.yaml:21: rollout.admission.type: `fully_async` generates while the trainer works, "
            "but a colocated pool cannot generate while it trains (nearest: placement: {mode: disaggregated, "
            "rollout_num_gpus: 8, actor_num_gpus: 8, rollout_num_gpus_per_engine: 2} with "
            "weights.path.update_weight_transfer_mode: broadcast, or rollout.admission: {type: sync})",
        ),
        (
            "placement={mode: disaggregated, rollout_num_gpus: 8, actor_num_gpus: 8, rollout_num_gpus_per_engine: 2}",
            "weights.path.update_weight_transfer_mode=broadcast",
        ),
    ),
    Broken(
        "cuda_ipc_across_gpus",
        (
            "cuda_ipc_across_gpus.yaml:24: weights.path.update_weight_transfer_mode: `cuda_ipc` on a "
            "disaggregated placement: it hands over GPU memory, so trainer and engine must share the GPU "
            "(nearest: weights.path.update_weight_transfer_mode: broadcast)",
        ),
        ("weights.path.update_weight_transfer_mode=broadcast",),
    ),
    Broken(
        "deadlock_insert",
        (
            "deadlock_insert.yaml:24: experience.buffer.async_data_buffer_capacity_factor: deadlock: a buffer "
            "of floor(0.9 x 32) = 28 groups never holds a batch of 32 (nearest: "
            "experience.buffer.async_data_buffer_capacity_factor: 1)",
        ),
        ("experience.buffer.async_data_buffer_capacity_factor=1",),
    ),
    Broken(
        "deadlock_over_sampling",
        (
            "deadlock_over_sampling.yaml:24: experience.buffer.max_buffered_groups: a round starts "
            "1.5 x 32 = 48 groups and each reserves a slot; there are 40 (nearest: "
            "experience.buffer.max_buffered_groups: 48)",
        ),
        ("experience.buffer.max_buffered_groups=48",),
    ),
    Broken(
        "deadlock_store",
        (
            "deadlock_store.yaml:24: experience.buffer.max_buffered_groups: deadlock: 32 groups per batch x "
            "(bound 3 + 1) = 128 slots are needed, there are 64 (nearest: "
            "experience.buffer.max_buffered_groups: 128, or experience.staleness.bound: 1)",
        ),
        ("experience.staleness.bound=1",),
    ),
    Broken(
        "duplicate_key",
        ("duplicate_key.yaml:5: cluster.nodes: given twice in one section (first in line 4)",),
        (),
    ),
    Broken(
        "empty",
        ("empty.yaml:1: the file is empty",),
        (),
    ),
    Broken(
        "empty_section",
        ("empty_section.yaml:13: algorithm: the section is empty (nearest: leave the line out to take the defaults)",),
        ("algorithm={}",),
    ),
    Broken(
        "engines_do_not_divide",
        (
            "engines_do_not_divide.yaml:18: placement.rollout_num_gpus: 9 GPUs are not a whole number of "
            "engines of 2 GPUs (nearest: placement.rollout_num_gpus_per_engine: 1)",
        ),
        ("placement.rollout_num_gpus_per_engine=1",),
    ),
    Broken(
        "experts_of_a_dense_model",
        (
            "experts_of_a_dense_model.yaml:28: training.expert_parallel: Qwen3-8B has no experts to split "
            "(nearest: training.expert_parallel: 1)",
        ),
        ("training.expert_parallel=1",),
    ),
    Broken(
        "flag_of_another_system",
        ("flag_of_another_system.yaml:18: placement.colocate: unknown key (nearest: placement.mode: colocated)",),
        (),
    ),
    Broken(
        "gpus_do_not_add_up",
        (
            "gpus_do_not_add_up.yaml:18: placement.rollout_num_gpus: the placement asks for 8 + 12 = 20 GPUs, "
            "the cluster has 16 (2 x 8) (nearest: cluster.nodes: 3, or placement: {rollout_num_gpus: 6, "
            "actor_num_gpus: 10})",
        ),
        ("placement={rollout_num_gpus: 6, actor_num_gpus: 10}",),
    ),
    Broken(
        "group_never_in_flight",
        (
            "group_never_in_flight.yaml:23: rollout.concurrency.max_concurrent: 4 turns at once are fewer than "
            "the 8 members of a group, which could never be in flight (nearest: "
            "rollout.concurrency.max_concurrent: 8)",
        ),
        ("rollout.concurrency.max_concurrent=8",),
    ),
    Broken(
        "heads_do_not_split",
        (
            "heads_do_not_split.yaml:21: placement.rollout_num_gpus_per_engine: 32 query heads and 8 KV heads "
            "of Qwen3-8B do not split over 3 GPUs (nearest: placement.rollout_num_gpus_per_engine: 1)",
        ),
        ("placement.rollout_num_gpus_per_engine=1",),
    ),
    Broken(
        "in_place_flush",
        (
            "in_place_flush.yaml:27: weights.transition.kv: `in_place` goes on with the KV it has, and `flush` "
            "is refused by an engine that still holds a batch (nearest: {pause_generation_mode: in_place, kv: "
            "salt_by_version}, or {pause_generation_mode: retract, kv: flush})",
        ),
        ("weights.transition={pause_generation_mode: in_place, kv: salt_by_version}",),
    ),
    Broken(
        "infinite",
        ("infinite.yaml:2: simulation.max_simulated_s: expected a number > 0, in seconds, got `.inf`",),
        ("simulation.max_simulated_s=1e9",),
    ),
    Broken(
        "key_in_the_wrong_section",
        (
            "key_in_the_wrong_section.yaml:4: cluster.max_response_length: unknown key (nearest: "
            "workload.max_response_length)",
        ),
        (),
    ),
    Broken(
        "key_of_another_system",
        (
            "key_of_another_system.yaml:23: rollout.max_weight_staleness: unknown key (nearest: "
            "experience.staleness.bound)",
        ),
        (),
    ),
    Broken(
        "key_of_another_type",
        (
            "key_of_another_type.yaml:22: rollout.admission.max_head_offpolicyness: unknown key (nearest: "
            "`max_head_offpolicyness` belongs to rollout.admission with type: bounded)",
        ),
        (),
    ),
    Broken(
        "list",
        ("list.yaml:1: expected sections (`name: value` lines) at the top level",),
        (),
    ),
    Broken(
        "longer_than_the_pool",
        (
            "longer_than_the_pool.yaml:23: rollout.engine.max_total_num_tokens: prompt 512 + "
            "max_response_length 8192 = 8704 tokens are more than the 8192 KV slots of one engine (nearest: "
            "rollout.engine.max_total_num_tokens: 8704)",
        ),
        ("rollout.engine.max_total_num_tokens=8704",),
    ),
    Broken(
        "longer_than_the_window",
        (
            "longer_than_the_window.yaml:12: workload.max_response_length: prompt 512 + max_response_length "
            "8192 = 8704 tokens are more than the context window of 8192 (nearest: "
            "rollout.engine.context_length: 8704, or workload.max_response_length: 7680)",
        ),
        ("workload.max_response_length=7680",),
    ),
    Broken(
        "mean_above_the_cap",
        (
            "mean_above_the_cap.yaml:11: workload.reply.mean: a mean of 9000 tokens after the cut at "
            "max_response_length 8192 cannot be (nearest: workload.max_response_length: 36000)",
        ),
        ("workload.max_response_length=36000",),
    ),
    Broken(
        "missing_config",
        (
            "missing_config.yaml:7: model.path: can't read the model's config model/config.json: No such file "
            "or directory (nearest: a preset: Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B, Qwen3-8B)",
        ),
        ("model={type: preset, name: Qwen3-8B}",),
    ),
    Broken(
        "missing_key",
        ("missing_key.yaml:2: cluster.nodes: missing; cluster needs it (nearest: nodes: 8)",),
        ("cluster.nodes=8",),
    ),
    Broken(
        "missing_rule",
        (
            "missing_rule.yaml:23: weights.transition: missing; weights needs it (what happens to requests in "
            "flight and to old KV is declared before an update) (nearest: transition: {pause_generation_mode: "
            "retract, kv: flush})",
        ),
        ("weights.transition={pause_generation_mode: retract, kv: flush}",),
    ),
    Broken(
        "missing_section",
        (
            "missing_section.yaml:1: weights: missing; the scenario needs it (an update without a declared "
            "rule is refused) (nearest: weights: {path: {type: fixed, update_weight_transfer_mode: broadcast}, "
            "transition: {pause_generation_mode: retract, kv: flush}})",
        ),
        (
            "weights={path: {type: fixed, update_weight_transfer_mode: broadcast}, "
            "transition: {pause_generation_mode: retract, kv: flush}}",
        ),
    ),
    Broken(
        "missing_sessions",
        ("missing_sessions.yaml:10: workload.path: no such file: cut_sesions.jsonl (nearest: cut_sessions.jsonl)",),
        (),
    ),
    Broken(
        "missing_trace",
        (
            "missing_trace.yaml:10: workload.prompt.trace: no bundled trace and no file is called "
            "`mooncake_conversations`; bundled: azure_conv, azure_code, mooncake_conversation, "
            "mooncake_synthetic (nearest: mooncake_conversation)",
        ),
        ("workload.prompt.trace=mooncake_conversation",),
    ),
    Broken(
        "missing_type",
        (
            "missing_type.yaml:22: rollout.admission.type: missing; one of sync, one_step_ahead, bounded, "
            "fully_async, over_sampling (nearest: type: bounded)",
        ),
        ("rollout.admission.type=bounded",),
    ),
    Broken(
        "negative",
        ("negative.yaml:4: cluster.nodes: expected a whole number > 0, got `-2` (nearest: 1)",),
        ("cluster.nodes=2",),
    ),
    Broken(
        "no_measured_steps",
        (
            "no_measured_steps.yaml:20: simulation.engine_costs.type: no measured step times for Qwen3-8B on "
            "engines of 4 H100; the table has 1, 2 (nearest: placement.rollout_num_gpus_per_engine: 2, or "
            "pip install 'rl-testbed[tables]', or simulation.engine_costs: {type: analytic})",
        ),
        ("simulation.engine_costs={type: analytic}",),
    ),
    Broken(
        "no_variance",
        (
            "no_variance.yaml:24: experience.selection.filter_zero_variance: groups of 1 have no variance to filter by "
            "(nearest: algorithm.n_samples_per_prompt: 8, or experience.selection.filter_zero_variance: false)",
        ),
        ("algorithm.n_samples_per_prompt=8",),
    ),
    Broken(
        "not_requantized",
        (
            "not_requantized.yaml:23: weights.requantize: bf16 weights reach engines that serve fp8: they must "
            "be converted (nearest: weights.requantize: fp8)",
        ),
        (
            "weights.requantize=fp8",
            "simulation.engine_costs={type: analytic}",
        ),
    ),
    Broken(
        "not_whole",
        ("not_whole.yaml:4: cluster.nodes: expected a whole number > 0, got `2.5` (nearest: 2)",),
        ("cluster.nodes=2",),
    ),
    Broken(
        "nvfp4_with_bf16",
        (
            "nvfp4_with_bf16.yaml:23: training.precision: nvfp4 engines go with nvfp4 training, not bf16: this is "
            "not the NVFP4 recipe (miles-nvfp4), whose training forward is NVFP4 too (nearest: training.precision: "
            "nvfp4, or rollout.engine.weight_precision: bf16 with weights.requantize: none)",
        ),
        (
            "training.precision=nvfp4",
            "simulation.engine_costs={type: analytic}",
        ),
    ),
    Broken(
        "percent_for_share",
        (
            "percent_for_share.yaml:23: rollout.engine.mem_fraction_static: expected a share above 0 and below "
            "1, got `85` (nearest: 0.85)",
        ),
        ("rollout.engine.mem_fraction_static=0.85",),
    ),
    Broken(
        "phases_do_not_fit",
        (
            "phases_do_not_fit.yaml:19: placement.switch.offload: without offload both phases stay in memory: "
            "68.0 GB of an engine + 32.8 GB of trainer state per GPU are more than the 80 GB of H100 (nearest: "
            "placement.switch.offload: true, or rollout.engine.mem_fraction_static: 0.59)",
        ),
        ("rollout.engine.mem_fraction_static=0.59",),
    ),
    Broken(
        "poisson_without_rate",
        (
            "poisson_without_rate.yaml:8: workload: `arrival_rate_per_s` belongs to `arrivals: poisson`, and "
            "only there (nearest: arrivals: poisson with arrival_rate_per_s: 4.0, or arrivals: closed without "
            "it)",
        ),
        ("workload.arrival_rate_per_s=4.0",),
    ),
    Broken(
        "reuse_beyond_bound",
        (
            "reuse_beyond_bound.yaml:24: experience.selection.use_count: use 2 of a group comes 1 or more "
            "versions after the first, beyond the bound 0 (nearest: experience.staleness.bound: 1, or "
            "experience.selection.use_count: 1)",
        ),
        ("experience.staleness.bound=1",),
    ),
    Broken(
        "study_as_scenario",
        (
            "study_as_scenario.yaml:1: study: this is a study (a base and its variants), not a scenario "
            "(nearest: a scenario is what a study has under `base`)",
        ),
        (),
    ),
    Broken(
        "tab",
        ("tab.yaml:4: a tab indents this line; YAML wants spaces",),
        (),
    ),
    Broken(
        "too_few_tasks",
        (
            "too_few_tasks.yaml:13: workload.num_tasks: 16 tasks never fill a batch of 32 groups (nearest: "
            "workload.num_tasks: 32, or algorithm.rollout_batch_size: 16)",
        ),
        ("workload.num_tasks=32",),
    ),
    Broken(
        "trainer_does_not_divide",
        (
            "trainer_does_not_divide.yaml:28: training.tensor_parallel: tensor_parallel 4 x pipeline_parallel "
            "3 = 12 does not divide the trainer's 8 GPUs (nearest: training.pipeline_parallel: 2)",
        ),
        ("training.pipeline_parallel=2",),
    ),
    Broken(
        "trainer_does_not_fit",
        (
            "trainer_does_not_fit.yaml:28: training.sharding: the trainer's state takes 245.7 GB of each of 8 "
            "GPUs; H100 has 80 GB (nearest: training.sharding: zero3)",
        ),
        ("training.sharding=zero3",),
    ),
    Broken(
        "true_for_number",
        ("true_for_number.yaml:15: algorithm.rollout_batch_size: expected a whole number > 0, got `true`",),
        ("algorithm.rollout_batch_size=1",),
    ),
    Broken(
        "two_needs_one",
        (
            "two_needs_one.yaml:11: workload.reply: give exactly one of `sigma` and `capped_share` (nearest: "
            "sigma: 1.0)",
        ),
        ("workload.reply.sigma=1.0",),
    ),
    Broken(
        "two_rates",
        (
            "two_rates.yaml:28: training.cost: both samples_per_s and tokens_per_s are given (nearest: "
            "training.cost: {type: rate, samples_per_s: 2.75})",
        ),
        ("training.cost.tokens_per_s=null",),
    ),
    Broken(
        "two_throttles",
        (
            "two_throttles.yaml:22: rollout.admission.async_max_concurrent_groups: two throttles on one "
            "resource: 32 groups x 8 here, and 128 turns in rollout.concurrency (nearest: rollout.concurrency: "
            "{type: unlimited}, or rollout.admission: {type: fully_async})",
        ),
        ("rollout.concurrency={type: unlimited}",),
    ),
    Broken(
        "unclosed_brace",
        (
            "unclosed_brace.yaml:11: broken YAML while parsing a flow mapping that begins in line 10: expected "
            "',' or '}', but got ':'",
        ),
        (),
    ),
    Broken(
        "unknown_gpu",
        ("unknown_gpu.yaml:3: cluster.gpu: `H1000` is not one of A100, H100, H200, B200, H20, CPU (nearest: H100)",),
        ("cluster.gpu=H100",),
    ),
    Broken(
        "unknown_key",
        (
            "unknown_key.yaml:16: placement.actor_num_gpus: missing; placement needs it (nearest: actor_num_gpus: 24)",
            "unknown_key.yaml:19: placement.actor_gpus: unknown key (nearest: placement.actor_num_gpus)",
        ),
        (),
    ),
    Broken(
        "unknown_model",
        ("unknown_model.yaml:7: model.name: no model of the catalogue is called 'Qwen3-9B' (nearest: Qwen3-8B)",),
        ("model.name=Qwen3-8B",),
    ),
    Broken(
        "unknown_section",
        ("unknown_section.yaml:13: algoritm: unknown key (nearest: algorithm)",),
        (),
    ),
    Broken(
        "unknown_type",
        (
            "unknown_type.yaml:22: rollout.admission.type: unknown type `fully_asynch`; one of sync, "
            "one_step_ahead, bounded, fully_async, over_sampling (nearest: fully_async)",
        ),
        ("rollout.admission.type=fully_async",),
    ),
    Broken(
        "unknown_value",
        (
            "unknown_value.yaml:26: weights.transition.pause_generation_mode: `recompute` is not one of "
            "finish, retract, in_place, abort (nearest: retract)",
        ),
        ("weights.transition.pause_generation_mode=retract",),
    ),
    Broken(
        "updates_do_not_divide",
        (
            "updates_do_not_divide.yaml:16: algorithm.num_steps_per_rollout: 32 groups x 8 = 256 trajectories "
            "do not divide into 3 updates (nearest: algorithm.num_steps_per_rollout: 2)",
        ),
        ("algorithm.num_steps_per_rollout=2",),
    ),
    Broken(
        "wait_for_the_freshest",
        (
            "wait_for_the_freshest.yaml:24: experience.selection.order.type: `wait` holds the publication "
            "until the oldest groups are used, and freshest_first leaves them for last (nearest: "
            "experience.selection.order: {type: oldest_first})",
        ),
        ("experience.selection.order={type: oldest_first}",),
    ),
    Broken(
        "wait_that_never_ends",
        (
            "wait_that_never_ends.yaml:24: experience.staleness.bound: `wait` with bound 0 never publishes: "
            "`fully_async` always has groups of the current version in flight (nearest: "
            "experience.staleness.bound: 1, or experience.staleness.action: drop)",
        ),
        ("experience.staleness.bound=1",),
    ),
    Broken(
        "waves_of_too_many",
        (
            "waves_of_too_many.yaml:25: weights.participation.size: waves of 8 engines, and there are 4 "
            "(nearest: weights.participation.size: 2)",
        ),
        ("weights.participation.size=2",),
    ),
    Broken(
        "weights_do_not_fit",
        (
            "weights_do_not_fit.yaml:20: placement.rollout_num_gpus_per_engine: Qwen3-32B in bf16 takes 65.5 "
            "GB; an engine of 1 H100 has 56.0 GB for weights and KV (mem_fraction_static 0.7) (nearest: "
            "placement.rollout_num_gpus_per_engine: 2)",
        ),
        ("placement.rollout_num_gpus_per_engine=2",),
    ),
    Broken(
        "word_for_section",
        (
            "word_for_section.yaml:22: rollout.admission: expected a section with `type:`, got `sync` "
            "(nearest: admission: {type: sync})",
        ),
        ("rollout.admission={type: sync}",),
    ),
    Broken(
        "wrong_dimension",
        ("wrong_dimension.yaml:25: weights.timeout_s: `3 GB` is a size; expected a number > 0, in seconds",),
        ("weights.timeout_s=3",),
    ),
    Broken(
        "wrong_type",
        (
            "wrong_type.yaml:15: algorithm.rollout_batch_size: expected a whole number > 0 (groups in a "
            "batch), got `many`",
        ),
        ("algorithm.rollout_batch_size=32",),
    ),
    Broken(
        "wrong_unit_bytes",
        (
            "wrong_unit_bytes.yaml:25: weights.update_weight_buffer_size: wrong unit: `512MB`; expected a "
            "whole number > 0, in bytes, as a plain number (nearest: 512000000)",
        ),
        ("weights.update_weight_buffer_size=512000000",),
    ),
    Broken(
        "wrong_unit_share",
        (
            "wrong_unit_share.yaml:23: rollout.engine.mem_fraction_static: wrong unit: `80%`; expected a share "
            "above 0 and below 1, as a plain number (nearest: 0.8)",
        ),
        ("rollout.engine.mem_fraction_static=0.8",),
    ),
    Broken(
        "wrong_unit_time",
        (
            "wrong_unit_time.yaml:25: weights.pause_overhead_s: wrong unit: `50 ms`; expected a number >= 0, "
            "in seconds, as a plain number (nearest: 0.05)",
        ),
        ("weights.pause_overhead_s=0.05",),
    ),
)

WITHOUT_KEY = {"empty", "list", "tab", "unclosed_brace", "missing_section"}
"""Messages about the whole file: no line of it has the key."""

NOT_WRITTEN = {
    "missing_key": "cluster:",
    "missing_rule": "weights:",
    "missing_type": "admission:",
    "no_measured_steps": "rollout_num_gpus_per_engine: 4",
    "not_requantized": "weight_precision: fp8",
    "nvfp4_with_bf16": "weight_precision: nvfp4",
}
"""The key is not in the file: the message shows its section or the key that it must agree with."""


def refusal(file: str, monkeypatch: pytest.MonkeyPatch) -> ScenarioError:
    monkeypatch.chdir(FOLDER)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(file)
    return caught.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_message(case: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(f"{case.file}.yaml", monkeypatch)
    assert str(error).split("\n") == list(case.message)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_line_has_the_key(case: Broken) -> None:
    lines = (FOLDER / f"{case.file}.yaml").read_text().split("\n")
    for message in case.message:
        match = re.match(r"(\w+\.yaml):(\d+): ([\w.]+)", message)
        assert match is not None and match[1] == f"{case.file}.yaml"
        if case.file in WITHOUT_KEY or (case.file == "unknown_key" and "missing" in message):
            continue
        word = NOT_WRITTEN.get(case.file, match[3].split(".")[-1])
        assert word in lines[int(match[2]) - 1]


@pytest.mark.parametrize("case", [c for c in CASES if c.fix], ids=lambda case: case.file)
def test_nearest_works(case: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    assert load_scenario(f"{case.file}.yaml", case.fix).overrides == tuple(case.fix)


def test_every_broken_file_is_a_case() -> None:
    assert {p.stem for p in FOLDER.glob("*.yaml")} == {c.file for c in CASES} | {"cut_sessions", "missing_sessions"}


def test_cut_sessions_names_the_line_of_the_data_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second line of the JSON-lines file ends in the middle of an object."""
    message = str(refusal("cut_sessions.yaml", monkeypatch))
    assert message.startswith("cut_sessions.jsonl:2: workload.path: not a complete JSON object: ")


def test_missing_sessions_names_the_file_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    message = str(refusal("missing_sessions.yaml", monkeypatch))
    assert message == (
        "missing_sessions.yaml:10: workload.path: no such file: cut_sesions.jsonl (nearest: cut_sessions.jsonl)"
    )


def test_no_such_file_names_the_one_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(refusal("tabs.yaml", monkeypatch)) == "tabs.yaml: no such file (nearest: tab.yaml)"


def test_all_faults_of_one_file_are_reported_at_once(tmp_path: Path) -> None:
    text = (FOLDER / "unknown_gpu.yaml").read_text().replace("nodes: 2", "nodes: two").replace("mean: 2000", "mean: 2k")
    (tmp_path / "three.yaml").write_text(text)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(tmp_path / "three.yaml")
    assert [(fault.key, fault.where.rsplit(":", 1)[1]) for fault in caught.value.faults] == [
        ("cluster.gpu", "3"),
        ("cluster.nodes", "4"),
        ("workload.reply.mean", "11"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("binary.yaml", b"name: \xff\xfe\n", "binary.yaml:1: not UTF-8 text"),
        ("nul.yaml", b"name: x\nquestion: \x00\n", "nul.yaml:2: character U+0000 is not allowed"),
        ("loop.yaml", b"cluster: &a\n  nodes: *a\n", "loop.yaml:1: cluster.nodes: an alias that contains itself"),
        ("two.yaml", b"name: a\n---\nname: b\n", "two.yaml:2: broken YAML expected a single document"),
        ("nokey.yaml", b"name: a\ncluster:\n  null: 3\n", "nokey.yaml:3: cluster: a key must be a word"),
        ("deep.yaml", b"name: " + b"[" * 3000, "deep.yaml:1: nested too deeply to be read"),
        ("object.yaml", b"name: !!python/name:os.system\n", "object.yaml:1: name: `` cannot be read as"),
    ],
)
def test_strange_bytes(
    name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in the file, the answer is a message with its line, not a traceback."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(name)
    assert str(caught.value).startswith(message)
