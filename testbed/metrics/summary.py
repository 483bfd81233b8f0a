"""The figures of one run: the typed result of the metric folds, and the only thing a report is made from.

Seconds, tokens, GPU-seconds. Means and shares are over the measured steps (after warm-up) unless a field says
otherwise. It refuses to know how the figures came about: the folds do, and reports only read this.
"""

from __future__ import annotations

from msgspec import Struct, field

from testbed.metrics.scores import Score

CAUSES: tuple[str, ...] = (
    "generate",
    "generate_tail",
    "train",
    "signals",
    "weight_update",
    "phase_switch",
    "recompute_kv",
    "generate_dropped",
    "idle_longest",
    "idle_trainer",
    "idle_data",
    "idle_buffer_full",
    "idle_no_work",
)
"""What a GPU does or waits for. `generate_tail`: an engine under a quarter of its slots. `signals`: forward passes
for log-probs, reference, critic. `idle_longest`: this batch's last trajectories run elsewhere. `idle_trainer`:
engines wait for the trainer.
`idle_data`: the trainer waits for ready groups. `idle_buffer_full`: the buffer blocks the producer. `idle_no_work`:
the data source is empty or tools hold every trajectory."""


class Distribution(Struct):
    """Of whole numbers or seconds, streamed. `histogram` maps value (or bin) -> count, for small whole numbers."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    histogram: dict[int, int] = field(default_factory=dict)


class PoolTime(Struct):
    """GPU time of one lane by cause. A colocated pool is one lane; otherwise engines and trainer are two."""

    name: str
    lane: str
    """`engines`, `trainer` or `shared`."""
    gpus: int
    gpu_seconds: dict[str, float]
    """By cause, over the measured window; sums to gpus x measured wall time."""


class StalenessReading(Struct):
    """One measure of staleness at the two events."""

    completion: Distribution
    dequeue: Distribution


class WeightUpdate(Struct):
    """Means per publication, seconds."""

    count: int = 0
    failed: int = 0
    path: str = ""
    bytes: float = 0.0
    prepare_s: float = 0.0
    """Conversion or delta; overlaps generation."""
    drain_s: float = 0.0
    """From the first pause request until every participant is paused (under `finish`: until requests have ended)."""
    copy_s: float = 0.0
    requantize_s: float = 0.0
    barrier_s: float = 0.0
    """First participant ready until the last is."""
    pause_s: float = 0.0
    """Mean over engines: EnginePaused to EngineResumed."""
    total_s: float = 0.0
    """PrepareWeights to the last EngineResumed."""
    effective_to_first_request_s: float = 0.0
    """Last EngineResumed to the first turn started on the new version."""


class TrajectoryTime(Struct):
    """Mean seconds of a trained trajectory's life, by what it was doing; they sum to `total`."""

    queue: float = 0.0
    """Submitted, not yet worked on by an engine (core queue and engine queue)."""
    prefill: float = 0.0
    decode: float = 0.0
    tool: float = 0.0
    environment: float = 0.0
    paused: float = 0.0
    """Engine paused for a weight update or a phase switch while it was in flight."""
    held: float = 0.0
    """Its program was paused while it wanted a model call."""
    waits_for_signals: float = 0.0
    waits_for_group: float = 0.0
    in_buffer: float = 0.0
    """Group ready, not yet in a batch."""
    total: float = 0.0


class KvReuse(Struct):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    retractions: int = 0
    kv_age: Distribution = field(default_factory=Distribution)
    """Deployed version minus the version of the oldest KV reused (only under `kv: keep`)."""


class ProgramFigures(Struct):
    """Programs (trajectories that use tools) against memory, over the measured steps. Means are over time."""

    turns: int = 0
    """Model calls that ended; one that was taken back and went on counts once."""
    pauses: int = 0
    """Programs that were paused or had to wait to be let in."""
    context_share_mean: float = 0.0
    """Contexts of all programs that have begun and not ended / KV of all engines. Above 1 they do not fit together."""
    context_share_max: float = 0.0
    programs_mean: float = 0.0
    waiting_mean: float = 0.0
    """Paused or not let in."""
    turns_per_min: float = 0.0
    tool_faults: dict[str, int] = field(default_factory=dict)
    """Tool calls that passed a limit, died or were refused, by which."""


class BiasBin(Struct):
    """Trajectories of about one length (output tokens, as planned) or of tasks about as hard (success rate)."""

    by: str
    """`length` or `difficulty`."""
    low: float
    high: float
    trained: int
    given_up: int
    """Ended without being trained."""
    delay_s: float
    """Mean seconds from the first call of a trained one's task until its batch was taken."""
    delay_steps: float
    """The same in batches that were trained meanwhile."""

    @property
    def given_up_share(self) -> float:
        return self.given_up / (self.trained + self.given_up)


