"""The experiments on an engine (prefill tokens x cached tokens, decode batch x context, requests at once), and the
short runs for trainer and weight updates (trajectories x tokens).

It refuses to know how they are carried out.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from testbed.scenario import Scenario
from testbed.scenario.rollout import SyncBarrier
from testbed.scenario.workload import FixedLength, FixedTime, LengthsWorkload, Rewards

OUTPUTS = 12
"""Tokens that every request of a batch experiment generates."""


class Experiment(Struct, frozen=True):
    """`requests` at once, of `prompt` tokens each, of which the first `cached` are in the cache.

    `held`: the engine is paused until all are there, so that one batch takes them; else they arrive as they come, with
    one output token each.
    """

    requests: int
    prompt: int
    cached: int = 0
    held: bool = True


class EnginePoint(Struct, frozen=True):
    """What one experiment took. Seconds."""

    requests: int
    new_tokens: int
    """Computed prompt tokens of all requests."""
    pairs: float
    """Sum over requests of new x (cached + new / 2)."""
    prefill_s: float
    decode_steps: int
    """Steps whose time is in `decode_s`."""
    decode_s: float
    context: float
    """Mean over these steps of the sum of contexts."""
    makespan_s: float
    """The first request sent, until the last answer."""
    held: bool


def design(max_requests: int, max_tokens: int, max_context: int, repeats: int) -> Iterator[Experiment]:
    """Batches 1, 2, 4, ... times contexts 8, 32, 128, ... as the engine can hold, each with a cold cache and with the
    same prompts again; and bursts of short requests. `max_context`: tokens of one request, output included."""
    batches = [b for b in (1, 2, 4, 8, 16, 32, 64) if b <= max_requests]
    contexts = [c for c in (8, 32, 128, 512, 1024) if c + OUTPUTS <= max_context]
    for _ in range(repeats):
        for b in batches:
            for c in contexts:
                if b * (c + OUTPUTS) <= 0.8 * max_tokens:
                    yield Experiment(b, c)
                    yield Experiment(b, c, cached=c - 1)
        for b in batches:
            yield Experiment(b, min(8, max_context - 1), held=False)
            yield Experiment(2 * b, min(8, max_context - 1), held=False)


BATCHES = 4
"""Of a short run; the first is warm-up."""


def short_runs(scenario: Scenario) -> list[tuple[str, Scenario]]:
    """(name, scenario): the scenario's deployment, synchronous, one update a batch, with fixed lengths: batches of 2
    and 8 groups times replies of 8, 64 and 256 tokens, as a request's context allows."""
    engine = scenario.rollout.engine
    context = min(engine.context_length or 1 << 30, engine.max_total_num_tokens or 1 << 30)
    members = scenario.algorithm.n_samples_per_prompt
    runs = []
    for groups in (2, 8):
        for reply in (r for r in (8, 64, 256) if r + 16 < context):
            workload = LengthsWorkload(
                prompt=FixedLength(tokens=8),
                reply=FixedLength(tokens=reply),
                max_response_length=reply,
                rewards=Rewards(latency=FixedTime(seconds=0.0)),
            )
            changes = {
                "workload": workload,
                "algorithm": scenario.algorithm.model_copy(
                    update={"rollout_batch_size": groups, "num_steps_per_rollout": 1}
                ),
                "rollout": scenario.rollout.model_copy(update={"admission": SyncBarrier()}),
                "run": scenario.run.model_copy(update={"num_rollout": BATCHES, "warmup_steps": 1, "journal": "full"}),
                "real": scenario.real.model_copy(update={"eval_tasks": None, "save_interval": None}),
            }
            runs.append((f"{groups * members}x{reply}", scenario.model_copy(update=changes)))
    return runs
