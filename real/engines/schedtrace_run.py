"""Runs workloads on a server that writes its scheduler's decisions down, and reads them as one trace.

Responsible for starting the server with the plugin (`schedtrace`), for sending what a case asks, by iteration or
freely, and for the trace document. Refuses to know what the decisions should be (`sim.trace_replay`)."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real.engines.client import RID_END, EngineClient
from real.engines.options import ServerOptions, python_path
from real.engines.schedtrace import ENTRY_POINT
from real.engines.server import EngineServer
from real.errors import EngineGone, EngineRefused, RealError

TRACE, PLAN, LOG = "schedtrace.jsonl", "plan.json", "engine.log"
_PLAN_S = 60.0
"""How long steps after the last answer may take."""


@dataclass(frozen=True)
class TracedOptions(ServerOptions):
    """A server that loads the plugin; the plugin's files lie in `folder`."""

    folder: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    """Further environment variables."""

    def env(self) -> dict[str, str]:
        env = super().env()
        return (
            env
            | dict(self.settings)
            | {
                "PYTHONPATH": python_path(os.pathsep.join(p for p in (self.folder, os.environ.get("PYTHONPATH")) if p)),
                "SCHED_TRACE": str(Path(self.folder) / TRACE),
                "SCHED_PLAN": str(Path(self.folder) / PLAN),
            }
        )


def make_plugin(folder: Path) -> None:
    """Package metadata in `folder`, with which a server that has it on its path finds the plugin; nothing is
    installed."""
    group, name, target = ENTRY_POINT
    info = folder / "schedtrace-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: schedtrace\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")


# --- workloads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One `/generate` call. At temperature 0 the engine takes the arg max, else it samples."""

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    extra_key: str | None = None
    priority: int | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1

    def body(self) -> dict[str, Any]:
        params = {
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "n": self.n,
        }
        body = {"input_ids": list(self.input_ids), "sampling_params": params, "return_logprob": self.return_logprob}
        body |= {"logprob_start_len": self.logprob_start_len, "extra_key": self.extra_key, "priority": self.priority}
        # with n > 1 SGLang wants one id a sample, or makes them itself
        return body | ({"rid": self.rid + RID_END} if self.n == 1 else {})


Step = tuple[int, str, Any]
"""(iteration from the plan's start, what, argument): see `schedtrace`."""


@dataclass(frozen=True)
class Script:
    """Requests and what happens, iteration by iteration: the same on a slow machine as on a fast one."""

    asks: tuple[Ask, ...]
    steps: tuple[Step, ...]

    async def run(self, client: EngineClient, plan: Path) -> None:
        """Raises RealError if the server does not carry the plan out."""
        named = {"arrive", "abort"}
        steps = [[at, what, arg + RID_END if what in named else arg] for at, what, arg in self.steps]
        new = plan.with_suffix(".new")
        new.write_text(json.dumps({"steps": steps}))
        new.replace(plan)
        await asyncio.gather(*(_ask(client, a) for a in self.asks))
        give_up = time.monotonic() + _PLAN_S
        while plan.exists():
            if time.monotonic() > give_up:
                raise RealError(f"{plan}: the server has answered all requests, but has not carried out the plan")
            await asyncio.sleep(0.01)


Free = Callable[[EngineClient], Any]
"""A coroutine function that sends what it wants when it wants."""


@dataclass(frozen=True)
class TraceCase:
    """One server configuration and what is sent to it."""

    name: str
    about: str
    workloads: tuple[Script | Free, ...]
    args: tuple[str, ...] = ()
    """Further server arguments."""
    env: tuple[tuple[str, str], ...] = ()
    max_total_tokens: int = 2000
    max_running_requests: int = 16
    chunked_prefill_size: int = 4096


async def _ask(client: EngineClient, ask: Ask) -> Any:
    """The answer; None for a request that the engine ended with an error (an abort for want of memory is one)."""
    try:
        return await client.post("/generate", ask.body())
    except EngineRefused:
        return None


