"""Reads traces of real SGLang schedulers and replays them on the engine model, iteration by iteration or in runs.

It knows the trace format (`tests/data/sglang_scheduler_traces/README.md`) and the scheduler's state; it judges nothing
but equality.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sim.engine_request import Request
from sim.engine_scheduler import DECODE, EXTEND, EngineModelOptions, Scheduler
from sim.radix_cache import Node, normalised

TRACES = Path(__file__).parent.parent / "data" / "sglang_scheduler_traces"

_INT = {
    "--max-total-tokens": "max_total_num_tokens",
    "--max-running-requests": "max_running_requests",
    "--chunked-prefill-size": "chunked_prefill_size",
    "--max-prefill-tokens": "max_prefill_tokens",
    "--page-size": "page_size",
    "--context-length": "context_length",
}
_OTHER = {
    "--schedule-policy": ("schedule_policy", str),
    "--schedule-conservativeness": ("schedule_conservativeness", float),
}

_NEUTRAL = {
    "--model-path",
    "--dtype",
    "--device",
    "--host",
    "--port",
    "--random-seed",
    "--attention-backend",
    "--sleep-on-idle",
    "--skip-tokenizer-init",
    "--log-level",
    "--mem-fraction-static",
    "--enable-metrics",
}
"""Arguments that change no scheduling decision."""


def load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as f:
        return json.load(f)


def options(trace: dict[str, Any]) -> EngineModelOptions:
    """Engine options from the server's arguments; an argument that changes scheduling and is not modelled is an
    error."""
    args = list(trace["server_args"])
    known: dict[str, Any] = {
        "chunked_prefill_size": 4096,
        "context_length": 2048,
        "forward": "host",
    }  # as on that machine
    while args:
        name = args.pop(0)
        if "=" in name:
            name, value = name.split("=", 1)
            args.insert(0, value)
        if name == "--disable-overlap-schedule":
            known["disable_overlap_schedule"] = True
        elif name == "--disable-radix-cache":
            known["disable_radix_cache"] = True
        elif name in _INT:
            known[_INT[name]] = int(args.pop(0))
        elif name in _NEUTRAL:
            if args and not args[0].startswith("--"):
                args.pop(0)
        elif name in _OTHER:
            key, kind = _OTHER[name]
            known[key] = kind(args.pop(0))
        else:
            raise ValueError(f"server argument {name} is not modelled")
    steps = trace["server_env"].get("SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS")
    if steps is not None:
        known["new_token_ratio_decay_steps"] = int(steps)
    return EngineModelOptions(passes=trace["passes_at_start"], **known)


def runs(tokens: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Token ids as runs of one token of the content with that id."""
    return tuple((t, 0, 1) for t in tokens)


def request(r: dict[str, Any]) -> Request:
    finish = r["finish_reason"]
    kind = finish["type"] if isinstance(finish, dict) else finish
    out = r["output_ids"]
    return Request(
        rid=r["rid"],
        content=runs(r["input_ids"]),
        prompt_tokens=len(r["input_ids"]),
        output_tokens=len(out),
        max_new_tokens=r["max_new_tokens"],
        stops=kind != "length",
        ignore_eos=r["ignore_eos"],
        output_runs=runs(out),
        logprob_start=r["logprob_start_len"],
    )


def scheduler(trace: dict[str, Any], cls: type[Scheduler] = Scheduler) -> Scheduler:
    """A scheduler in the state the trace starts from."""
    s = cls(options(trace))
    for tokens in trace["tree_at_start"]:
        n = len(tokens) // s.page * s.page
        if n:
            s.cache.extend(s.cache.root(0), runs(tokens), n, 0, False)
            s.cache.free -= n
    s.cache.log = []
    s.trace = []
    return s


def protected(s: Scheduler) -> int:
    """Slots of locked nodes, by walking the trees."""
    total, todo = 0, list(s.cache.roots.values())
    while todo:
        node: Node = todo.pop()
        if node.lock > 0:
            total += node.size
        if node.kids:
            todo += node.kids.values()
    return total


class Iteration:
    """What the trace says about one iteration."""

    __slots__ = ("arrivals", "evictions", "n", "next", "proc", "retract")

    def __init__(self, n: int) -> None:
        self.n = n
        self.arrivals: list[str] = []
        self.next: dict[str, Any] | None = None
        self.proc: dict[str, Any] | None = None
        self.retract: dict[str, Any] | None = None
        self.evictions: list[tuple[int, int]] = []


def iterations(trace: dict[str, Any]) -> list[Iteration]:
    out: dict[int, Iteration] = {}
    for e in trace["events"]:
        it = out.setdefault(e["n"], Iteration(e["n"]))
        kind = e["e"]
        if kind == "recv":
            it.arrivals += [rid for name, rid, _ in e["l"] if "Generate" in name]
        elif kind == "evict":
            it.evictions.append((e["want"], e["got"]))
        elif kind in ("next", "proc", "retract"):
            setattr(it, kind, e)
    return [out[n] for n in sorted(out)]


def _compare(what: str, n: int, got: Any, want: Any) -> Iterator[str]:
    if got != want:
        yield f"iteration {n}: {what}: model {got!r}, trace {want!r}"


