"""Replays a trace on the engine model and compares everything, iteration by iteration or in runs of decode steps.

Given are the iteration in which each message reached the scheduler, the token ids and how many each request emits.
Compared: messages' effects, the batch and its order, prefix and new tokens, the queue before and after, the running
batch, the latch, the chunked request, free, evictable and locked slots, rows, new_token_ratio to the last bit,
evictions wanted and got, retractions, preemptions, ends, cached tokens and version spans. There is no tolerance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sim.engine_request import Request
from sim.engine_scheduler import DECODE, EXTEND, Scheduler
from sim.errors import PrefillOutOfMemory
from sim.radix_cache import Node
from sim.trace_replay.rules import Difference, Rule, changed
from sim.trace_replay.trace import Iteration, TraceError, arrivals, iterations, options, request, runs

FIRST_VERSION = "0"
"""Name of the weights that a traced server starts with (`--weight-version`)."""
_KINDS = {0: None, DECODE: "DECODE", EXTEND: "EXTEND"}
_BEFORE = 3
"""Batches shown before the first difference."""


@dataclass
class Replay:
    """What a replay found."""

    differences: list[Difference]
    """Those of the first iteration that is not the same, or of the run of steps that it is in."""
    scheduler: Scheduler
    """The model at the end."""
    skipped: int
    """Iterations that were part of runs of more than one step."""
    counts: Counter[str] = field(default_factory=Counter)
    """What the trace reaches: prefills, decodes, evictions, retracted, preempted, requests, and messages by kind."""
    around: str = ""
    """The state around the first difference, in lines."""

    @property
    def rule(self) -> Rule | None:
        """The rule behind the first difference."""
        if not self.differences:
            return None
        first = self.differences[0].n
        return changed([d for d in self.differences if d.n == first])


def replay(trace: dict[str, Any], skip: bool = False) -> Replay:
    """Replay a trace; with `skip` equal decode steps are taken in closed form.

    Raises TraceError for a server that is not modelled.
    """
    return _Player(trace).play(skip)


def scheduler(trace: dict[str, Any]) -> Scheduler:
    """A scheduler in the state that the trace starts from."""
    try:
        s = Scheduler(options(trace))
    except ValueError as error:
        raise TraceError(str(error)) from None
    for tokens in trace.get("tree_at_start", ()):
        n = len(tokens) // s.page * s.page
        if n:
            s.cache.extend(s.cache.root((None, None)), runs(tokens), n, 0, False)
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


class _Player:
    def __init__(self, trace: dict[str, Any]) -> None:
        self.s = scheduler(trace)
        self.its = iterations(trace)
        self.told = {r["rid"]: r for r in trace["requests"]}
        self.open: dict[Any, Request] = {}
        self.paused = False
        self.versions: list[str] = [FIRST_VERSION]
        """Names of the weight versions in the order of their coming."""
        self.recent: list[str] = []
        self.done = Replay([], self.s, 0)

    def play(self, skip: bool) -> Replay:
        done, its, s = self.done, self.its, self.s
        self._count()
        i = 0
        while i < len(its):
            it = its[i]
            idle = it.n - its[i - 1].n - 1 if i else 0  # idle iterations are not in the trace
            for _ in range(min(idle, s.defer + 1)):
                s.settle(s.form(0.0), 0.0)
            k = self._ahead(i) if skip and not it.messages else 0
            try:
                done.differences += self._several(its[i : i + k]) if k else self._one(it)
            except PrefillOutOfMemory as error:
                done.differences.append(Difference(it.n, "batch", ("EXTEND", str(error)), (None, it.next)))
            if done.differences:  # the rest would follow from them
                done.around = self._around(it)
                break
            done.skipped += k if k > 1 else 0
            i += k or 1
        return done

    def _count(self) -> None:
        counts = self.done.counts
        counts["requests"] = len(self.told)
        for it in self.its:
            if it.next is not None:
                counts["prefills"] += it.next["mode"] == "EXTEND"
                counts["decodes"] += it.next["mode"] == "DECODE"
            counts["evictions"] += len(it.evictions)
            counts["preempted"] += sum(len(p["out"]) for p in it.preempt)
            if it.retract is not None:
                counts["retractions"] += 1
                counts["retracted"] += len(it.retract["out"])
                counts["lost"] += len(it.retract.get("abort", ()))
            for m in it.messages:
                counts[m["e"]] += m["e"] != "recv"

    # --- messages -----------------------------------------------------------------------------------------------------

    def _message(self, n: int, m: dict[str, Any]) -> Iterator[Difference]:
        """Carry out what reached the scheduler before iteration `n`."""
        s, kind = self.s, m["e"]
        if kind == "recv":
            for rid in arrivals(m):
                told = self.told[rid]
                r = self.open[rid] = request(told)
                s.enqueue(r)
                if told.get("refused"):
                    r.abort, r.final = "refused", 1
                elif "limit" in told:
                    yield from _compare(n, "limit", r.limit, told["limit"])
            return
        if kind == "abort":
            for rid in [rid for rid in self.open if m["all"] or rid.startswith(m["rid"])]:
                r = self.open[rid]
                if s.abort_request(r):
                    yield from self._ends([r], n)
        elif kind == "pause_generation":
            self.paused = True
            if m["mode"] == "retract":
                s.put_all_back(float(n))
                yield from _compare(n, "finished", [r.rid for r in s.ended], [f[0] for f in m["fin"]])
                yield from self._ends(s.ended, n)
                s.ended.clear()
        elif kind == "continue_generation":
            self.paused = False
        elif kind == "flush_cache":
            done = not s.busy and (self.paused or not s.queue)
            yield from _compare(n, "flush_cache", done, m["ret"])
            if done:
                s.clear()
        elif m["version"] is not None and m["version"] != self.versions[-1]:
            self.versions.append(m["version"])
            s.record_version(s.version + 1)
        field = kind if kind in ("abort", "pause_generation", "flush_cache") else "queue before"
        state = {"w": [r.rid for r in s.queue], **self._pools()}
        yield from _compare(n, field, state, {key: m[key] for key in state})

    # --- one iteration ------------------------------------------------------------------------------------------------

    def _one(self, it: Iteration) -> Iterator[Difference]:
        """Form one iteration and compare everything."""
        s, n = self.s, it.n
        assert s.cache.log is not None
        s.cache.log.clear()
        for m in it.messages:
            yield from self._message(n, m)
        if it.next is None and it is self.its[-1]:  # the trace ends before it
            return
        before = [r.rid for r in s.queue]
        retracted, waiting = s.retractions, len(s.queue)
        running = {r.rid for r in s.batch.values()} if s.preempts else ()
        kind = s.form(float(n))
        lost = [r.rid for r in s.ended if r.abort == "out_of_memory"]
        yield from self._compare_next(it, kind, before)
        if it.retract is None:
            yield from _compare(n, "retracted", s.retractions - retracted, 0)
            yield from _compare(n, "lost", lost, [])
        else:
            gone = [r.rid for r in list(s.queue)[waiting:]]
            yield from _compare(n, "retracted", gone, it.retract["out"])
            yield from _compare(n, "lost", lost, it.retract.get("abort", []))
        if running and it.retract is None:
            back = sorted(r.rid for r in s.queue if r.rid in running)
            yield from _compare(n, "preempted", back, sorted(rid for p in it.preempt for rid in p["out"]))
        early = list(s.ended)  # ended by the choice itself: half prefilled and aborted, or out of memory
        s.ended.clear()
        yield from self._ends(early, n)
        s.settle(kind, float(n))
        yield from self._compare_proc(it, s.ended)
        s.ended.clear()
        yield from _compare(n, "evictions", [(w, g) for w, g, _ in s.cache.log], it.evictions)
        self._remember(it)

    def _compare_next(self, it: Iteration, kind: int, before: list[Any]) -> Iterator[Difference]:
        s, want = self.s, it.next
        if want is None:
            yield from _compare(it.n, "mode", _KINDS[kind], None)
            return
        yield from _compare(it.n, "mode", _KINDS[kind], want["mode"])
        if kind and _KINDS[kind] == want["mode"]:
            yield from _compare(it.n, "batch", (want["mode"], s.trace[-1][1]), (want["mode"], want["reqs"]))  # type: ignore[index]
        yield from _compare(it.n, "queue before", before, want["w0"])
        for key, value in self._state().items():
            yield from _compare(it.n, key, value, want[key])

    def _compare_proc(self, it: Iteration, done: list[Request]) -> Iterator[Difference]:
        want = it.proc
        if want is None:
            yield from _compare(it.n, "results", [r.rid for r in done], [])
            return
        yield from _compare(it.n, "finished", [r.rid for r in done], [f[0] for f in want["fin"]])
        for r, f in zip(done, want["fin"], strict=False):
            yield from _compare(it.n, "outputs", [r.rid, r.prompt_tokens, r.out], [f[0], f[1], f[2]])
            yield from _compare(it.n, "cached", [r.rid, r.cached], [f[0], f[4]])
        yield from self._ends(done, it.n)
        for key, value in self._pools().items():
            yield from _compare(it.n, key, value, want[key])

    def _ends(self, done: list[Request], n: int) -> Iterator[Difference]:
        for r in done:
            told = self.told[r.rid]
            self.open.pop(r.rid, None)
            yield from _compare(n, "outputs", [r.rid, r.out], [r.rid, len(told["output_ids"])])
            yield from _compare(n, "retracted", [r.rid, r.retracted], [r.rid, told["num_retractions"]])
            if "versions" in told:
                mine = [[self.versions[old], count] for old, count in r.events or ()]
                yield from _compare(n, "versions", [r.rid, mine], [r.rid, told["versions"]])

    # --- several iterations -------------------------------------------------------------------------------------------

    def _ahead(self, i: int) -> int:
        """How many iterations from the `i`-th on the model takes at once."""
        s, its = self.s, self.its
        if s.overlap and s.last == EXTEND:
            return 0
        k = min(s.plain_steps(), len(its) - i)
        ahead = 1
        while ahead < k and not its[i + ahead].messages:
            ahead += 1
        return min(k, ahead)

    def _several(self, its: list[Iteration]) -> Iterator[Difference]:
        """Take steps in closed form and compare them, expanded, with as many iterations."""
        s, k = self.s, len(its)
        assert s.cache.log is not None and s.trace is not None
        s.cache.log.clear()
        s.trace.clear()
        free, held, steps, page = s.cache.free, s.cache.evictable, s.steps, s.page
        bases = [r.base for r in s.batch.values()]
        state = {key: value for key, value in self._state().items() if key in ("w", "run", "rows")}
        full, defer = s.full, s.defer
        s.run(k)
        at_end = (s.cache.free, s.cache.evictable)
        ended = list(s.ended)
        s.ended.clear()
        tags = [(tag, wanted, got) for wanted, got, tag in s.cache.log]
        for i, (it, (_, rows_of_batch)) in enumerate(zip(its, s.trace, strict=True)):
            evictions = [(w, g) for tag, w, g in tags if tag == steps + i]
            yield from _compare(it.n, "evictions", evictions, it.evictions)
            got = sum(g for _, g in evictions)
            pages = sum((base + steps + i) % page == 0 for base in bases)
            free, held = free + got - pages * page, held - got
            want = it.next
            if want is None or want["mode"] != "DECODE":
                yield Difference(it.n, "mode", "DECODE", want and want["mode"])
                return
            yield from _compare(it.n, "batch", ("DECODE", rows_of_batch), ("DECODE", want["reqs"]))
            yield from _compare(it.n, "avail", (free, held), (want["avail"], want["evict"]))
            yield from _compare(it.n, "ck", None, want["ck"])
            yield from _compare(it.n, "full", full or bool(s.queue and i >= defer), want["full"])
            for key, value in state.items():
                yield from _compare(it.n, key, value, want[key])
            if it is not its[-1]:
                yield from _compare(it.n, "finished", [], it.proc["fin"] if it.proc else [])
            self._remember(it)
        if s.overlap:
            yield from _compare(its[-1].n, "avail", at_end, (free, held))
            yield from _compare(its[-1].n, "ratio", s.ratio.value(), its[-1].next["ratio"])  # type: ignore[index]
        yield from self._compare_proc(its[-1], ended)

    # --- the state ----------------------------------------------------------------------------------------------------

    def _pools(self) -> dict[str, int]:
        s = self.s
        return {"avail": s.cache.free, "evict": s.cache.evictable, "prot": protected(s), "rows": s.rows}

    def _state(self) -> dict[str, Any]:
        """The model's state under the names of a `next` event."""
        s = self.s
        return {
            "w": [r.rid for r in s.queue],
            "run": [r.rid for r in s.batch.values()],
            "full": s.full,
            "ck": None if s.chunked is None else s.chunked.rid,
            "ratio": s.ratio.value(),
            **self._pools(),
        }

    def _remember(self, it: Iteration) -> None:
        if it.next is not None:
            self.recent = [*self.recent[-_BEFORE + 1 :], f"  {it.n}: {_batch(it.next)}"]

    def _around(self, it: Iteration) -> str:
        """The batches before iteration `it`, what reached it, and both states after it."""
        came = [_said(m) for m in it.messages]
        lines = ["batches before:", *(self.recent or ["  none"])]
        more = f" and {len(came) - 8} more" if len(came) > 8 else ""
        lines += [f"reached iteration {it.n}: {', '.join(came[:8]) or 'nothing'}{more}"]
        if it.next is not None:
            lines += [f"engine chose {_batch(it.next)}"]
            told = {key: it.next[key] for key in self._state()}
            lines += ["engine: " + _listed(told)]
        lines += ["model:  " + _listed(self._state()) + " (after the iteration)"]
        return "\n".join(lines)


def _compare(n: int, name: str, got: Any, want: Any) -> Iterator[Difference]:
    if got != want:
        yield Difference(n, name, got, want)


def _batch(e: dict[str, Any]) -> str:
    rows = e.get("reqs", [])
    said = ", ".join(f"{rid} {a}+{b}" for rid, a, b in rows[:8]) + (
        f" and {len(rows) - 8} more" if len(rows) > 8 else ""
    )
    return f"{e['mode'] or 'nothing'} {said}".rstrip()


def _said(m: dict[str, Any]) -> str:
    if m["e"] == "recv":
        return "request " + ", ".join(arrivals(m))
    of = {key: m[key] for key in ("rid", "all", "mode", "version", "ret") if m.get(key) not in (None, False, "")}
    return " ".join([m["e"], *(f"{key}={value}" for key, value in of.items())])


def _listed(state: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value if not isinstance(value, list) else f'{len(value)} {value[:8]}'}" for key, value in state.items()
    )
