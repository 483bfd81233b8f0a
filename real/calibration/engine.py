"""Experiments on an engine that is up, whose own counters say what they took.

Prompts are random token ids. Prefill and decode seconds are the scheduler's own counters; a request's way to it is what
they leave of the makespan. It refuses to know what is fitted to the measurements.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from real.engines.answers import Generated
from real.engines.client import EngineClient
from testbed.calibration.design import (
    CONTROL_PROMPT,
    OUTPUTS,
    Control,
    ControlPoint,
    EnginePoint,
    Experiment,
    PrefillBatch,
    Traffic,
    TrafficPoint,
)

SETTLE_S = 0.05
"""From the last request sent to a paused engine until it is resumed, and from the last answer until counters are read;
and `PER_REQUEST_S` for each request."""
PER_REQUEST_S = 0.004
FIRST_TOKEN = 16
"""Token ids below it may be special ones."""


async def measure(
    clients: Sequence[EngineClient],
    experiments: Iterable[Experiment],
    vocab_size: int,
    done: Callable[[Experiment], None],
) -> list[EnginePoint]:
    """Every experiment on all engines side by side: one point for each engine, in order; `done` after each. Raises
    `EngineGone` and `EngineRefused`."""
    draw, points = random.Random(0), []
    prompts: list[list[int]] = []
    for number, e in enumerate(experiments):
        if not e.cached:
            prompts = prompts_of(draw, e, vocab_size)
        points += await asyncio.gather(*(measured(c, e, prompts, str(number)) for c in clients))
        done(e)
    await asyncio.gather(*(c.flush() for c in clients))
    return points


def prompts_of(draw: random.Random, e: Experiment, vocab_size: int) -> list[list[int]]:
    """Random token ids."""
    return [[draw.randrange(FIRST_TOKEN, vocab_size) for _ in range(e.prompt)] for _ in range(e.requests)]


async def measured(client: EngineClient, e: Experiment, prompts: Sequence[list[int]], name: str) -> EnginePoint:
    """One experiment on one engine; its requests are called after `name`."""
    if not e.cached:
        await client.flush()
    before = await _counters(client)
    if e.held:
        await client.pause("in_place")
    sent = time.monotonic()
    outputs = OUTPUTS if e.held else 1
    asked = [asyncio.create_task(generate(client, f"{name}-{i}", p, outputs)) for i, p in enumerate(prompts)]
    if e.held:
        await asyncio.sleep(SETTLE_S + PER_REQUEST_S * e.requests)
        await client.resume()
    answers = await asyncio.gather(*asked)
    makespan = time.monotonic() - sent
    await asyncio.sleep(SETTLE_S)
    return _point(e, answers, before, await _counters(client), makespan)


async def server_facts(client: EngineClient) -> tuple[dict[str, Any], int]:
    """Arguments as the server resolved them (plain values only), and its KV slots."""
    info = await client.get("/server_info")
    plain = {k: v for k, v in info.items() if isinstance(v, (str, int, float, bool)) and k not in PRIVATE}
    return plain, (await client.loads()).kv_total_tokens


PRIVATE = (
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "host",
    "port",
    "nccl_port",
    "dist_init_addr",
    "log_dir",
)
"""Of this start of the server, or of this machine's folders: says nothing about speed."""


async def generate(client: EngineClient, name: str, prompt: list[int], outputs: int) -> Generated:
    return await client.generate(rid=f"calibrate-{name}", input_ids=prompt, max_new_tokens=outputs, ignore_eos=True)


async def _counters(client: EngineClient) -> tuple[float, int, float]:
    """(prefill seconds, decode steps, decode seconds) so far."""
    load = (await client.get("/v1/loads?include=core"))["loads"][0]
    moments = load["decode_moments"] or (0, 0, 0.0)
    return load["total_prefill_busy_us"] / 1e6, int(moments[0]), moments[2] / 1e6


