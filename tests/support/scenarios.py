"""Small scenarios for tests: `scenario(**changes)` with dotted keys over a two-engine base."""

from __future__ import annotations

import copy
from typing import Any

from testbed.scenario import Scenario

BASE: dict[str, Any] = {
    "name": "test",
    "cluster": {"gpu": "H100", "nodes": 1, "gpus_per_node": 4},
    "model": {"type": "preset", "name": "Qwen3-8B"},
    "workload": {
        "type": "lengths",
        "prompt": {"type": "fixed", "tokens": 100},
        "reply": {"type": "fixed", "tokens": 50},
        "max_response_length": 1000,
        "rewards": {"latency": {"type": "fixed", "seconds": 1.0}},
    },
    "algorithm": {"n_samples_per_prompt": 2, "rollout_batch_size": 2},
    "placement": {
        "mode": "disaggregated",
        "rollout_num_gpus": 2,
        "actor_num_gpus": 2,
        "rollout_num_gpus_per_engine": 1,
    },
    "rollout": {"admission": {"type": "sync"}},
    "weights": {
        "path": {"type": "fixed", "update_weight_transfer_mode": "broadcast"},
        "transition": {"pause_generation_mode": "retract", "kv": "flush"},
    },
    "run": {"num_rollout": 3, "warmup_steps": 0},
    "simulation": {"engine_costs": {"type": "linear"}},
}


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for key in path:
        tree = tree.setdefault(key, {})
    tree[last] = copy.deepcopy(value)


def tree(**changes: Any) -> dict[str, Any]:
    """The base with changes; `a__b=x` stands for the dotted key `a.b`."""
    result = copy.deepcopy(BASE)
    for key, value in changes.items():
        put(result, key.replace("__", "."), value)
    return result


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate(tree(**changes))


COLOCATED: dict[str, Any] = {
    "placement": {"mode": "colocated", "num_gpus": 4, "rollout_num_gpus_per_engine": 1},
    "weights__path": {"type": "fixed", "update_weight_transfer_mode": "cuda_ipc"},
}
