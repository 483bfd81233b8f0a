"""Events: what a backend tells the core. Light metadata only: ids, counts, versions, times (seconds), tokens.

Every event carries `t`, the time at which it happened (virtual or monotonic wall seconds since the start of the run).
Times never fall. Token ids, log-probs and other heavy data stay in the backend's experience store, keyed by trajectory
and turn."""

from __future__ import annotations

from msgspec import Struct

Span = tuple[int, int, int]
"""(version, start, end): output tokens start..end-1 of a turn were made by this version."""


class Event(Struct, frozen=True, gc=False, tag_field="type"):
    """Base. `t` in seconds."""

    t: float


class PathCost(Struct, frozen=True, gc=False):
    """What one publication to all engines by one path is expected to cost, seconds, as the backend models or measured
    it."""

    path: str
    prepare_s: float
    transfer_s: float
    apply_s: float
    requantize_s: float

    @property
    def total_s(self) -> float:
        return self.prepare_s + self.transfer_s + self.apply_s + self.requantize_s


class RunStarted(Event, frozen=True, tag=True):
    """The backend is up and every engine serves version 0."""

    path_costs: tuple[PathCost, ...] = ()
    """For the choice of a path by total cost; empty if the scenario fixes the path."""
    kv_tokens: tuple[int, ...] = ()
    """KV slots of each engine, in tokens."""


class TaskArrived(Event, frozen=True, tag=True):
    """The data source delivers a task: for `group`, as answer to `DrawTask`, or unasked (`group` = -1: an open
    arrival)."""

    group: int
    task: int
    prompt_tokens: int
    blocks: tuple[int, ...] = ()
    """Prefix block ids of the prompt, for routing; equal leading ids are a shared prefix."""
    block_tokens: int = 0
    """Tokens of one block."""
    environment: bool = False
    """Whether trajectories of this task need a tool environment."""
    members: int = 0
    """Trajectories wanted; 0: the algorithm's `n_samples_per_prompt`."""


class TasksExhausted(Event, frozen=True, tag=True):
    """The data source has no task for `group`, and never will have."""

    group: int = -1


class EnvironmentReady(Event, frozen=True, tag=True):
    trajectory: int


class TurnFinished(Event, frozen=True, tag=True):
    """A model call ended and its slot is free."""

    trajectory: int
    turn: int
    engine: int
    prompt_tokens: int
    output_tokens: int
    spans: tuple[Span, ...]
    cached_tokens: int
    first_token_t: float
    started_t: float
    """When the engine first worked on it (end of queueing in the engine)."""
    finish_reason: str
    """`stop`, `length`, `tool_calls`, or `abort`: the first part of a turn that was taken back and goes on later."""
    continues: bool = False
    """The trajectory goes on: a tool is to be run, then another turn; or the rest of this one."""
    recomputed_tokens: int = 0
    """Prompt tokens computed again although this trajectory had computed them before (evicted, flushed, retracted)."""
    kv_version: int = -1
    """Oldest weight version whose KV was reused; -1: none."""
    retractions: int = 0


class PrefillFinished(Event, frozen=True, tag=True):
    """A prefill engine has computed a prompt and its first token; the turn goes on in a decode engine. A turn of one
    token ends there (`TurnFinished`)."""

    trajectory: int
    turn: int
    engine: int
    started_t: float
    kv_version: int
    """Oldest weight version among the KV of the prompt."""


class TurnFailed(Event, frozen=True, tag=True):
    """A model call was lost, refused or aborted. `reason`: `aborted`, `engine_lost`, `refused`, ..."""

    trajectory: int
    turn: int
    engine: int
    reason: str
    output_tokens: int = 0
    """Generated tokens that are lost with it."""


class ToolFinished(Event, frozen=True, tag=True):
    trajectory: int
    observation_tokens: int
    failed: bool = False
    """The trajectory cannot go on: its tool was refused, or its environment is lost."""
    fault: str = ""
    """Which limit the call passed (`time`, `memory`, `output`, `space`, `processes`, `queue`), or `died`; the
    trajectory goes on with an error for an observation, unless it `failed`."""


class SignalReady(Event, frozen=True, tag=True):
    """One signal of one or more trajectories is there."""

    signal: str
    trajectories: tuple[int, ...]
    values: tuple[float, ...] = ()
    """Rewards, one a trajectory; empty for signals whose values are heavy."""


class TrainStepFinished(Event, frozen=True, tag=True):
    """One optimizer update is done."""

    batch: int
    update: int
    """0 .. num_steps_per_rollout - 1 within the batch."""


class WeightsPrepared(Event, frozen=True, tag=True):
    """Converted, or the delta is built and published: ready to travel."""

    version: int
    seconds: float = 0.0
    bytes: int = 0


class TrainerReleased(Event, frozen=True, tag=True):
    """The trainer's part in this publication is over (snapshot taken, or collective copy done): it may train again."""

    version: int


class EnginePaused(Event, frozen=True, tag=True):
    engine: int


class WeightsCopied(Event, frozen=True, tag=True):
    engine: int
    version: int


class EngineReady(Event, frozen=True, tag=True):
    """Requantised (where needed) and in agreement with the trainer's checksums."""

    engine: int
    version: int


class EngineResumed(Event, frozen=True, tag=True):
    engine: int
    version: int


class WeightUpdateFailed(Event, frozen=True, tag=True):
    """`stage`: prepare (engine = -1), pause, copy, requantize, agree."""

    engine: int
    version: int
    stage: str
    reason: str


class PoolSwitched(Event, frozen=True, tag=True):
    pool: int
    phase: str


class EngineLost(Event, frozen=True, tag=True):
    engine: int


class EngineJoined(Event, frozen=True, tag=True):
    engine: int
    version: int


class LoadReported(Event, frozen=True, tag=True):
    """Counters of one engine; the seconds are cumulative since the start of the run."""

    engine: int
    running: int
    waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    retractions: int
    prefill_s: float
    """Seconds of steps that computed new prompt tokens for the first time."""
    recompute_s: float
    """Seconds of steps (shares of steps) that computed prompt tokens again."""
    decode_s: float


class TimerFired(Event, frozen=True, tag=True):
    timer: int


AnyEvent = (
    RunStarted
    | TaskArrived
    | TasksExhausted
    | EnvironmentReady
    | TurnFinished
    | PrefillFinished
    | TurnFailed
    | ToolFinished
    | SignalReady
    | TrainStepFinished
    | WeightsPrepared
    | TrainerReleased
    | EnginePaused
    | WeightsCopied
    | EngineReady
    | EngineResumed
    | WeightUpdateFailed
    | PoolSwitched
    | EngineLost
    | EngineJoined
    | LoadReported
    | TimerFired
)
