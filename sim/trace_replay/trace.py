"""Reads a trace of a real SGLang scheduler: the server's settings as model options, the requests, the iterations.

The format is described in `tests/data/sglang_scheduler_traces/README.md`; a trace of the first form names its server's
arguments, later ones the settings that they resolved to. It refuses to know the scheduler's rules.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.engine_request import Request
from sim.engine_scheduler import EngineModelOptions
from sim.radix_cache import Runs

MODELLED_VERSION = "0.5.23"
"""The SGLang whose rules the engine model states."""


class TraceError(ValueError):
    """A file that is no trace, or one of a server that is not modelled."""


# --- settings ---------------------------------------------------------------------------------------------------------

_SAME_NAME = (
    "max_total_num_tokens",
    "max_running_requests",
    "page_size",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "context_length",
    "schedule_policy",
    "schedule_conservativeness",
    "disable_overlap_schedule",
    "enable_priority_scheduling",
    "disable_priority_preemption",
    "priority_scheduling_preemption_threshold",
    "schedule_low_priority_values_first",
    "retraction_policy",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
)

NOT_MODELLED: dict[str, tuple[tuple[Any, ...], str]] = {
    "schedule_policy": (
        ("fcfs", "lpm"),
        "dfs-weight, lof, hrrn, random, routing-key and shortest-prefill-first sort the queue by other keys",
    ),
    "disable_radix_cache": ((False,), "requests with ignore_eos are then admitted by the end times of all"),
    "enable_mixed_chunk": ((False,), "decode rows inside a prefill batch"),
    "enable_prefill_delayer": ((False,), "prefills held back"),
    "prefill_max_requests": ((None,), "a limit on the requests of a prefill"),
    "max_queued_requests": ((None,), "requests refused because the queue is full"),
    "radix_eviction_policy": (("lru",), "another order of eviction"),
    "enable_hierarchical_cache": ((False,), "KV on the host and in storage"),
    "enable_lora": ((False, None), "adapters that limit what runs together"),
    "speculative_algorithm": ((None,), "several tokens a step, accepted by chance"),
    "disaggregation_mode": (("null",), "prefill and decode on different servers"),
    "dp_size": ((1,), "several schedulers behind one server"),
    "pp_size": ((1,), "micro-batches"),
}
"""Setting -> (values that are modelled, what another would need)."""
_DECAY = "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS"
NOT_DETERMINED = {
    "several victims of one preemption": "their order in the queue is that of a Python set, by memory address",
    "the iteration in which a message arrives": "comes from step times and the network; a trace gives it",
}
"""What no rule gives."""

_INT = {
    "--max-total-tokens": "max_total_num_tokens",
    "--max-running-requests": "max_running_requests",
    "--chunked-prefill-size": "chunked_prefill_size",
    "--max-prefill-tokens": "max_prefill_tokens",
    "--page-size": "page_size",
    "--context-length": "context_length",
}
_OTHER = {
    "--schedule-policy": ("schedule_policy", str),
    "--schedule-conservativeness": ("schedule_conservativeness", float),
}
_NEUTRAL = {
    "--model-path",
    "--dtype",
    "--device",
    "--host",
    "--port",
    "--random-seed",
    "--attention-backend",
    "--sleep-on-idle",
    "--skip-tokenizer-init",
    "--log-level",
    "--mem-fraction-static",
    "--enable-metrics",
}
"""Arguments that change no scheduling decision."""


def load(path: Path) -> dict[str, Any]:
    """Raises TraceError for a file that is no trace."""
    try:
        with gzip.open(path, "rt") as f:
            trace = json.load(f)
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"{path}: not a trace: {error} (expected compressed JSON of `testbed check-engine`)") from None
    missing = {"sglang", "engine", "requests", "events"} - (set(trace) if isinstance(trace, dict) else set())
    if missing:
        raise TraceError(f"{path}: not a trace: it has no {', '.join(sorted(missing))}")
    return dict(trace)


def version(trace: dict[str, Any]) -> str:
    return str(trace["sglang"])


def options(trace: dict[str, Any]) -> EngineModelOptions:
    """The model's options from the server's settings. Raises TraceError for one that changes scheduling and is not
    modelled."""
    first_form = "server_args" in trace
    known = _from_arguments(list(trace["server_args"])) if first_form else _from_settings(trace["engine"])
    for name, value in trace.get("server_env", {}).items():
        if name == _DECAY:
            known["new_token_ratio_decay_steps"] = int(value)
        elif not first_form:
            raise TraceError(f"environment variable {name}={value} is not modelled")
    return EngineModelOptions(passes=trace.get("passes_at_start", 0), forward="host", **known)


def _from_settings(engine: dict[str, Any]) -> dict[str, Any]:
    for name, (neutral, needs) in NOT_MODELLED.items():
        if engine.get(name) is not None and engine[name] not in neutral:
            raise TraceError(f"{name} {engine[name]!r} is not modelled: {needs}")
    return {name: engine[name] for name in _SAME_NAME if engine.get(name) is not None}


def _from_arguments(args: list[str]) -> dict[str, Any]:
    """Settings of a trace of the first form, from its server's arguments; the defaults are those of its machine."""
    known: dict[str, Any] = {"chunked_prefill_size": 4096, "context_length": 2048}
    while args:
        name = args.pop(0)
        if "=" in name:
            name, value = name.split("=", 1)
            args.insert(0, value)
        if name == "--disable-overlap-schedule":
            known["disable_overlap_schedule"] = True
        elif name == "--disable-radix-cache":
            known["disable_radix_cache"] = True
        elif name in _INT:
            known[_INT[name]] = int(args.pop(0))
        elif name in _NEUTRAL:
            if args and not args[0].startswith("--"):
                args.pop(0)
        elif name in _OTHER:
            key, kind = _OTHER[name]
            known[key] = kind(args.pop(0))
        else:
            raise TraceError(f"server argument {name} is not modelled")
    return known


