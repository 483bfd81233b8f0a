"""Which engine does a turn go to? One section per rule, under the names of the system it comes from.

The rules themselves, as formulas, are in `testbed.policies.routing`. Every router counts the turns that it sent and
that came back; what else it knows, and whether somebody tells it when that is no longer true, is an option here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.scenario.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section

# --- load or nothing --------------------------------------------------------------------------------------------------


class RandomRouting(Section):
    type: Literal["random"] = "random"


class RoundRobin(Section):
    type: Literal["round_robin"] = "round_robin"


class PowerOfTwo(Section):
    """Two engines at random, the one with fewer turns."""

    type: Literal["power_of_two"] = "power_of_two"


class LeastLoad(Section):
    """The engine with the least load; ties by lowest index."""

    type: Literal["least_load"] = "least_load"
    load: Literal["requests", "prompt_tokens"] = "requests"
    """`requests`: turns in the engine (the routers of Miles and slime, SGLang's shortest queue). `prompt_tokens`: their
    prompts (SGLang's `least_load`, which counts characters)."""


# --- hashing ----------------------------------------------------------------------------------------------------------


class ConsistentHashing(Section):
    """A ring of virtual nodes keyed by group."""

    type: Literal["consistent_hashing"] = "consistent_hashing"
    virtual_nodes: PositiveInt = 160


class BoundedConsistentHashing(Section):
    """The ring of `consistent_hashing`, but on to the next engine while load > max_load_skew x mean load (SGLang)."""

    type: Literal["bounded_consistent_hashing"] = "bounded_consistent_hashing"
    virtual_nodes: PositiveInt = 160
    max_load_skew: Annotated[float, Field(ge=1)] = 1.5


class PrefixHash(Section):
    """A ring keyed by the first tokens of the prompt; the least loaded engine if the ring's is above load_factor x mean
    load (SGLang)."""

    type: Literal["prefix_hash"] = "prefix_hash"
    virtual_nodes: PositiveInt = 160
    prefix_token_count: PositiveInt = 256
    """Tokens that make the key, rounded up to whole prefix blocks of the workload."""
    load_factor: Annotated[float, Field(ge=1)] = 1.25


class SessionAffinity(Section):
    """A trajectory stays with its first engine; the first goes to the least loaded."""

    type: Literal["session_affinity"] = "session_affinity"


# --- prefixes ---------------------------------------------------------------------------------------------------------


class CacheAware(Section):
    """SGLang's rule: imbalanced (max - min > abs and max > rel x min) -> shortest queue; else longest match above the
    threshold; else least loaded. Defaults: its command line's; its library's are 0.5, 32 and 1.1."""

    type: Literal["cache_aware"] = "cache_aware"
    cache_threshold: Fraction = 0.3
    balance_abs_threshold: Annotated[int, Field(ge=0)] = 64
    balance_rel_threshold: Annotated[float, Field(ge=1)] = 1.5
    max_tree_size: PositiveInt = 67_108_864
    """Tokens in the router's approximate tree of one engine; the oldest leaves go first."""
    told_of_flushes: bool = False
    """Whether the router hears that an engine's cache was emptied (flush, weight update). SGLang's does not: it goes on
    sending turns to prefixes that are gone. A lost engine it notices by itself."""


class CostBased(Section):
    """Smallest wait + prefill of what is not cached: A iff wait_A + prefill(suffix) < wait_B + prefill(P + suffix)."""

    type: Literal["cost"] = "cost"
    prefill_tokens_per_s: PositiveFloat
    """Rate used for the estimate."""
    decode_seconds_per_turn: NonNegativeFloat = 0.0
    """Estimated wait that one turn already in the engine adds."""
    told_of_flushes: bool = True


class DynamoKv(Section):
    """Dynamo's KV router: lowest prefill_load_scale x (active prefill + prompt - overlap_score_credit x overlap) +
    decode, in blocks."""

    type: Literal["dynamo_kv"] = "dynamo_kv"
    overlap_score_credit: Fraction = 1.0
    """0: load alone."""
    prefill_load_scale: NonNegativeFloat = 1.0
    router_temperature: NonNegativeFloat = 0.0
    """0: the lowest cost; above: softmax of costs that are scaled to [0, 1]."""
    kv_cache_block_size: PositiveInt = 16
    router_max_tree_size: PositiveInt = 1 << 20
    """Blocks in the router's own account of one engine's cache; the oldest leaves go first."""
    told_of_flushes: bool = True


class Mooncake(Section):
    """Mooncake's conductor: smallest T_queue + T_prefill with the engine's own prefix, or, where another engine's is
    longer by the threshold, smallest T_transfer + T_queue + T_prefill with that prefix, which then travels."""

    type: Literal["mooncake"] = "mooncake"
    prefill_tokens_per_s: PositiveFloat
    """Rate of T_prefill without attention."""
    attention_pairs_per_s: PositiveFloat | None = None
    """Query-key pairs a second, for the part of T_prefill that grows with the square of the length; null: left out."""
    transfer_tokens_per_s: PositiveFloat | None
    """Tokens of KV a second from engine to engine; null: no prefix travels (the paper's `cache-aware`)."""
    kvcache_balancing_threshold: Annotated[float, Field(ge=1)] = 2.0
    """Longest prefix anywhere / prefix here from which KV is fetched. The paper names it and gives no value."""
    max_tree_size: PositiveInt = 67_108_864
    """Tokens of KV that the conductor takes one engine to keep (device and host memory); the oldest leaves go first."""
    told_of_flushes: bool = True


class Preble(Section):
    """Preble's E2: exploit the engines that hold the longest prefix if it is more than half of the prompt, else
    explore: lowest load of the window + prefill of what is missing."""

    type: Literal["preble"] = "preble"
    prefill_tokens_per_s: PositiveFloat
    decode_seconds_per_turn: NonNegativeFloat = 0.0
    window_s: PositiveFloat = 180.0
    """Requests sent within this time make an engine's load."""
    high_load_threshold: Annotated[float, Field(ge=1)] = 15.0
    """An engine whose load is above this many times the lightest one's is not exploited (HIGH_LOAD_THRESHOLD)."""
    max_tree_size: PositiveInt = 67_108_864
    told_of_flushes: bool = True


Routing = Annotated[
    RandomRouting
    | RoundRobin
    | PowerOfTwo
    | LeastLoad
    | ConsistentHashing
    | BoundedConsistentHashing
    | PrefixHash
    | SessionAffinity
    | CacheAware
    | CostBased
    | DynamoKv
    | Mooncake
    | Preble,
    Field(discriminator="type"),
]

FOLLOWS_PREFIXES: tuple[type[Section], ...] = (CacheAware, CostBased, DynamoKv, Mooncake, Preble, PrefixHash)
"""Rules that look for cached prefixes."""
