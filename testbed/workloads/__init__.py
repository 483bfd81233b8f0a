"""Workloads: what is asked of the policy, as tasks with one plan per trajectory, decided before the run starts.

Responsible for choosing the source that a scenario names. It refuses to know engines and the clock: a workload
never sees the time, so two layouts with the same seed get the same tasks. `plan.py` has the types, one module per
source has the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.scenario import Scenario
from testbed.scenario.workload import (
    JournalWorkload,
    LengthsWorkload,
    LognormalLength,
    QuantileLength,
    SessionsWorkload,
    TraceLength,
    TraceWorkload,
)
from testbed.workloads.errors import WorkloadError
from testbed.workloads.files import TRACES
from testbed.workloads.journal import journal_tasks, read_run
from testbed.workloads.lengths import arrival_times, length_tasks
from testbed.workloads.plan import (
    BLOCK_TOKENS,
    SYSTEM_PROMPT,
    Plan,
    Run,
    Task,
    TaskStream,
    Workload,
    extend,
    prompt_content,
)
from testbed.workloads.sessions import read_sessions, session_tasks
from testbed.workloads.trace import read_trace, trace_arrivals, trace_tasks

__all__ = [
    "BLOCK_TOKENS",
    "SYSTEM_PROMPT",
    "TRACES",
    "Plan",
    "Run",
    "Task",
    "Workload",
    "WorkloadError",
    "extend",
    "prompt_content",
    "workload",
]


def workload(scenario: Scenario, base_dir: Path) -> Workload:
    """The scenario's workload; file names in it are relative to `base_dir` (the scenario file's folder).

    Files are read here, so every WorkloadError comes before the run starts.
    """
    return _SOURCES[type(scenario.workload)](scenario.workload, scenario, base_dir)


def _lengths(config: LengthsWorkload, scenario: Scenario, base_dir: Path) -> Workload:
    trace = read_trace(config.prompt.trace, base_dir) if isinstance(config.prompt, TraceLength) else None
    times = (
        arrival_times(config.arrival_rate_per_s, scenario.run.seed) if config.arrival_rate_per_s is not None else None
    )
    kinds = {
        "prompts": "measured" if trace else _kind(config.prompt),
        "reply_lengths": _kind(config.reply),
        "tools": "assumed",
        "rewards": "assumed",
        "arrivals": "assumed",
    }
    tasks = length_tasks(config, trace, *_run(scenario))
    return TaskStream(tasks, times, _fingerprint(scenario, trace.sha256 if trace else ""), kinds)


def _trace(config: TraceWorkload, scenario: Scenario, base_dir: Path) -> Workload:
    trace = read_trace(config.trace, base_dir)
    open_arrivals = config.arrivals == "trace"
    times = iter(trace_arrivals(config, trace)) if open_arrivals else None
    kinds = {
        "prompts": "measured",
        "reply_lengths": "measured",
        "tools": "assumed",
        "rewards": "assumed",
        "arrivals": "measured" if open_arrivals and config.swing is None else "assumed",
    }
    return TaskStream(trace_tasks(config, trace, *_run(scenario)), times, _fingerprint(scenario, trace.sha256), kinds)


def _sessions(config: SessionsWorkload, scenario: Scenario, base_dir: Path) -> Workload:
    sessions, sha256 = read_sessions(config.path, base_dir)
    open_arrivals = config.arrivals == "trace"
    times = (session.arrival_time_ns / 1e9 for session in sessions) if open_arrivals else None
    kind = "measured" if config.source else "assumed"
    kinds = {
        "prompts": kind,
        "reply_lengths": kind,
        "tools": kind,
        "rewards": "assumed",
        "arrivals": kind if open_arrivals else "assumed",
    }
    return TaskStream(session_tasks(config, sessions, *_run(scenario)), times, _fingerprint(scenario, sha256), kinds)


def _journal(config: JournalWorkload, scenario: Scenario, base_dir: Path) -> Workload:
    run = read_run(config.run, base_dir)
    kind = "measured" if run.backend == "real" else "simulated"
    open_arrivals = config.arrivals == "trace"
    times = (arrived.t for arrived in run.arrivals.values()) if open_arrivals else None
    kinds = dict.fromkeys(("prompts", "reply_lengths", "tools", "rewards"), kind)
    kinds["arrivals"] = kind if open_arrivals else "assumed"
    return TaskStream(journal_tasks(config, run, *_run(scenario)), times, _fingerprint(scenario, run.sha256), kinds)


_SOURCES: dict[type[Any], Callable[[Any, Scenario, Path], Workload]] = {
    LengthsWorkload: _lengths,
    TraceWorkload: _trace,
    SessionsWorkload: _sessions,
    JournalWorkload: _journal,
}


def _run(scenario: Scenario) -> tuple[int, int, bool]:
    """(members of a group, seed, whether replies always run to the cap)."""
    return scenario.members_started, scenario.run.seed, scenario.rollout.ignore_eos


def _kind(length: object) -> str:
    """`calibrated`: fitted to points that the scenario names; `assumed`: chosen by its author."""
    return "calibrated" if isinstance(length, LognormalLength | QuantileLength) and length.source else "assumed"


def _fingerprint(scenario: Scenario, data_sha256: str) -> str:
    """SHA-256 (16 hex digits) of all a workload depends on: data by content, so the same file elsewhere is the same
    workload."""
    config = scenario.workload.model_dump(mode="json", exclude={"trace": True, "path": True, "run": True})
    if data_sha256 and isinstance(config.get("prompt"), dict):
        config["prompt"].pop("trace", None)
    text = json.dumps([config, _run(scenario), data_sha256], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