# --- requests ---------------------------------------------------------------------------------------------------------


def runs(tokens: list[int]) -> Runs:
    """Token ids as runs of one token of the content with that id."""
    return tuple((t, 0, 1) for t in tokens)


def request(r: dict[str, Any]) -> Request:
    """The model's request: it will emit what the real one emitted; an aborted one would have gone on."""
    finish = r["finish_reason"]
    kind = finish["type"] if isinstance(finish, dict) else finish
    out, limit = r["output_ids"], r["max_new_tokens"]
    emits = max(len(out), 1)
    if kind in ("abort", None):
        emits = max(limit, emits)
    return Request(
        rid=r["rid"],
        content=runs(r["input_ids"]),
        prompt_tokens=len(r["input_ids"]),
        output_tokens=emits,
        max_new_tokens=limit,
        stops=kind != "length",
        ignore_eos=r["ignore_eos"],
        output_runs=runs(out),
        namespace=(r.get("extra_key"), r.get("cache_salt")),
        logprob_start=r["logprob_start_len"],
        priority=r.get("priority"),
    )


# --- iterations -------------------------------------------------------------------------------------------------------

MESSAGES = (
    "recv",
    "abort",
    "pause_generation",
    "continue_generation",
    "flush_cache",
    "record_weight_version_change",
)
"""Events between two iterations, handled in their order before the next one."""


@dataclass(slots=True)
class Iteration:
    """What the trace says about one iteration."""

    n: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    next: dict[str, Any] | None = None
    proc: dict[str, Any] | None = None
    retract: dict[str, Any] | None = None
    preempt: list[dict[str, Any]] = field(default_factory=list)
    evictions: list[tuple[int, int]] = field(default_factory=list)


def iterations(trace: dict[str, Any]) -> list[Iteration]:
    """In order. What happens between two iterations belongs to the second."""
    out: dict[int, Iteration] = {}
    for e in trace["events"]:
        it = out.setdefault(e["n"], Iteration(e["n"]))
        kind = e["e"]
        if kind in MESSAGES:
            it.messages.append(e)
        elif kind == "evict":
            it.evictions.append((e["want"], e["got"]))
        elif kind == "preempt":
            it.preempt.append(e)
        elif kind in ("next", "proc", "retract"):
            setattr(it, kind, e)
    return [out[n] for n in sorted(out)]


def arrivals(message: dict[str, Any]) -> Iterator[str]:
    """Ids of the generation requests of a `recv` event."""
    return (rid for name, rid, _ in message["l"] if "Generate" in name)
