"""The generation side: engine options under SGLang's names, and the policies of admission and concurrency (routing:
`testbed.scenario.routing`, programs: `testbed.scenario.programs`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from testbed.scenario.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from testbed.scenario.model import Precision
from testbed.scenario.programs import NoPrograms, Programs
from testbed.scenario.routing import LeastLoad, Routing


class HierarchicalCache(Section):
    """KV in host memory behind that in the GPU's (SGLang's HiCache, `--enable-hierarchical-cache`, write-through): what
    the GPU evicts is still there, and comes back beside the prefill that uses it."""

    hicache_ratio: PositiveFloat = 2.0
    """Host slots / KV slots of the GPU."""
    hicache_size: PositiveFloat | None = None
    """GB of host memory per GPU (1e9 bytes); instead of the ratio."""


class Speculative(Section):
    """Speculative decoding: a draft proposes tokens one after another, the target verifies them in one step (SGLang's
    EAGLE, MTP and draft models with one candidate a step). Give `accept_rate` or `accept_length`."""

    speculative_num_steps: PositiveInt = 3
    """Drafts per verification; it verifies one token more (`speculative_num_draft_tokens`)."""
    accept_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Chance that a draft is accepted if the one before it was."""
    accept_length: Annotated[float, Field(ge=1)] | None = None
    """Tokens per verification, the target's own included, as servers report it."""
    draft_step_share: NonNegativeFloat = 0.05
    """Seconds of one draft step / seconds of the target's decode step."""
    accept_decay_per_version: Fraction = 0.0
    """Share of accepted drafts that every published version costs, as the draft is not trained with the target."""

    @model_validator(mode="after")
    def _one_of(self) -> Speculative:
        if (self.accept_rate is None) == (self.accept_length is None):
            raise ValueError("give exactly one of `accept_rate` and `accept_length`")
        most = self.speculative_num_steps + 1
        if self.accept_length is not None and self.accept_length > most:
            raise ValueError(f"{self.speculative_num_steps} drafts give at most `accept_length: {most}`")
        return self


class EngineOptions(Section):
    """Server arguments of one engine (SGLang 0.5.23 names and defaults)."""

    max_running_requests: PositiveInt = 256
    max_total_num_tokens: PositiveInt | None = None
    """KV slots of one engine; null: worked out from memory, `mem_fraction_static` and the model."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.85
    chunked_prefill_size: int = 8192
    """Tokens of one prefill chunk; -1 turns chunking off."""
    max_prefill_tokens: PositiveInt = 16384
    page_size: PositiveInt = 1
    schedule_policy: Literal["fcfs", "lpm"] = "fcfs"
    schedule_conservativeness: PositiveFloat = 1.0
    context_length: PositiveInt | None = None
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    hierarchical_cache: HierarchicalCache | None = None
    """null: what the GPU evicts is gone."""
    speculative: Speculative | None = None
    """null: a decode step gives one token."""
    weight_precision: Precision = "bf16"
    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16"

    @model_validator(mode="after")
    def _chunk(self) -> EngineOptions:
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < self.page_size:
            raise ValueError("`chunked_prefill_size` is -1 (off) or at least `page_size`")
        return self


# --- admission: may another group start? ------------------------------------------------------------------------------


class SyncBarrier(Section):
    """The next batch starts when the previous one is trained and its weights serve everywhere. N_submitted <= (v + 1)
    B."""

    type: Literal["sync"] = "sync"


class OneStepAhead(Section):
    """The next batch starts when the previous one is fully generated and handed to the trainer. N_submitted <=
    (dequeued + 1) B."""

    type: Literal["one_step_ahead"] = "one_step_ahead"


class BoundedStaleness(Section):
    """AReaL's bound: a group may start while N_submitted <= (version + eta + 1) B. A fraction is verl's
    `staleness_threshold`: that share of one version's groups may start ahead."""

    type: Literal["bounded"] = "bounded"
    max_head_offpolicyness: NonNegativeFloat = 1
    """eta, in published versions."""


class FullyAsync(Section):
    """A constant number of groups in flight; a full buffer blocks the producer (Miles, slime)."""

    type: Literal["fully_async"] = "fully_async"
    async_max_concurrent_groups: PositiveInt | None = None
    """null: `rollout_batch_size`."""
    submission_granularity: Literal["sample", "group"] = "sample"
    """`sample`: a slot frees per finished trajectory and a new group starts once a group's worth is free."""


