"""The benchmark scenarios, and one measurement of one of them in this process.

`python -m benchmarks.cases CASE ROLLOUTS [--engines N] [--tokens N] [--turns N] [--mode iterate] [--journal full]`
prints one JSON object. CPU seconds are of the whole run: core, driver, engine models with KV accounting, prefix-aware
routing, staleness, streamed metrics; set-up and imports are left out. Rollouts are trajectories of fully generated
groups (trained, or dropped as too old later), turns are finished model calls. Clock events are what the clock pops:
engine wake-ups, tools, verifiers, arrivals, steps of weight updates; void ones, wake-ups that an arrival had moved
forward, are counted apart.
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
ENGINES = 128
PROMPT = 512
"""Tokens."""
LONGEST = 4
"""The cap on a reply, in means."""


def single_turn(rollouts: int, engines: int, tokens: int, turns: int) -> dict[str, Any]:
    """Batches of 1,024 trajectories, asynchronous with a staleness bound, cache-aware routing.

    The router is told when new weights make what an engine has cached useless, or it would remember every prompt of the
    run (`not_told`).
    """
    # memory, which has its own cases, holds nobody up: KV of long rollouts is that of a smaller model
    long = {"model": {"type": "preset", "name": "Qwen3-30B-A3B"}} if tokens > 20_000 else {}
    return long | {
        "workload": {
            "reply": {"type": "lognormal", "mean": tokens, "sigma": 0.7, "group_correlation": 0.5},
            "max_response_length": LONGEST * tokens,
        },
        "rollout": {
            "routing": {"type": "cache_aware", "told_of_flushes": True},
            "engine": {"max_running_requests": 64},
        },
    }


def multi_turn(rollouts: int, engines: int, tokens: int, turns: int) -> dict[str, Any]:
    """As `single_turn`, with a tool call after each turn but the last and routing to the engine of the turn before.

    64 conversations an engine want more KV than it has: prefixes of acting trajectories are evicted and computed again.
    """
    return {
        "workload": {
            "reply": {"type": "lognormal", "mean": tokens // turns, "sigma": 0.7, "group_correlation": 0.5},
            "max_response_length": LONGEST * (tokens // turns),
            "turns": {"type": "fixed", "tokens": turns},
            "observation": {"type": "uniform", "low": 50, "high": 400},
            "tool_time": {"type": "lognormal", "mean_s": 2.0, "sigma": 0.8},
        },
        "rollout": {"routing": {"type": "session_affinity"}, "engine": {"max_running_requests": 64}},
    }


def serving(rollouts: int, engines: int, tokens: int, turns: int) -> dict[str, Any]:
    """The shape that serving simulators publish: Poisson arrivals of 1,024 + 512 tokens on replicas of an 8B model."""
    return {
        "cluster": {"gpu": "H100", "nodes": 1, "gpus_per_node": 8},
        "model": {"type": "preset", "name": "Qwen3-8B"},
        "workload": {
            "prompt": {"type": "fixed", "tokens": 1024},
            "reply": {"type": "fixed", "tokens": 512},
            "max_response_length": 512,
            "rewards": {"latency": {"type": "fixed", "seconds": 0.0}},
            "arrivals": "poisson",
            "arrival_rate_per_s": 7.0 * engines,
            "num_tasks": rollouts,
        },
        "algorithm": {"n_samples_per_prompt": 1, "rollout_batch_size": 100},
        "placement": {
            "mode": "disaggregated",
            "rollout_num_gpus": engines,
            "actor_num_gpus": 4,
            "rollout_num_gpus_per_engine": 1,
        },
        "rollout": {
            "admission": {"type": "fully_async", "async_max_concurrent_groups": rollouts},
            "routing": {"type": "least_load"},
        },
        "experience": {"staleness": {"bound": None}},
        "run": {"num_rollout": max(rollouts // 100, 1), "warmup_steps": 0},
    }


def not_told(rollouts: int, engines: int, tokens: int, turns: int) -> dict[str, Any]:
    """`single_turn` with SGLang's default: its router goes on counting on what an update has made useless."""
    case = single_turn(rollouts, engines, tokens, turns)
    return {**case, "rollout": {**case["rollout"], "routing": {"type": "cache_aware"}}}


CASES = {"single_turn": single_turn, "multi_turn": multi_turn, "serving": serving, "not_told": not_told}