class Waste(Struct):
    """Generated tokens that no loss used, by reason."""

    generated_tokens: int = 0
    trained_tokens: int = 0
    dropped_tokens: dict[str, int] = field(default_factory=dict)
    """reason -> tokens (`stale`, `zero_variance`, `over_sampled`, `aborted`, ...)."""
    masked_tokens: int = 0
    corrected_trajectories: int = 0
    trained_trajectories: int = 0
    dropped_trajectories: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Dropped, aborted and filtered tokens over generated tokens."""
        return sum(self.dropped_tokens.values()) / self.generated_tokens if self.generated_tokens else 0.0


class BufferTime(Struct):
    """Trainer waits for data, seconds per step, by what the buffer looked like; and what ready groups waited."""

    empty_s: float = 0.0
    not_ready_s: float = 0.0
    """Groups are present, none is ready enough to make a batch."""
    too_few_ready_s: float = 0.0
    """Some are ready, fewer than a batch."""
    ready_wait_s: float = 0.0
    """Mean seconds a ready group waits for its batch."""
    producer_blocked_s: float = 0.0
    """Seconds per step in which a full buffer held back admission."""


class StepRecord(Struct):
    """One RL step: from one batch's last update to the next one's."""

    batch: int
    start_t: float
    end_t: float
    gpu_seconds: dict[str, float]
    trained_tokens: int
    generated_tokens: int
    staleness_mean: float
    staleness_max: int
    reward_mean: float = 0.0
    """Of the batch's trajectories; in a simulation the workload's own draws, which learn nothing."""
    learning: dict[str, float] = field(default_factory=dict)
    """Name -> mean over the batch's updates, of what has a meaning in this run (`real.trainer.stats.batch_figures`).
    Empty in a simulation, and in summaries from before it was kept."""
    ratios: dict[str, dict[int, int]] = field(default_factory=dict)
    """Histograms over the batch's updates, bin (`testbed.metrics.ratios`) -> tokens: `ratio` is what the loss reads,
    `engine_ratio` trainer to engine before the update. Empty where `learning` is."""


class RunSummary(Struct):
    """All figures of one run."""

    name: str
    backend: str
    """`simulated` or `real`."""
    seed: int
    scenario_hash: str
    workload_hash: str
    """Equal for runs that were given the same tasks and lengths."""
    num_gpus: int
    measured_steps: int
    warmup_steps: int
    measured_s: float
    """Wall (virtual) time of the measured steps."""
    wall_s: float
    """Whole run."""
    step_time: Distribution
    step_time_mean_s: float
    pools: list[PoolTime]
    trained_tokens_per_s_per_gpu: float
    """Actor tokens that carried loss / measured time / all GPUs."""
    generated_tokens_per_s_per_gpu: float
    """Output tokens of all turns, dropped ones included / measured time / all GPUs."""
    trajectories_per_s: float
    cost_usd_per_1000_steps: float
    staleness_measure: str
    """The scenario's own measure."""
    staleness: dict[str, StalenessReading]
    """Every measure, keyed by its name."""
    staleness_in_generation: float
    """Mean share of the default measure that arose before completion; the rest arose in the buffer."""
    staleness_in_buffer: float
    staleness_bound: int | None
    output_length: Distribution
    capped_share: float
    """Trajectories ended by the length cap."""
    waste: Waste
    buffer: BufferTime
    kv: KvReuse
    weight_update: WeightUpdate
    trajectory: TrajectoryTime
    overlap_s_per_step: float
    """Seconds per step in which the trainer trains while engines generate."""
    hidden_generation_share: float
    """Engine-seconds of generation while the trainer trains / all engine-seconds of generation."""
    steps: list[StepRecord]
    events: int
    """Events the core handled."""
    backend_events: int
    """Wake-ups of the backend's clock (simulated backend)."""
    finish_reason: str
    kinds: dict[str, str]
    """What each family of numbers rests on: `engine_step`, `reply_lengths`, `trainer`, `links`, `tools`, `price` ->
    measured | calibrated | analytic | published | simulated | assumed."""
    marks: dict[str, float]
    """Shares of cost-model answers outside their table's range, by model (`decode`, `prefill`)."""
    held_out: list[Score] = field(default_factory=list)
    """On tasks that the run does not train on, of all kinds together: before the first batch and after the last; empty
    where nobody asked (`real.eval_tasks`)."""
    bias: list[BiasBin] = field(default_factory=list)
    """Which lengths and difficulties a tail rule trains, gives up and delays, over the whole run; empty without such a
    rule, and where plans are not known (most real runs)."""
    programs: ProgramFigures | None = None
    """None where every trajectory is one model call."""
    rewarded: bool = True
    """Whether the algorithm asks for rewards: without, `StepRecord.reward_mean` says nothing."""
    engine_weight_bytes: float = 0.0
    """Of one engine's weights as the format that it serves stores them; 0: not said."""
    clip: tuple[float, float] | None = None
    """Ratios between which the loss does not clip; None where it clips nothing, and in a simulation."""
    engine_precision: str = ""
    """What engines serve, and what the trainer computes with; empty in summaries from before they were kept."""
    training_precision: str = ""
