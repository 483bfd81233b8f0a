"""The experiments on an engine (prefill tokens x cached tokens, decode batch x context, requests at once, pausing), and
the trainer's updates (trajectories x tokens), both side by side, and the short run for weight updates.

It refuses to know how they are carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

from msgspec import Struct

from testbed.scenario import Scenario
from testbed.scenario.catalogue import gpu_spec, kv_pool_tokens, model_spec
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


class PrefillBatch(Struct, frozen=True):
    """Requests whose prompts were computed together."""

    requests: int
    new_tokens: int
    """Computed prompt tokens of all of them."""
    pairs: float
    """Sum over requests of new x (cached + new / 2)."""
    padded_pairs: float
    """Sum over requests of (cached + new)^2: what an attention computes that pads queries to the length of the keys."""
    seconds: float
    """Until the next batch began; of the last one of an experiment, until the engine looked at its result."""


class EnginePoint(Struct, frozen=True):
    """What one experiment took. Seconds."""

    requests: int
    batches: tuple[PrefillBatch, ...]
    """Of a held experiment, in order: an engine that is resumed takes the first request before the others are there."""
    prefill_s: float
    """Of all of them."""
    decode_steps: int
    """Steps whose time is in `decode_s`."""
    decode_s: float
    context: float
    """Mean over these steps of the sum of contexts."""
    makespan_s: float
    """The first request sent, until the last answer."""
    held: bool


def engine_size(scenario: Scenario, base_dir: Path) -> tuple[int, int, int]:
    """What one engine takes: requests at once, tokens in its KV pool, tokens of one request (output included)."""
    engine = scenario.rollout.engine
    slots = engine.max_total_num_tokens or kv_pool_tokens(
        scenario, model_spec(scenario.model, base_dir), gpu_spec(scenario.cluster.gpu)
    )
    return engine.max_running_requests, slots, min(engine.context_length or slots, slots)


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


class Control(Struct, frozen=True):
    """Pause an engine in `mode` while it generates for `running` requests (of `outputs` tokens, to be still at it),
    flush it if it is idle, resume it."""

    mode: Literal["abort", "retract", "in_place"]
    running: int
    outputs: int


class ControlPoint(Struct, frozen=True):
    """Seconds of its control calls, each asked until answered. `flush_s` is 0 where requests were held."""

    mode: str
    running: int
    pause_s: float
    flush_s: float
    resume_s: float


CONTROL_PROMPT = 8


class BesidePoint(Struct, frozen=True):
    """The same work alone, and while the other of engine and trainer works. `what`: decode, prefill or train."""

    what: str
    alone_s: float
    beside_s: float


class CrowdPoint(Struct, frozen=True):
    """One experiment on all engines at once, and on one engine alone: seconds of a decode step, and of the prefill."""

    requests: int
    decode_alone_s: float
    decode_together_s: float
    prefill_alone_s: float
    prefill_together_s: float


class Beside(Struct, frozen=True):
    """One round: experiments to repeat beside a working trainer, and what an engine generates beside one."""

    experiments: tuple[Experiment, ...]
    generating: Control


def beside(max_requests: int, max_tokens: int, max_context: int, repeats: int) -> list[Beside]:
    """Few and many requests, short and long."""
    chosen = tuple(_some(max_requests, max_tokens, max_context, 4))
    generating = next(c for c in controls(max_requests, max_tokens, max_context, 1) if c.running)
    return [Beside(chosen, generating)] * repeats


def crowd(max_requests: int, max_tokens: int, max_context: int, repeats: int) -> list[Experiment]:
    """One request, and as many as fit."""
    return _some(max_requests, max_tokens, max_context, max_requests) * repeats


def _some(max_requests: int, max_tokens: int, max_context: int, part: int) -> list[Experiment]:
    """Short and long, cold, of the most requests and of a part of them."""
    cold = [e for e in design(max_requests, max_tokens, max_context, 1) if e.held and not e.cached]
    most = max(e.requests for e in cold)
    return [e for e in cold if e.requests in (max(most // part, 1), most) and e.prompt in (8, 128)]


def controls(max_requests: int, max_tokens: int, max_context: int, repeats: int) -> Iterator[Control]:
    """Every mode, idle and with a batch as large as the engine takes."""
    modes: tuple[Literal["abort", "retract", "in_place"], ...] = ("abort", "retract", "in_place")
    outputs = max(min(max_context - CONTROL_PROMPT - 1, int(0.8 * max_tokens / max_requests) - CONTROL_PROMPT), 1)
    for _ in range(repeats):
        for mode in modes:
            yield Control(mode, 0, 0)
            yield Control(mode, max_requests, outputs)


class Traffic(Struct, frozen=True):
    """A closed loop: so many clients, each of which sends its next request when its last one has ended."""

    clients: int
    lengths: tuple[tuple[int, int], ...]
    """(prompt tokens, output tokens) of each request, in the order in which they are sent."""


class TrafficPoint(Struct, frozen=True):
    traffic: Traffic
    seconds: float
    """From the first request sent to the last answer, on one engine."""


def traffic(max_requests: int, max_tokens: int, max_context: int) -> Traffic:
    """Short requests for half of the rows: as many messages for as few steps as in agentic turns."""
    draw = Random(3)
    clients = max(max_requests // 2, 1)
    longest = min(max_context, max_tokens // clients)
    prompt, reply = min(36, max(longest // 2, 1)), min(16, max(longest // 4, 1))
    each = [
        (draw.randint(max(prompt // 3, 1), prompt), draw.randint(max(reply // 4, 1), reply))
        for _ in range(max(TRAFFIC_REQUESTS, 2 * clients))
    ]
    return Traffic(clients, tuple(each))


TRAFFIC_REQUESTS = 24
"""Of a loop; at least two for each client."""


class UpdateSize(Struct, frozen=True):
    """An optimizer update: so many trajectories of so many tokens each."""

    trajectories: int
    tokens: int


UPDATE_SIZES = ((8, 16), (8, 40), (16, 24), (16, 48), (32, 24), (32, 40), (8, 136), (32, 72))
"""(trajectories, tokens) of the updates that a trainer is fitted to."""
ROUNDS = 2
"""Of them for each repeat: a machine's drift is then in all sizes alike."""


