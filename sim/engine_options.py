"""The server arguments of one engine, and the numbers SGLang fixes in its source or environment. It decides nothing."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

NOTHING: Final = 0
DECODE: Final = 1
EXTEND: Final = 2
"""Kinds of batch."""

RETRACT_DECODE_STEPS: Final = 20
"""SGLANG_RETRACT_DECODE_STEPS: slots to free per remaining request after a retraction."""
IN_BATCH_PREFIX: Final = 32
"""Tokens of a shared prefix from which lpm holds a request back
(IN_BATCH_PREFIX_CACHING_{CHECK,DEPRIORITIZE}_THRESHOLD)."""
LPM_QUEUE: Final = 128
"""Longest queue that lpm sorts, and how many waiting requests fcfs touches."""
TOUCH_EVERY: Final = 32
"""Passes with a queue from one touch to the next under fcfs."""


class EngineModelOptions(Struct, frozen=True):
    """One engine's server arguments, under SGLang's names. `max_total_num_tokens` is the KV pool in tokens."""

    max_total_num_tokens: int
    max_running_requests: int = 256
    chunked_prefill_size: int = 8192
    """-1: off."""
    max_prefill_tokens: int = 16384
    page_size: int = 1
    schedule_policy: str = "fcfs"
    """`fcfs` or `lpm`."""
    enable_priority_scheduling: bool = False
    """Higher `priority` first, with `fcfs`; requests without one come last."""
    disable_priority_preemption: bool = False
    priority_scheduling_preemption_threshold: int = 10
    """A running request is sent back for a candidate whose priority is higher by more than this."""
    schedule_low_priority_values_first: bool = False
    retraction_policy: str = "length"
    """`length`, or `priority`: lower priorities are retracted first."""
    prefill_decode_interval: int = 0
    """Iterations without a prefill after each prefill, while `prefill_decode_interval_min_bs` requests run."""
    prefill_decode_interval_min_bs: int = 0
    schedule_conservativeness: float = 1.0
    context_length: int = 1 << 40
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    """Nothing is reused and nothing stays after a finish. The scheduling rules stay those of a cache that never
    hits."""
    host_tokens: int = 0
    """KV slots in host memory (SGLang's hierarchical cache); 0: none."""
    load_back_tokens_per_s: float = float("inf")
    """Tokens of KV a second from host memory to the GPU, layer by layer beside the prefill that uses them."""
    takes_in: bool = False
    """Requests may bring KV from other engines (`Request.brought`)."""
    new_token_ratio_decay_steps: int = 600
    """SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS."""
    forward: str = "device"
    """`device`: launching a batch takes no host time and the host waits for the previous one; `host`: the CPU engine,
    whose forward is synchronous."""
    exact_spans: bool = False
    """Count the token in flight at an in-place weight change to the old version, which made it. The real engine under
    overlap counts it to the new one, and so does the default."""
    passes: int = 0
    """Scheduling passes counted before the first request (a server that was health-probed has 1)."""
