"""The benchmark scenarios, and one measurement of one of them in this process.

`python -m benchmarks.cases CASE ROLLOUTS` prints one JSON object. CPU seconds are of the whole run: core, driver, engine models with
KV accounting, prefix-aware routing, staleness, streamed metrics; set-up and imports are left out. The journal is off unless the
case is `single_turn_journal`.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from testbed.scenario import Scenario

GROUP = 8
GROUPS_PER_BATCH = 128


def scenario(case: str, rollouts: int) -> Scenario:
    """128 engines, batches of 1,024 trajectories, asynchronous with a staleness bound."""
    multi = case.startswith("multi_turn")
    workload: dict[str, Any] = {
        "type": "lengths",
        "prompt": {"type": "fixed", "tokens": 512},
        "reply": {"type": "lognormal", "mean": 500 if multi else 4000, "sigma": 0.7, "group_correlation": 0.5},
        "max_response_length": 2000 if multi else 16000,
        "rewards": {"latency": {"type": "fixed", "seconds": 0.5}},
    }
    if multi:
        workload["turns"] = {"type": "fixed", "tokens": 8}
        workload["observation"] = {"type": "uniform", "low": 50, "high": 400}
        workload["tool_time"] = {"type": "lognormal", "mean_s": 2.0, "sigma": 0.8}
    steps = max(rollouts // (GROUP * GROUPS_PER_BATCH), 1)
    return Scenario.model_validate(
        {
            "name": case,
            "cluster": {"gpu": "H100", "nodes": 128, "gpus_per_node": 8},
            "model": {"type": "preset", "name": "Qwen3-32B"},
            "workload": workload,
            "algorithm": {"n_samples_per_prompt": GROUP, "rollout_batch_size": GROUPS_PER_BATCH},
            "placement": {
                "mode": "disaggregated",
                "rollout_num_gpus": 512,
                "actor_num_gpus": 512,
                "rollout_num_gpus_per_engine": 4,
            },
            "rollout": {
                "admission": {"type": "bounded", "max_head_offpolicyness": 2},
                "routing": {"type": "session_affinity"} if multi else {"type": "cache_aware"},
                "engine": {"max_running_requests": 64},
            },
            "experience": {"staleness": {"bound": 2, "action": "drop"}},
            "weights": {
                "path": {"type": "fixed", "update_weight_transfer_mode": "broadcast"},
                "transition": {"pause_generation_mode": "in_place", "kv": "salt_by_version"},
            },
            "run": {"num_rollout": steps, "warmup_steps": 0 if steps < 3 else 1, "journal": "off"},
        }
    )


def measure(case: str, rollouts: int) -> dict[str, Any]:
    from sim.driver import SimulatedBackend
    from testbed.metrics import RunMetrics

    config = scenario(case, rollouts)
    observers: list[Any] = []
    backend = SimulatedBackend(config, Path())
    metrics = RunMetrics(config, backend.core.layout)
    observers.append(metrics.observe)
    writer = None
    if case.endswith("_journal"):
        import tempfile

        from testbed.journal import JournalHeader, JournalWriter

        folder = tempfile.mkdtemp()
        header = JournalHeader(scenario_hash="", seed=config.run.seed, backend="simulated")
        writer = JournalWriter(Path(folder) / "journal.jsonl.zst", "full", 1.0, header)
        observers.append(writer.write)
    backend.use(observers)
    started = time.process_time()
    wall = time.perf_counter()
    reason = backend.run()
    if writer is not None:
        writer.close()
    cpu = time.process_time() - started
    wall = time.perf_counter() - wall
    summary = metrics.summary(finish_reason=reason)
    p = backend.core.context.progress
    turns = backend._completed
    trained = p.trained_trajectories
    return {
        "case": case,
        "rollouts": trained,
        "turns": turns,
        "cpu_s": cpu,
        "wall_s": wall,
        "rollouts_per_cpu_s": trained / cpu,
        "turns_per_cpu_s": turns / cpu,
        "core_events": backend.core.events,
        "clock_events": backend.clock.events,
        "core_events_per_turn": backend.core.events / turns,
        "clock_events_per_turn": backend.clock.events / turns,
        "engine_wake_ups_per_turn": backend.wake_ups / turns,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "simulated_s": backend.clock.now,
        "step_time_s": summary.step_time_mean_s,
        "finish_reason": reason,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(float(sys.argv[2])))))
