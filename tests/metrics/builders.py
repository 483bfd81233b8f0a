"""Hand-made pieces of a run: experiences with defaults, and a run's records written out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.actions import Experience
from testbed.metrics.run import RunMetrics
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of

Records = Sequence[tuple[said.Event, Sequence[do.Action]]]


def experience(**changes: Any) -> Experience:
    """One trajectory of 100 tokens, dispatched, generated and taken at once on version 0."""
    fields: dict[str, Any] = {
        "trajectory": 0, "group": 0, "task": 0, "turns": 1, "prompt_tokens": 10, "output_tokens": 100, "masked_tokens":
        0, "observation_tokens": 0, "reward": 1.0, "dispatch_version": 0, "oldest_version": 0, "newest_version": 0,
        "completion_deployed": 0, "dequeue_deployed": 0, "trainer_version": 0, "dispatch_trainer_version": 0,
        "submitted_index": 0, "trained_before": 0, "submitted_t": 0.0, "dispatched_t": 0.0, "first_token_t": 0.0,
        "generated_t": 0.0, "ready_t": 0.0, "group_ready_t": 0.0, "dequeued_t": 0.0, "use": 0, "corrected": False,
        "staleness": 0,
    }  # fmt: skip
    return Experience(**{**fields, **changes})


def start(trajectory: int, engine: int, group: int = 0, attempt: int = 0, turn: int = 0) -> do.StartTurn:
    return do.StartTurn(trajectory, turn, engine, group, group, trajectory % 2, attempt, "test")


def finished(t: float, trajectory: int, engine: int, started: float, **changes: Any) -> said.TurnFinished:
    """Prefill takes the first second; 100 tokens."""
    fields: dict[str, Any] = {
        "t": t, "trajectory": trajectory, "turn": 0, "engine": engine, "prompt_tokens": 10, "output_tokens": 100,
        "spans": ((0, 0, 100),), "cached_tokens": 0, "first_token_t": started + 1, "started_t": started,
        "finish_reason": "stop",
    }  # fmt: skip
    return said.TurnFinished(**{**fields, **changes})


def fold(scenario: Scenario, records: Iterable[tuple[said.Event, Sequence[do.Action]]]) -> RunMetrics:
    metrics = RunMetrics(scenario, layout_of(scenario))
    for event, actions in records:
        metrics.observe(event, actions)
    return metrics


def nonzero(seconds: dict[str, float]) -> dict[str, float]:
    return {cause: s for cause, s in seconds.items() if abs(s) > 1e-9}


def sync_step(t: float, batch: int, reward: tuple[float, ...] = (5.0, 5.0, 5.0, 5.0)) -> Records:
    """One synchronous step of 4 trajectories on 2 engines that starts at `t` and whose weights serve at t + 70.5.

    Engine 0: trajectories end at 10 and 20. Engine 1: at 30 and 40. Rewards 5 s later: ready at 15, 25, 35, 45.
    Train 45 to 60; prepare 60 to 62; paused at 62.5; copied at 65 (engine 0) and 66 (engine 1), where the trainer is
    released; ready at 67 and 70; resumed at 70.5. The step ends at t + 60.
    """
    ids = [4 * batch + i for i in range(4)]
    engines = (0, 0, 1, 1)
    ends = [t + 10.0, t + 20.0, t + 30.0, t + 40.0]
    ready = [end + r for end, r in zip(ends, reward, strict=True)]
    all_ready = max(ready)
    taken = tuple(
        experience(
            trajectory=ids[i],
            group=batch * 2 + i // 2,
            dispatch_version=batch,
            oldest_version=batch,
            newest_version=batch,
            completion_deployed=batch,
            dequeue_deployed=batch,
            trainer_version=batch,
            dispatch_trainer_version=batch,
            submitted_index=ids[i],
            submitted_t=t,
            dispatched_t=t,
            first_token_t=t + 1,
            generated_t=ends[i],
            ready_t=ready[i],
            group_ready_t=max(ready[i - i % 2 : i - i % 2 + 2]),
            dequeued_t=all_ready,
        )
        for i in range(4)
    )
    version = batch + 1
    records: list[tuple[said.Event, Sequence[do.Action]]] = [
        (
            said.TimerFired(t, 0),
            [start(ids[i], engines[i], group=batch * 2 + i // 2) for i in range(4)]
            + [do.Note("admission", "barrier"), do.Note("trainer", "empty")],
        ),
        *((finished(ends[i], ids[i], engines[i], t), [do.ComputeSignals("reward", (ids[i],), -1)]) for i in range(4)),
        *(
            (said.SignalReady(ready[i], "reward", (ids[i],), (1.0,)), [do.Note("trainer", "not_ready")])
            for i in range(3)
        ),
        (
            said.SignalReady(all_ready, "reward", (ids[3],), (1.0,)),
            [do.Train(batch, 1, 1, taken, "fifo"), do.Note("trainer", "busy")],
        ),
        (
            said.TrainStepFinished(t + 60, batch, 0),
            [
                do.Retire(tuple(ids[:2]), batch * 2, "trained", "", 200),
                do.Retire(tuple(ids[2:]), batch * 2 + 1, "trained", "", 200),
                do.PrepareWeights(version, version, "broadcast", (0, 1), 1, "interval"),
                do.Note("trainer", "publishing"),
            ],
        ),
        (said.WeightsPrepared(t + 62, version, 2.0, 16), [do.PauseEngine(e, "retract", version) for e in (0, 1)]),
        (said.EnginePaused(t + 62.5, 0), []),
        (said.EnginePaused(t + 62.5, 1), [do.CopyWeights(e, version, "broadcast", (0, 1)) for e in (0, 1)]),
        (said.WeightsCopied(t + 65, 0, version), [do.RequantizeWeights(0, version, "fp8")]),
        (said.WeightsCopied(t + 66, 1, version), [do.RequantizeWeights(1, version, "fp8")]),
        (said.TrainerReleased(t + 66, version), [do.Note("trainer", "empty")]),
        (said.EngineReady(t + 67, 0, version), []),
        (said.EngineReady(t + 70, 1, version), [do.ResumeEngine(e, version, "flush") for e in (0, 1)]),
        (said.EngineResumed(t + 70.5, 0, version), []),
        (said.EngineResumed(t + 70.5, 1, version), []),
    ]
    return sorted(records, key=lambda r: r[0].t)
