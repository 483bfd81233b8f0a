"""Random scenarios and random backends for property tests: every policy the core asks, with failures, losses and
silence.

`random_scenario` chooses settings that the scenario rules accept; `random_run` gives it durations, faults and a data
source. Both are functions of a seeded generator, so a failing seed is a test case."""

from __future__ import annotations

import random
from typing import Any

from testbed.scenario import Scenario
from tests.support.scenarios import BASE, COLOCATED, scenario
from tests.support.scripted import Scripted

ADMISSIONS: tuple[dict[str, Any], ...] = (
    {"type": "sync"},
    {"type": "one_step_ahead"},
    {"type": "bounded", "max_head_offpolicyness": 0},
    {"type": "bounded", "max_head_offpolicyness": 1},
    {"type": "bounded", "max_head_offpolicyness": 3},
    {"type": "fully_async", "async_max_concurrent_groups": 3, "submission_granularity": "group"},
    {"type": "fully_async", "async_max_concurrent_groups": 2, "submission_granularity": "sample"},
    {"type": "over_sampling", "over_sampling_ratio": 1.5},
    {"type": "over_sampling", "over_sampling_ratio": 1.5, "long_rounds": False},
    {"type": "over_sampling", "over_sampling_ratio": 2.0, "long_rounds": False, "partial_rollout": True},
)
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"placement": {"mode": "disaggregated", "rollout_num_gpus": 3, "actor_num_gpus": 1}},
    COLOCATED,
    {"placement": {"mode": "hybrid", "rollout_num_gpus": 2, "actor_num_gpus": 2}},
)
BUFFERS: tuple[dict[str, Any], ...] = (
    {"type": "insert_when_ready"},
    {"type": "insert_when_ready", "async_data_buffer_capacity_factor": 1.0},
    {"type": "insert_when_ready", "async_data_buffer_capacity_factor": 1.0, "put_when_full": "drop_oldest"},
    {"type": "store_then_ready"},
)
RULES: tuple[tuple[str, str], ...] = tuple(
    (mode, kv)
    for mode in ("finish", "retract", "in_place", "abort")
    for kv in ("flush", "salt_by_version", "keep")
    if (mode, kv) != ("in_place", "flush")
)


PROGRAMS: tuple[dict[str, Any], ...] = (
    {},
    {"pause_reasoning": "next_tool", "restore_order": "best_fit", "tick_order": "restore_first", "prepare_ahead": 0},
    {"acting_half_life_s": None, "forced_restore_s": 12.0, "pause_to": 0.7, "prepare_ahead": None},
    {"decay": "restore", "reserve_tokens": 30, "count_shared_prompts_once": True, "prepare_ahead": 1},
)