def conversations(
    seed: int,
    count: int,
    turns: int = 2,
    *,
    vocabulary: int = 60,
    prompt: tuple[int, int] = (20, 120),
    output: tuple[int, int] = (4, 60),
    ignore_eos: bool = False,
    per_s: float = 100.0,
) -> Free:
    """`count` conversations, Poisson arrivals, a third with a shared beginning; the next turn is the last one's tokens
    and some more. Sampled, with a stop token, so that some end early."""

    async def run(client: EngineClient) -> None:
        rnd = random.Random(seed)
        shared = [[rnd.randrange(2, vocabulary) for _ in range(60)] for _ in range(3)]

        async def one(i: int, start_s: float, plan: list[tuple[list[int], int]]) -> None:
            await asyncio.sleep(start_s)
            ids = list(shared[i % 9]) if i % 9 < len(shared) else []
            for turn, (new, limit) in enumerate(plan):
                ids += new
                ask = Ask(
                    f"c{i}.{turn}", tuple(ids), limit, ignore_eos=ignore_eos, temperature=1.0, stop_token_ids=(7,)
                )
                answer = await _ask(client, ask)
                if answer is None:
                    return
                ids += answer["output_ids"]

        jobs, at = [], 0.0
        for i in range(count):
            plan = [
                ([rnd.randrange(2, vocabulary) for _ in range(rnd.randint(*prompt))], rnd.randint(*output))
                for _ in range(turns)
            ]
            jobs.append(one(i, at, plan))
            at += rnd.expovariate(per_s)
        await asyncio.gather(*jobs)

    return run


# --- one case ---------------------------------------------------------------------------------------------------------


def record(
    case: TraceCase,
    model_path: Path,
    folder: Path,
    *,
    command: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    status: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Start a traced server in `folder`, run the case's workloads, end the server; the trace.

    Raises:
        RealError: the engine did not start, stopped answering, or wrote no trace (its version has other methods).
    """
    make_plugin(folder)
    (folder / TRACE).unlink(missing_ok=True)
    (folder / PLAN).unlink(missing_ok=True)
    options = TracedOptions(
        str(model_path),
        device=device,
        dtype=dtype,
        max_total_tokens=case.max_total_tokens,
        max_running_requests=case.max_running_requests,
        chunked_prefill_size=case.chunked_prefill_size,
        context_length=2048,
        command=tuple(command),
        extra_args=("--skip-server-warmup", *case.args),
        folder=str(folder.resolve()),
        settings=case.env,
    )
    status(f"{case.name}: engine starts")
    server = EngineServer.start(options, folder / LOG)
    try:
        server.wait_ready(600)
        status(f"{case.name}: workload")
        asyncio.run(_run(server.url, case.workloads, folder / PLAN))
    except (EngineGone, EngineRefused) as error:
        raise RealError(f"{case.name}: {error}.\nLast lines of {folder / LOG}:\n{server.log_tail()}") from None
    finally:
        server.stop()
    return {"case": case.name, **read_trace(folder / TRACE, folder / LOG)}


async def _run(url: str, workloads: Iterable[Script | Free], plan: Path) -> None:
    client = EngineClient(url, timeout_s=300.0)
    try:
        for workload in workloads:
            if isinstance(workload, Script):
                await workload.run(client, plan)
            else:
                await workload(client)
    finally:
        await client.close()


def read_trace(lines: Path, log: Path) -> dict[str, Any]:
    """The trace that a server wrote: settings, requests with what came back, events in order.

    Raises RealError if there is none."""
    written = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    if not written or written[0]["e"] != "start":
        said = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        raise RealError(
            f"{lines} holds no trace: the plugin could not take hold of this SGLang's scheduler"
            + "".join(f"\n{line[:300]}" for line in said[-3:])
        )
    start = written.pop(0)
    requests: dict[str, dict[str, Any]] = {}
    events = []
    for line in written:
        kind = line.pop("e")
        if kind == "request":
            requests[line["rid"]] = line | {"output_ids": [], "finish_reason": None}
        elif kind == "end":
            requests[line.pop("rid")].update(line)
        else:
            events.append({"e": kind, **line})
    return {
        "sglang": start["sglang"],
        "engine": start["engine"],
        "server_env": start["env"],
        "requests": list(requests.values()),
        "events": events,
    }


def save(trace: dict[str, Any], path: Path) -> None:
    """As compressed JSON; the same trace gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as f:
        f.write(json.dumps(trace, separators=(",", ":")).encode())
