"""The benchmark scenarios, and one measurement of one of them in this process.

`python -m benchmarks.cases CASE ROLLOUTS` prints one JSON object. CPU seconds are of the whole run: core, driver,
engine models with KV accounting, prefix-aware routing, staleness, streamed metrics; set-up and imports are left out.
Rollouts are trajectories of fully generated groups (trained, or dropped as too old later), turns are finished model
calls. Clock events count everything that the clock pops: engine wake-ups, those that an arrival made void, tools,
verifiers, weight updates. The journal is off unless the case is `single_turn_journal`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sim.driver import SimulatedBackend
from testbed.journal import JournalHeader, JournalWriter
from testbed.metrics import RunMetrics
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


CASES = ("single_turn", "multi_turn", "single_turn_journal")


def measure(case: str, rollouts: int) -> dict[str, Any]:
    """One run of one case, with the journal (if it has one) in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure(case, scenario(case, rollouts), Path(folder))


def _measure(case: str, config: Scenario, folder: Path) -> dict[str, Any]:

    backend = SimulatedBackend(config, Path())
    metrics = RunMetrics(config, backend.core.layout)
    observers: list[Any] = [metrics.observe]
    writer = None
    if case.endswith("_journal"):
        header = JournalHeader(scenario_hash="", seed=config.run.seed, backend="simulated")
        writer = JournalWriter(folder / "journal.jsonl.zst", "full", 1.0, header)
        observers.append(writer.write)
    backend.use(observers)
    started = time.process_time()
    wall = time.perf_counter()
    reason = backend.run()
    if writer is not None:
        writer.close()
    cpu = time.process_time() - started
    wall = time.perf_counter() - wall
    progress = backend.core.context.progress
    rollouts = progress.generated * GROUP
    finished = backend.fleet.finished_turns
    return {
        "case": case,
        "rollouts": rollouts,
        "trained": progress.trained_trajectories,
        "turns": finished,
        "cpu_s": cpu,
        "wall_s": wall,
        "rollouts_per_cpu_s": rollouts / cpu,
        "turns_per_cpu_s": finished / cpu,
        "core_events": backend.core.events,
        "clock_events": backend.clock.events,
        "core_events_per_turn": backend.core.events / finished,
        "clock_events_per_turn": backend.clock.events / finished,
        "engine_events_per_turn": (backend.fleet.wake_ups + backend.fleet.stale) / finished,
        "peak_rss_mb": peak_rss_mb(),
        "simulated_s": backend.clock.now,
        "step_time_s": metrics.summary(finish_reason=reason).step_time_mean_s,
        "finish_reason": reason,
    }


def peak_rss_mb() -> float:
    """Largest resident set of this process so far, MiB (the system counts in KiB, on macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("rollouts", type=int)
    options = parser.parse_args()
    print(json.dumps(measure(options.case, options.rollouts)))


if __name__ == "__main__":
    main()