def update_sizes(max_tokens: int, repeats: int) -> list[UpdateSize]:
    """Round by round, those whose trajectories have at most `max_tokens`."""
    return [UpdateSize(n, tokens) for n, tokens in UPDATE_SIZES if tokens <= max_tokens] * (ROUNDS * repeats)


GROUPS, REPLY, BATCHES = 2, 8, 8
"""Of the short run for weight updates; its first batch is warm-up."""
SHORT_RUNS = 2
"""How often it is made: the time of an update has a long tail where several engines share a machine, and is longer for
a while, so its mean wants many, and not all at once."""


def short_run(scenario: Scenario) -> tuple[str, Scenario]:
    """(name, scenario): the scenario's deployment, synchronous, one update a batch, with short fixed lengths."""
    workload = LengthsWorkload(
        prompt=FixedLength(tokens=8),
        reply=FixedLength(tokens=REPLY),
        max_response_length=REPLY,
        rewards=Rewards(latency=FixedTime(seconds=0.0)),
    )
    changes = {
        "workload": workload,
        "algorithm": scenario.algorithm.model_copy(update={"rollout_batch_size": GROUPS, "num_steps_per_rollout": 1}),
        "rollout": scenario.rollout.model_copy(update={"admission": SyncBarrier()}),
        "run": scenario.run.model_copy(update={"num_rollout": BATCHES, "warmup_steps": 1, "journal": "full"}),
        "real": scenario.real.model_copy(update={"eval_tasks": None, "save_interval": None}),
    }
    return f"{GROUPS * scenario.algorithm.n_samples_per_prompt}x{REPLY}", scenario.model_copy(update=changes)


LOOKS = 6
"""Parts of the experiments on the engine, with the closed loop before, between and after them."""
LOOKS_AT_UPDATES = 4
"""The same, of updates and the update of a probe."""
One = TypeVar("One")


def in_parts(things: Sequence[One], parts: int, begins: Callable[[One], bool] = lambda one: True) -> list[list[One]]:
    """In order, so many or fewer, about equally long: a part begins with one that may (`begins`)."""
    size, found = -(-len(things) // parts), list[list[One]]()
    for one in things:
        if not found or (len(found[-1]) >= size and begins(one)):
            found.append([])
        found[-1].append(one)
    return found


class Plan(Struct, frozen=True):
    """What is measured on one deployment. `updates` and `beside` are empty where engines and trainer take turns."""

    experiments: list[Experiment]
    crowd: list[Experiment]
    """Of several engines: made on all at once and on each alone."""
    controls: list[Control]
    traffic: Traffic
    """Before and after each of the others: how fast the machine was meanwhile."""
    updates: list[UpdateSize]
    beside: list[Beside]
    short_run: tuple[str, Scenario]

    @property
    def parts(self) -> int:
        """Of which progress is said."""
        lists = (self.experiments, self.crowd, self.controls, self.updates, self.beside)
        return sum(len(each) for each in lists) + SHORT_RUNS