def random_scenario(r: random.Random) -> Scenario:
    changes = dict(r.choice(PLACEMENTS))
    shared = changes.get("placement", {}).get("mode") == "colocated"
    admission = r.choice([a for a in ADMISSIONS if not shared or a["type"] in ("sync", "over_sampling")])
    advantage = r.choice(("group", "group", "critic", "distillation", "group_with_distillation"))
    if admission.get("partial_rollout") and not advantage.startswith("group"):
        advantage = "group"
    order = r.choice(("fifo", "freshest_first", "oldest_first", "windowed_fifo"))
    if admission.get("partial_rollout") and order == "oldest_first":
        order = "fifo"
    bound = r.choice((None, None, 0, 1, 2))
    action = "drop" if bound is None else r.choice(("drop", "retry", "wait", "mask", "correct", "none"))
    if action == "wait" and admission.get("partial_rollout"):
        action = "correct"
    if action == "wait":
        bound, order = max(bound, 1), "fifo" if order == "freshest_first" else order
    events = {"drop": ("completion", "publication"), "wait": (), "none": ()}
    events["retry"] = events["drop"]
    event = r.choice(("dequeue", "dequeue", *events.get(action, ("completion",))))
    uses = 1 if bound == 0 and action in ("drop", "retry") else r.choice((1, 1, 2))
    roles = {"teacher": r.choice(("external", "trainer")), "critic": r.choice(("external", "trainer"))}
    changes["placement"] = changes.get("placement", BASE["placement"]) | {"roles": roles}
    mode, kv = r.choice(RULES)
    path = "cuda_ipc" if shared else r.choice(("broadcast", "p2p", "disk"))
    changes.update(
        rollout__admission=admission,
        rollout__concurrency=r.choice(({"type": "unlimited"}, {"type": "per_engine", "max_concurrent_per_engine": 2})),
        rollout__routing={"type": r.choice(("least_load", "random", "round_robin", "session_affinity"))},
        algorithm={
            "advantage": advantage,
            "n_samples_per_prompt": 2,
            "rollout_batch_size": 2,
            "kl_coef": r.choice((0.0, 0.1)),
            "recompute_old_log_probs": r.random() < 0.3,
            "num_steps_per_rollout": r.choice((1, 2)),
        },
        experience={
            "buffer": r.choice(BUFFERS),
            "staleness": {"bound": bound, "action": action, "event": event},
            "selection": {
                "order": {"type": order},
                "use_count": uses,
                "filter_zero_variance": advantage.startswith("group") and r.random() < 0.3,
            },
        },
        weights={
            "path": {"type": "fixed", "update_weight_transfer_mode": path},
            "transition": {"pause_generation_mode": mode, "kv": kv},
            "participation": r.choice(({"type": "all"}, {"type": "waves", "size": 1})),
            "on_failure": r.choice(("keep_old_version", "remove_engine", "retry")),
            "requantize": r.choice(("none", "fp8")),
            "timeout_s": 60.0,
        },
        workload__rewards={"stage": r.choice(("streaming", "serial"))},
        run__num_rollout=r.randint(2, 4),
    )
    if r.random() < 0.4:
        changes["rollout__routing"] = {"type": "session_affinity"}
        forced = {"forced_restore_s": 12.0} if order == "oldest_first" else {}
        changes["rollout__programs"] = {"type": "thunder_agent", "tick_s": 3.0} | r.choice(PROGRAMS) | forced
    if advantage.startswith("group") and r.random() < 0.3:
        changes["rollout__redundant_members"] = 1
    if r.random() < 0.3:
        changes["rollout__turn_order"] = {"type": "group_length"}
    return scenario(**changes)


def random_run(r: random.Random, config: Scenario, *, faults: bool = True) -> Scripted:
    """A backend with random durations; with `faults`, engines come and go, and steps of an update fail or hang."""
    backend = Scripted(
        config,
        turn=lambda a: r.choice((1.0, 5.0, 10.0, 30.0)),
        turns=r.choice((1, 1, 3)),
        environments=r.random() < 0.3,
        environment=r.choice((0.0, 20.0)),
        reward=lambda a: r.choice((0.5, 2.0)),
        values=lambda i: float(r.random() < 0.5),
        train=r.choice((1.0, 8.0)),
        prepare=r.choice((0.0, 2.0)),
        pause=r.choice((0.0, 0.5)),
        resume=r.choice((0.0, 0.3)),
        copy=lambda a: r.choice((0.5, 3.0)),
        tasks=r.choice((None, None, 9)),
        kv_tokens=r.choice((150, 400, 900)),
    )
    backend.early_release = config.weights.path.update_weight_transfer_mode == "disk"
    if not faults:
        return backend
    last = len(backend.core.layout.engines) - 1
    for _ in range(r.choice((0, 1, 1, 2))):
        engine, t = r.randint(min(1, last), last), r.uniform(1, 120)
        backend.lose(t, engine)
        if r.random() < 0.6:
            backend.join(t + r.uniform(1, 40), engine)
    failing, silent = r.choice((0.0, 0.0, 0.2)), r.choice((0.0, 0.0, 0.1))
    backend.fails = lambda a: r.random() < failing
    backend.drops = lambda a: type(a).__name__ != "PrepareWeights" and r.random() < silent
    backend.tool_fails = lambda a: r.random() < 0.1
    losing = r.choice((0.0, 0.05, 0.4))
    backend.turn_fails = lambda a: r.random() < losing
    return backend
