"""Small scripted plays on one engine model: requests by a few numbers, operations at given times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from sim.engine import EngineModel, EngineModelOptions, Finished, Notice, Request
from sim.engine_scheduler import DECODE, EXTEND
from tests.support.engine_workloads import LinearCosts, check_slots

UNIT = LinearCosts(1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
"""Every batch takes one second."""


def engine(mode: str = "skip", costs: Any = UNIT, **options: Any) -> EngineModel:
    """A traced engine; by default a CPU engine with 2,000 slots and chunks of 4,096."""
    given = {"max_total_num_tokens": 2000, "forward": "host", "chunked_prefill_size": 4096, "context_length": 2048}
    e = EngineModel(EngineModelOptions(**{**given, **options}), costs, mode)
    e.trace, e.cache.log = [], []
    return e


def ask(rid: Any, prompt: int | tuple[Any, ...], outputs: int = 1, max_new: int | None = None, **more: Any) -> Request:
    """A request: `prompt` is a number of fresh tokens or the runs; without `max_new` it ends by length."""
    content = ((f"prompt of {rid}", 0, prompt),) if isinstance(prompt, int) else prompt
    return Request(
        rid=rid,
        content=content,
        prompt_tokens=sum(n for _, _, n in content),
        output_tokens=outputs,
        max_new_tokens=outputs if max_new is None else max_new,
        stops=max_new is not None,
        **{"output_content": f"outputs of {rid}", **more},
    )


def play(
    e: EngineModel, script: Iterable[tuple[float, Callable[[float], Any]]], until: float = math.inf
) -> list[Notice]:
    """Run the script's calls at their times and the engine's wake-ups after them; the notices in order."""
    said: list[Notice] = []
    todo = sorted(script, key=lambda x: x[0])
    while True:
        if todo and todo[0][0] <= e.wake_at:
            t, call = todo.pop(0)
            call(t)
        elif e.wake_at < until:
            said += e.advance(e.wake_at)
        else:
            return said
        check_slots(e)


def serve(e: EngineModel, *requests: Request, at: float | None = None) -> dict[Any, Finished]:
    """Submit at one instant, run until nothing is left; the notices by request id."""
    t = e.t if at is None else at
    return {n.rid: n for n in play(e, [(t, lambda now, r=r: e.submit(now, r)) for r in requests])}


def prefills(e: EngineModel) -> list[list[list[Any]]]:
    """[[rid, prefix, new], ...] of each prefill batch so far."""
    return [rows for kind, rows in e.trace if kind == EXTEND]


def kinds(e: EngineModel) -> str:
    """The batches so far, one letter each: P(refill) and D(ecode)."""
    return "".join({EXTEND: "P", DECODE: "D"}[kind] for kind, _ in e.trace)
