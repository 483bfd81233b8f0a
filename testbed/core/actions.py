"""Actions: what the core asks of a backend. They carry no time: an action happens at the time of the event that caused
it.

Decisions that people ask about carry `why`, the rule that made them, so that a journal explains itself.
"""

from __future__ import annotations

from msgspec import Struct


class Action(Struct, frozen=True, gc=False, tag_field="type"):
    """Base of all actions."""


# --- rollout ----------------------------------------------------------------------------------------------------------


class DrawTask(Action, frozen=True, tag=True):
    """Take the next task of the data source for this group; answered by `TaskArrived` or `TasksExhausted`."""

    group: int
    why: str
    task: int = -1
    """>= 0: this task again (a retry), not the next one."""


class PrepareEnvironment(Action, frozen=True, tag=True):
    trajectory: int
    group: int
    task: int
    member: int


class ReleaseEnvironment(Action, frozen=True, tag=True):
    trajectory: int


class StartTurn(Action, frozen=True, tag=True):
    """Generate. The request id is `trajectory-turn`; sent again after a loss it keeps that id."""

    trajectory: int
    turn: int
    engine: int
    group: int
    task: int
    member: int
    """Index within the group: 0 .. n-1."""
    attempt: int
    """0, or how often this turn was sent before."""
    why: str


class FetchPrefix(Action, frozen=True, tag=True):
    """Before the turn that is sent next starts: bring the KV of its prompt's first `tokens` tokens from `source`, as
    far as that has it."""

    trajectory: int
    turn: int
    engine: int
    source: int
    tokens: int


class HandOver(Action, frozen=True, tag=True):
    """Send the KV of this turn's prompt from its prefill engine to the decode engine `to`, which goes on."""

    trajectory: int
    turn: int
    engine: int
    to: int
    why: str


class AbortTurn(Action, frozen=True, tag=True):
    """Answered by `TurnFailed(reason="aborted")`, or by `TurnFinished` if it ended first."""

    trajectory: int
    turn: int
    engine: int
    why: str
    keep: bool = False
    """What it has generated is kept: answered by `TurnFinished(finish_reason="abort")`, if that is anything, and the
    turn goes on from there when it is sent again."""


class RunTool(Action, frozen=True, tag=True):
    trajectory: int
    turn: int


class PauseProgram(Action, frozen=True, tag=True):
    """From now on this program gets no model call, and its KV may be evicted; its environment and a tool that runs are
    left alone. A call that is in an engine is taken back by an `AbortTurn` of its own."""

    trajectory: int
    engine: int
    """Where its KV lies; -1: it has none yet."""
    why: str


class RestoreProgram(Action, frozen=True, tag=True):
    """Its calls are sent again, to this engine."""

    trajectory: int
    engine: int
    why: str


class ComputeSignals(Action, frozen=True, tag=True):
    """Compute one signal for these trajectories. `pool` = -1: a service outside the GPU pools (verifier, external
    model)."""

    signal: str
    trajectories: tuple[int, ...]
    pool: int


# --- experience -------------------------------------------------------------------------------------------------------


class Experience(Struct, frozen=True, gc=False):
    """What the core knows of one trajectory when a batch takes it. Versions are published versions unless named
    otherwise."""

    trajectory: int
    group: int
    task: int
    turns: int
    prompt_tokens: int
    """First prompt."""
    output_tokens: int
    """Actor tokens: the ones that carry loss."""
    masked_tokens: int
    """Of these, masked because their version is beyond the bound (`action: mask`)."""
    observation_tokens: int
    reward: float
    dispatch_version: int
    oldest_version: int
    newest_version: int
    completion_deployed: int
    """Deployed version when the trajectory was generated."""
    dequeue_deployed: int
    trainer_version: int
    """Trainer version (optimizer updates) before this batch's first update."""
    dispatch_trainer_version: int
    submitted_index: int
    """How many trajectories had been submitted before it."""
    trained_before: int
    """Trajectories trained before this batch."""
    submitted_t: float
    dispatched_t: float
    first_token_t: float
    generated_t: float
    ready_t: float
    """Of the trajectory: all its signals are there."""
    group_ready_t: float
    dequeued_t: float
    use: int
    """0 for the first batch that uses it, 1 for the second, ..."""
    corrected: bool
    staleness: int
    """The reading that the staleness policy decided on."""


class Train(Action, frozen=True, tag=True):
    """Train exactly this batch in this order, in `updates` optimizer updates."""

    batch: int
    pool: int
    updates: int
    experiences: tuple[Experience, ...]
    why: str


class Retire(Action, frozen=True, tag=True):
    """Trajectories whose life is over; the backend frees their records and KV. Each trajectory is retired exactly once.

    `outcome`: `trained`, `dropped`, `aborted`, `failed`; `reason` says why (`stale`, `zero_variance`, `over_sampled`,
    ...)."""

    trajectories: tuple[int, ...]
    group: int
    outcome: str
    reason: str
    output_tokens: int
    """Generated tokens of all of them, all turns."""
    staleness: int = -1
    """The reading that led to a drop, where there is one."""


# --- weights and pools ------------------------------------------------------------------------------------------------


class PrepareWeights(Action, frozen=True, tag=True):
    """Convert, or build and publish a delta. `overlapped`: generation goes on meanwhile."""

    version: int
    trainer_version: int
    path: str
    participants: tuple[int, ...]
    pool: int
    why: str


class PauseEngine(Action, frozen=True, tag=True):
    engine: int
    mode: str
    version: int


class CopyWeights(Action, frozen=True, tag=True):
    engine: int
    version: int
    path: str
    participants: tuple[int, ...]
    """Engines that copy in the same wave (a collective path serves them at once)."""


class RequantizeWeights(Action, frozen=True, tag=True):
    """Convert after the copy (if the scenario asks) and compare checksums; answered by `EngineReady`."""

    engine: int
    version: int
    quantization: str


class FlushCache(Action, frozen=True, tag=True):
    engine: int


class ResumeEngine(Action, frozen=True, tag=True):
    """Serve `version` from now on; new requests see KV by `kv`. A failed update resumes with the old version."""

    engine: int
    version: int
    kv: str


class SwitchPool(Action, frozen=True, tag=True):
    pool: int
    phase: str
    why: str


class SetTimer(Action, frozen=True, tag=True):
    timer: int
    at: float


class Note(Action, frozen=True, tag=True):
    """Nothing to do: the core says why something waits, whenever the reason changes. Metrics read idle causes from it.

    `subject` = `admission`: `open` | `barrier` | `staleness_bound` | `capacity` | `buffer_full` | `no_task`.
    `subject` = `engine:N`: `removed` (the core gave it up; it counts as lost until `EngineJoined`).
    `subject` = `trainer`: `busy` | `publishing` | `empty` | `not_ready` | `too_few_ready` | `switching`.
    """

    subject: str
    state: str


class Finish(Action, frozen=True, tag=True):
    reason: str


AnyAction = (
    DrawTask
    | PrepareEnvironment
    | ReleaseEnvironment
    | StartTurn
    | FetchPrefix
    | HandOver
    | AbortTurn
    | RunTool
    | PauseProgram
    | RestoreProgram
    | ComputeSignals
    | Train
    | Retire
    | PrepareWeights
    | PauseEngine
    | CopyWeights
    | RequantizeWeights
    | FlushCache
    | ResumeEngine
    | SwitchPool
    | SetTimer
    | Note
    | Finish
)