def _point(
    e: Experiment,
    answers: list[Generated],
    before: tuple[float, int, float],
    after: tuple[float, int, float],
    makespan: float,
) -> EnginePoint:
    steps = after[1] - before[1]
    prefill_s = after[0] - before[0]
    return EnginePoint(
        requests=e.requests,
        batches=_batches(e.prompt, answers, prefill_s) if e.held else (),
        prefill_s=prefill_s,
        decode_steps=steps,
        decode_s=after[2] - before[2],
        context=sum(e.prompt + 1 + (len(g.output_ids) - 1) / 2 for g in answers),
        makespan_s=makespan,
        held=e.held,
    )


TOGETHER_S = 0.001
"""Requests of one batch are stamped one after another; batches are further apart."""


def _batches(prompt: int, answers: Sequence[Generated], busy_s: float) -> tuple[PrefillBatch, ...]:
    """Requests by the time at which their prefill began. `busy_s`: from the first until the last result was looked at;
    a request without a time counts to the first batch."""
    known = sorted(answers, key=lambda g: g.started_t or 0.0)
    groups: list[list[Generated]] = []
    for g in known:
        if groups and (g.started_t or 0.0) - (groups[-1][-1].started_t or 0.0) <= TOGETHER_S:
            groups[-1].append(g)
        else:
            groups.append([g])
    begins = [group[0].started_t or 0.0 for group in groups]
    ends = [*begins[1:], begins[0] + busy_s]
    found = []
    for group, begin, end in zip(groups, begins, ends, strict=True):
        new = [prompt - g.cached_tokens for g in group]
        pairs = sum(n * (prompt - n / 2) for n in new)
        found.append(PrefillBatch(len(group), sum(new), pairs, float(len(group) * prompt**2), end - begin))
    return tuple(found)


async def measure_controls(
    client: EngineClient, wanted: Iterable[Control], vocab_size: int, done: Callable[[Control], None]
) -> list[ControlPoint]:
    """One point per control, in order; `done` after each. Raises `EngineGone` and `EngineRefused`."""
    ids, draw, points = iter(range(1 << 30)), random.Random(1), []
    for c in wanted:
        prompts = prompts_of(draw, Experiment(c.running, CONTROL_PROMPT), vocab_size)
        asked = [
            asyncio.create_task(
                client.generate(rid=f"control-{next(ids)}", input_ids=p, max_new_tokens=c.outputs, ignore_eos=True)
            )
            for p in prompts
        ]
        if asked:
            await asyncio.sleep(GENERATING_S)
        pause_s = await _seconds(client.pause(c.mode))
        flush_s = 0.0 if asked else await _seconds(client.flush())
        resume_s = await _seconds(client.resume())
        await client.abort_all()
        await asyncio.gather(*asked)
        points.append(ControlPoint(c.mode, c.running, pause_s, flush_s, resume_s))
        done(c)
    return points


async def warm_up(clients: Sequence[EngineClient]) -> None:
    """What happens at the first request only."""
    first = [FIRST_TOKEN] * 8
    await asyncio.gather(*(generate(c, "first", first, OUTPUTS) for c in clients))


async def measure_traffic(clients: Sequence[EngineClient], loop: Traffic, vocab_size: int) -> list[TrafficPoint]:
    """The closed loop on all engines side by side: one point for each engine, in order. Their caches are empty before
    and after. Raises `EngineGone` and `EngineRefused`."""
    draw = random.Random(4)
    prompts = [[draw.randrange(FIRST_TOKEN, vocab_size) for _ in range(n)] for n, _ in loop.lengths]

    async def on(client: EngineClient) -> float:
        await client.flush()
        left = iter([(i, p, outputs) for i, (p, (_, outputs)) in enumerate(zip(prompts, loop.lengths, strict=True))])

        async def one() -> None:
            for i, prompt, outputs in left:
                await generate(client, f"traffic-{i}", prompt, outputs)

        started = time.monotonic()
        await asyncio.gather(*(one() for _ in range(loop.clients)))
        return time.monotonic() - started

    seconds = await asyncio.gather(*(on(c) for c in clients))
    await asyncio.gather(*(c.flush() for c in clients))
    return [TrafficPoint(loop, s) for s in seconds]


GENERATING_S = 0.3
"""Until all requests of a control generate."""


async def _seconds(call: Awaitable[Any]) -> float:
    started = time.monotonic()
    await call
    return time.monotonic() - started
