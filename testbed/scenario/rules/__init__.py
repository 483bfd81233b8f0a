"""Combinations that cannot work, each refused with the reason and the nearest one that works.

One small function a rule: it yields a `Fault` (key, what, nearest) or nothing. `RULES` is the list.
Nothing here reads the scenario file: `testbed.scenario.load` adds file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from testbed.scenario.catalogue import CatalogueError, gpu_spec, model_spec
from testbed.scenario.errors import Fault
from testbed.scenario.rules import flow, gpus, inputs, kv, memory, provenance, real, tasks, updates
from testbed.scenario.rules.context import Context
from testbed.scenario.scenario import Scenario

__all__ = ["REAL_RULES", "REMARKS", "RULES", "SIMULATION_RULES", "Context", "check", "remarks"]

Rule = Callable[[Context], Iterator[Fault]]

RULES: tuple[Rule, ...] = (
    memory.model_known,
    gpus.gpus_within_cluster,
    gpus.engines_divide_pools,
    gpus.engines_within_nodes,
    gpus.engine_splits_heads,
    gpus.trainer_split_divides,
    gpus.experts_split,
    gpus.batch_divides_into_updates,
    inputs.lengths_exist,
    inputs.files_exist,
    inputs.enough_tasks,
    flow.open_arrivals,
    flow.colocated_is_synchronous,
    flow.one_throttle,
    flow.programs_have_one_throttle,
    flow.programs_have_a_place,
    flow.every_program_comes_back,
    flow.redundant_members_are_compared,
    flow.order_needs_a_line,
    flow.taken_back_from_one_engine,
    flow.what_is_set_aside_is_not_waited_for,
    flow.concurrency_lets_a_group_run,
    flow.aimd_in_order,
    kv.routing_has_a_cache,
    kv.host_tier_has_a_cache,
    kv.prefill_and_decode_both_exist,
    kv.split_updates_at_once,
    kv.split_has_no_limit_per_engine,
    inputs.page_divides_chunk,
    memory.weights_fit_engine,
    memory.sequence_fits,
    kv.host_tier_is_the_larger,
    memory.trainer_fits,
    memory.phases_fit_together,
    memory.offload_fits_host,
    flow.buffer_holds_a_batch,
    flow.groups_with_variance,
    flow.reuse_within_bound,
    flow.staleness_action_can_act,
    flow.staleness_event_is_read,
    flow.waiting_ends,
    inputs.one_training_rate,
    updates.training_matches_engine,
    updates.gpu_has_precision,
    updates.requantized_as_served,
    updates.path_fits_placement,
    updates.in_place_keeps_kv,
    updates.abort_makes_progress,
    updates.waves_within_engines,
    inputs.steps_after_warmup,
    provenance.settings_are_keys,
)
"""Hold for both backends."""

SIMULATION_RULES: tuple[Rule, ...] = (inputs.table_knows_engine,)
"""Hold for the simulated backend alone; asked when the others are content."""

REAL_RULES: tuple[Rule, ...] = (
    real.denominator_is_computed,
    real.correction_exists,
    real.normal_length_is_read,
    real.reward_model_is_asked,
    real.eval_has_tasks,
    real.replay_has_experts,
    real.format_is_made_on_engines,
    real.heads_round_alike,
    real.one_trainer_split,
    kv.real_engines_do_both,
    kv.real_engines_keep_kv_on_the_gpu,
    kv.real_engines_fetch_no_kv,
    kv.real_engines_do_not_speculate,
    tasks.parts_are_told_apart,
    tasks.every_kind_has_a_teacher,
    tasks.sources_are_there,
    tasks.starts_follow_turns,
)
"""Hold for the real backend alone."""

REMARKS: tuple[Callable[[Context], Iterator[str]], ...] = (
    gpus.unused_gpus,
    gpus.ranks_without_data,
    inputs.data_ends_early,
    updates.formats_are_emulated,
)
"""Worth saying, but no reason to refuse."""


def _context(scenario: Scenario, base_dir: Path) -> Context:
    try:
        model = model_spec(scenario.model, base_dir)
    except CatalogueError:  # a fault of its own: see memory.model_known
        model = None
    return Context(scenario, base_dir, gpu_spec(scenario.cluster.gpu), model)


def check(scenario: Scenario, base_dir: Path, *, simulated: bool = True) -> list[Fault]:
    """Every reason why this scenario cannot run, without file and line. `base_dir`: what file names are relative to."""
    context = _context(scenario, base_dir)
    faults = [fault for rule in RULES for fault in rule(context)]
    if not faults:
        faults = [fault for rule in (SIMULATION_RULES if simulated else REAL_RULES) for fault in rule(context)]
    return faults


def remarks(scenario: Scenario, base_dir: Path) -> list[str]:
    """What a user should know about a scenario that does run."""
    context = _context(scenario, base_dir)
    return [remark for rule in REMARKS for remark in rule(context)]
