"""What an engine answers, as the backend uses it: one finished generation, one load report.

Responsible for reading SGLang's `/generate`, `/v1/loads` and `/metrics` answers; refuses to know how they travel."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

VersionSpan = tuple[str, int, int]
"""(weight version, start, end): output tokens start .. end-1 were sampled with this version."""


@dataclass(frozen=True)
class Generated:
    """One model call, ended."""

    output_ids: list[int]
    log_probs: list[float]
    """log p of each output token when it was sampled, of softmax(logits / temperature) over the whole vocabulary."""
    spans: tuple[VersionSpan, ...]
    """A partition of the output tokens, in order."""
    cached_tokens: int
    prompt_tokens: int
    finish_reason: str
    """`stop`, `length` or `abort`."""
    routed_experts: NDArray[np.int32] | None
    """[prompt + output - 1, layers, top_k]: the experts that computed each position."""
    started_t: float | None
    """`time.monotonic()` of this machine when the engine first worked on it; None if it never did."""
    first_token_t: float | None
    """Likewise, when the prefill that made the first token ended."""
    retractions: int


@dataclass(frozen=True)
class Loads:
    """Counters of one engine; seconds and retractions are cumulative since its start."""

    running: int
    waiting: int
    kv_used_tokens: int
    """Held by requests; what only the prefix cache holds is evictable and not counted."""
    kv_total_tokens: int
    retractions: int
    """Requests pushed out of the running batch for want of KV (`sglang:num_retracted_requests_total`); those of a pause
    with `retract` are counted with their request instead."""
    prefill_s: float
    """Wall seconds of prefill steps (`total_prefill_busy_us`), pauses excluded."""
    decode_s: float
    """Wall seconds of decode steps, launch to launch (`decode_moments`); the last step before a prefill or an idle gap
    is not in it. SGLang's `sglang:forward_execution_seconds_total` would be device time, but exists on CUDA only and
    only with a device timer on."""


def read_generated(answer: Mapping[str, Any], prompt_tokens: int, top_k: int | None, sent_t: float) -> Generated:
    """Read a `/generate` answer that arrived now. `top_k`: experts per token, if routed experts are wanted; `sent_t`:
    monotonic time when the request was sent.

    Raises:
        ValueError: log-probabilities, spans or routed experts do not fit the output tokens.
    """
    meta = answer["meta_info"]
    ids: list[int] = list(answer.get("output_ids") or ())
    triples = meta.get("output_token_logprobs") or ()
    if [token for _, token, _ in triples] != ids:
        raise ValueError(
            f"request {meta['id']}: log-probabilities of {len(triples)} tokens for {len(ids)} output tokens"
        )
    started, first = _on_this_clock(meta, sent_t, "forward_entry_time", "prefill_finished_time")
    return Generated(
        output_ids=ids,
        log_probs=[log_prob for log_prob, _, _ in triples],
        spans=_spans(meta, len(ids)),
        cached_tokens=meta.get("cached_tokens", 0),
        prompt_tokens=meta.get("prompt_tokens", prompt_tokens),
        finish_reason=meta["finish_reason"]["type"],
        routed_experts=None if top_k is None else _routed_experts(meta, prompt_tokens + len(ids) - 1, top_k),
        started_t=started,
        first_token_t=first,
        retractions=meta.get("num_retractions", 0),
    )


def read_loads(loads: Mapping[str, Any], metrics: str) -> Loads:
    """Read a `/v1/loads` answer (one data-parallel rank) and the text of `/metrics`."""
    load = loads["loads"][0]
    return Loads(
        running=load["num_running_reqs"],
        waiting=load["num_waiting_reqs"],
        kv_used_tokens=load["num_used_tokens"],
        kv_total_tokens=load["max_total_num_tokens"],
        retractions=int(metric_sum(metrics, "sglang:num_retracted_requests_total")),
        prefill_s=load["total_prefill_busy_us"] / 1e6,
        decode_s=(load["decode_moments"] or (0.0, 0.0, 0.0))[2] / 1e6,
    )


def metric_sum(text: str, name: str) -> float:
    """Sum of one metric over its labels in Prometheus' text format; 0 before its first sample."""
    lines = (line for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _spans(meta: Mapping[str, Any], tokens: int) -> tuple[VersionSpan, ...]:
    if not tokens:
        return ()
    spans = tuple((span["version"], span["start"], span["end"]) for span in meta["weight_versions"])
    spans = tuple(span for span in spans if span[1] < span[2])
    if [start for _, start, _ in spans] + [tokens] != [0] + [end for _, _, end in spans]:
        raise ValueError(f"request {meta['id']}: spans {spans} do not partition {tokens} output tokens")
    return spans


def _routed_experts(meta: Mapping[str, Any], positions: int, top_k: int) -> NDArray[np.int32] | None:
    encoded = meta.get("routed_experts")
    if encoded is None:
        return None
    flat = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    if positions < 1 or flat.size % (positions * top_k):
        raise ValueError(f"request {meta['id']}: {flat.size} routed experts for {positions} positions and top {top_k}")
    return flat.reshape(positions, -1, top_k)


def _on_this_clock(meta: Mapping[str, Any], sent_t: float, *names: str) -> list[float | None]:
    """Times that the engine stamped with its wall clock, on this process' monotonic clock. On one machine the two
    clocks differ by a known amount; the order sent, received, answered, arrived bounds it where the engine's machine
    has another wall clock."""
    offset = time.monotonic() - time.time()
    if "response_sent_to_client_ts" in meta and "request_received_ts" in meta:
        earliest, latest = sent_t - meta["request_received_ts"], time.monotonic() - meta["response_sent_to_client_ts"]
        offset = min(max(offset, earliest), latest)
    return [meta[name] + offset if name in meta else None for name in names]