class OverSampling(Section):
    """Synchronous rounds that start more groups than needed and stop early (RollPacker's short and long rounds).

    A short round starts `over_sampling_ratio` x B groups and stops when B are generated; unfinished tasks are
    collected, and when B of them are there a long round runs them to the end.
    """

    type: Literal["over_sampling"] = "over_sampling"
    over_sampling_ratio: Annotated[float, Field(ge=1)] = 1.25
    long_rounds: bool = True
    """false: unfinished tasks are dropped instead of collected."""
    partial_rollout: bool = False
    """Unfinished groups keep what they have generated and go on in the next round (Miles, slime); nothing is collected
    or dropped. Calls are taken back for as long as the batch is trained."""

    @model_validator(mode="after")
    def _one_fate(self) -> OverSampling:
        if self.partial_rollout and self.long_rounds:
            raise ValueError("unfinished groups go on in the next round or are collected: set `long_rounds: false`")
        return self


Admission = Annotated[
    SyncBarrier | OneStepAhead | BoundedStaleness | FullyAsync | OverSampling, Field(discriminator="type")
]

# --- concurrency: how many may run now? -------------------------------------------------------------------------------


class Unlimited(Section):
    """Every admitted trajectory is sent to an engine at once; the engine's own queue does the rest."""

    type: Literal["unlimited"] = "unlimited"


class FixedConcurrency(Section):
    """At most this many turns in engines, over all engines."""

    type: Literal["fixed"] = "fixed"
    max_concurrent: PositiveInt


class PerEngineConcurrency(Section):
    """At most this many turns in each engine."""

    type: Literal["per_engine"] = "per_engine"
    max_concurrent_per_engine: PositiveInt


class StaticBatch(Section):
    """An engine takes up to so many turns, and no other until all of them have ended: what serving was before
    continuous batching, to compare with."""

    type: Literal["static_batch"] = "static_batch"
    batch_size: PositiveInt


class AimdConcurrency(Section):
    """prime-rl's controller: grow while KV use is low and the cap binds, trim when it is high, cut on preemption."""

    type: Literal["kv_aimd"] = "kv_aimd"
    initial_inflight: PositiveInt = 32
    min_inflight: PositiveInt = 1
    max_inflight: PositiveInt = 1024
    grow_factor: Annotated[float, Field(gt=1)] = 1.25
    grow_below_kv_usage: Fraction = 0.6
    trim_above_kv_usage: Fraction = 0.8
    trim_to: Fraction = 0.7
    preemption_cut: Fraction = 0.8
    report_interval_s: PositiveFloat = 5.0
    """How often engines report their load."""


Concurrency = Annotated[
    Unlimited | FixedConcurrency | PerEngineConcurrency | StaticBatch | AimdConcurrency,
    Field(discriminator="type"),
]


# --- turn order: which turn goes first where not all may run? ------------------------------------------------------


class FifoTurns(Section):
    """In the order in which they wanted an engine."""

    type: Literal["fifo"] = "fifo"


class GroupLength(Section):
    """Seer's context-aware scheduling (arXiv 2511.14617): the first member of every group runs ahead of all others, and
    the longest that a finished member was is what the rest of its group is expected to be. The longest expected goes
    first; a group that nothing is known of counts as long as `max_response_length`."""

    type: Literal["group_length"] = "group_length"


TurnOrder = Annotated[FifoTurns | GroupLength, Field(discriminator="type")]


class Rollout(Section):
    """Engines and the policies in front of them."""

    engine: EngineOptions = EngineOptions()
    admission: Admission
    concurrency: Concurrency = Unlimited()
    routing: Routing = LeastLoad()
    programs: Programs = NoPrograms()
    turn_order: TurnOrder = FifoTurns()
    redundant_members: NonNegativeInt = 0
    """Members of a group that are started beyond `n_samples_per_prompt`. When so many are generated the others are
    given up, so that short replies are the ones that stay."""
    ignore_eos: bool = False
    """Requests always run to `max_new_tokens` (benchmark mode)."""