def scenario(
    case: str,
    rollouts: int,
    engines: int | None = None,
    tokens: int = 4000,
    turns: int = 8,
    mode: str = "skip",
) -> Scenario:
    """`engines` of 4 GPUs beside a trainer of as many GPUs (`serving`: of one). Raises KeyError for another case."""
    n = engines or (4 if case == "serving" else ENGINES)
    gpus = 4 * n
    config: dict[str, Any] = {
        "name": case,
        "cluster": {"gpu": "H100", "nodes": -(-2 * gpus // 8), "gpus_per_node": 8},
        "model": {"type": "preset", "name": "Qwen3-32B"},
        "workload": {
            "type": "lengths",
            "prompt": {"type": "fixed", "tokens": PROMPT},
            "rewards": {"latency": {"type": "fixed", "seconds": 0.5}},
        },
        "algorithm": {"n_samples_per_prompt": GROUP, "rollout_batch_size": GROUPS_PER_BATCH},
        "placement": {
            "mode": "disaggregated",
            "rollout_num_gpus": gpus,
            "actor_num_gpus": gpus,
            "rollout_num_gpus_per_engine": 4,
        },
        "rollout": {"admission": {"type": "bounded", "max_head_offpolicyness": 2}},
        "experience": {"staleness": {"bound": 2, "action": "drop"}},
        "weights": {
            "path": {"type": "fixed", "update_weight_transfer_mode": "broadcast"},
            "transition": {"pause_generation_mode": "in_place", "kv": "salt_by_version"},
        },
        "simulation": {"mode": mode},
    }
    steps = max(rollouts // (GROUP * GROUPS_PER_BATCH), 1)
    config["run"] = {"num_rollout": steps, "warmup_steps": 0 if steps < 3 else 1}
    for section, values in CASES[case](rollouts, n, tokens, turns).items():
        config[section] = {**config[section], **values}
    config["run"]["journal"] = "off"
    return Scenario.model_validate(config)


def measure(config: Scenario, journal: str = "off") -> dict[str, Any]:
    """One run, with the journal (if any) in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure(config, journal, Path(folder))


def _measure(config: Scenario, journal: str, folder: Path) -> dict[str, Any]:
    backend = SimulatedBackend(config, Path())
    metrics = RunMetrics(config, backend.core.layout)
    observers: list[Any] = [metrics.observe]
    header = JournalHeader(scenario_hash="", seed=config.run.seed, backend="simulated")
    writer = JournalWriter(folder / "journal.jsonl.zst", journal, 0.01, header)  # type: ignore[arg-type]
    if journal != "off":
        observers.append(writer.write)
    backend.use(observers)
    started = time.process_time()
    wall = time.perf_counter()
    reason = backend.run()
    writer.close()
    cpu = time.process_time() - started
    wall = time.perf_counter() - wall
    rollouts = backend.core.context.progress.generated * config.algorithm.n_samples_per_prompt
    finished = backend.fleet.finished_turns
    return {
        "case": config.name,
        "rollouts": rollouts,
        "trained": backend.core.context.progress.trained_trajectories,
        "turns": finished,
        "cpu_s": cpu,
        "wall_s": wall,
        "rollouts_per_cpu_s": rollouts / cpu,
        "turns_per_cpu_s": finished / cpu,
        "core_events": backend.core.events,
        "clock_events": backend.clock.events,
        "core_events_per_turn": backend.core.events / finished,
        "clock_events_per_turn": (backend.clock.events - backend.fleet.stale) / finished,
        "void_events_per_turn": backend.fleet.stale / finished,
        "engine_events_per_turn": backend.fleet.wake_ups / finished,
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
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("rollouts", type=int)
    parser.add_argument("--engines", type=int, help="default: 128 (serving: 4)")
    parser.add_argument("--tokens", type=int, default=4000, help="mean reply tokens of a rollout, all turns")
    parser.add_argument("--turns", type=int, default=8, help="of multi_turn")
    parser.add_argument("--mode", choices=["skip", "iterate"], default="skip")
    parser.add_argument("--journal", choices=["off", "sampled", "full"], default="off")
    o = parser.parse_args()
    config = scenario(o.case, o.rollouts, o.engines, o.tokens, o.turns, o.mode)
    print(json.dumps(measure(config, o.journal)))


if __name__ == "__main__":
    main()