def _compare_next(s: Scheduler, it: Iteration, kind: int, before: list[Any]) -> Iterator[str]:
    want = it.next
    if want is None:
        yield from _compare("batch", it.n, kind, 0)
        return
    mode = {0: None, DECODE: "DECODE", EXTEND: "EXTEND"}[kind]
    yield from _compare("mode", it.n, mode, want["mode"])
    if kind:
        yield from _compare("batch", it.n, s.trace[-1][1], want["reqs"])
    yield from _compare("queue before", it.n, before, want["w0"])
    state = {
        "w": [r.rid for r in s.queue],
        "run": [r.rid for r in s.batch.values()],
        "full": s.full,
        "ck": None if s.chunked is None else s.chunked.rid,
        "avail": s.cache.free,
        "evict": s.cache.evictable,
        "prot": protected(s),
        "rows": s.rows,
        "ratio": s.ratio.value(),
    }
    for key, value in state.items():
        yield from _compare(key, it.n, value, want[key])


def _compare_proc(s: Scheduler, it: Iteration, done: list[Request]) -> Iterator[str]:
    want = it.proc
    if want is None:
        yield from _compare("finished", it.n, [r.rid for r in done], [])
        return
    yield from _compare("finished", it.n, [r.rid for r in done], [f[0] for f in want["fin"]])
    for r, f in zip(done, want["fin"], strict=False):
        yield from _compare(f"finish of {r.rid}", it.n, [r.prompt_tokens, r.out, r.cached], [f[1], f[2], f[4]])
    state = {"avail": s.cache.free, "evict": s.cache.evictable, "prot": protected(s), "rows": s.rows}
    for key, value in state.items():
        yield from _compare(f"{key} after results", it.n, value, want[key])


def _one(s: Scheduler, it: Iteration, arrivals: list[Request]) -> Iterator[str]:
    """Form one iteration and compare everything."""
    for r in arrivals:
        s.enqueue(r)
    before = [r.rid for r in s.queue]
    s.cache.log.clear()
    retracted = s.retractions
    waiting = len(s.queue)
    kind = s.form(float(it.n))
    yield from _compare_next(s, it, kind, before)
    if it.retract is None:
        yield from _compare("retractions", it.n, s.retractions, retracted)
    else:
        gone = [r.rid for r in list(s.queue)[waiting:]]
        yield from _compare("retracted", it.n, gone, it.retract["out"])
    s.settle(kind, float(it.n))
    yield from _compare_proc(s, it, s.ended)
    s.ended.clear()
    yield from _compare("evictions", it.n, [(w, g) for w, g, _ in s.cache.log], it.evictions)


def _several(s: Scheduler, its: list[Iteration], k: int) -> Iterator[str]:
    """Take `k` steps in closed form and compare them, expanded, with `k` iterations."""
    s.cache.log.clear()
    s.trace.clear()
    free, held, steps, page = s.cache.free, s.cache.evictable, s.steps, s.page
    bases = [r.base for r in s.batch.values()]
    running, queue, full, rows = [r.rid for r in s.batch.values()], [r.rid for r in s.queue], s.full, s.rows
    s.run(k)
    at_end = (s.cache.free, s.cache.evictable)
    ended = list(s.ended)
    s.ended.clear()
    tags = [(tag, wanted, got) for wanted, got, tag in s.cache.log]
    for i, (it, (kind, rows_of_batch)) in enumerate(zip(its, s.trace, strict=True)):
        evictions = [(w, g) for tag, w, g in tags if tag == steps + i]
        yield from _compare("evictions", it.n, evictions, it.evictions)
        got = sum(g for _, g in evictions)
        pages = sum((base + steps + i) % page == 0 for base in bases)
        free, held = free + got - pages * page, held - got
        want = it.next
        yield from _compare("batch", it.n, ("DECODE", rows_of_batch), (want["mode"], want["reqs"]))
        yield from _compare("slots", it.n, (free, held), (want["avail"], want["evict"]))
        yield from _compare("kind", it.n, kind, DECODE)
        state = {"w": queue, "run": running, "full": full, "rows": rows, "ck": None}
        for key, value in state.items():
            if key != "full" or it is not its[0]:
                yield from _compare(key, it.n, value, want[key])
        if it is not its[-1]:
            yield from _compare("finished", it.n, [], it.proc["fin"] if it.proc else [])
    if s.overlap:
        yield from _compare("slots of a run", its[-1].n, at_end, (free, held))
        yield from _compare("ratio", its[-1].n, s.ratio.value(), its[-1].next["ratio"])
    yield from _compare_proc(s, its[-1], ended)


def replay(trace: dict[str, Any], skip: bool) -> tuple[list[str], Scheduler, int]:
    """(differences, the scheduler at the end, iterations that were part of runs of more than one step)."""
    s = scheduler(trace)
    requests = {r["rid"]: r for r in trace["requests"]}
    its = iterations(trace)
    differences: list[str] = []
    i = skipped = 0
    while i < len(its):
        it = its[i]
        if i and it.n > its[i - 1].n + 1:  # idle iterations are not in the trace
            s.settle(s.form(0.0), 0.0)
        for r in (arrivals := [request(requests[rid]) for rid in it.arrivals]):
            assert normalised(r.content) == r.content
        k = 0
        if skip and not arrivals and not (s.overlap and s.last == EXTEND):
            k = s.plain_steps()
            ahead = 1
            while ahead < k and i + ahead < len(its) and not its[i + ahead].arrivals:
                ahead += 1
            k = min(k, ahead, len(its) - i)
        if k:
            differences += _several(s, its[i : i + k], k)
            skipped += k if k > 1 else 0
            i += k
        else:
            differences += _one(s, it, arrivals)
            i += 1
        if len(differences) > 20:
            break
    return differences, s, skipped
