"""Random workloads for one engine model, a driver for them, and the invariants that must hold after every event.

Everything is drawn from a seed before the engine is touched, so that two engines see the same workload.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

from sim.engine import Aborted, EngineModel, EngineModelOptions, Finished, Notice, Paused, Request
from sim.engine_scheduler import Scheduler

ENGINE = 10
"""Priority of an engine's wake-up: after everything else of the instant."""


class LinearCosts:
    """decode = a + b n + c S; prefill = p + q new + 1e-7 x pairs. Seconds."""

    kind = "linear"
    padded_attention = False

    def __init__(self, a: float, b: float, c: float, p: float = 0.01, q: float = 1e-4, pairs: float = 1e-7) -> None:
        self.a, self.b, self.c, self.p, self.q, self.pairs = a, b, c, p, q, pairs
        self.outside_share: dict[str, float] = {}

    def decode_time(self, batch: int, context: int) -> float:
        return self.a + self.b * batch + self.c * context

    def run_time(self, batch: int, context: int, steps: int) -> float:
        return steps * (self.a + self.b * batch + self.c * context) + self.c * batch * (steps * (steps - 1) / 2)

    def steps_within(self, batch: int, context: int, seconds: float) -> int:
        first, growth = self.a + self.b * batch + self.c * context, self.c * batch / 2
        if growth:
            x = first - growth
            k = int((-x + math.sqrt(x * x + 4 * growth * max(seconds, 0.0))) / (2 * growth))
        else:
            k = int(seconds / first)
        k = max(k, 0)
        while self.run_time(batch, context, k + 1) <= seconds:
            k += 1
        while k > 0 and self.run_time(batch, context, k) > seconds:
            k -= 1
        return k

    def prefill_time(self, new_tokens: int, attention: float, requests: int) -> float:
        return self.p + self.q * new_tokens + self.pairs * attention


@dataclass
class Turn:
    """One model call of a conversation: `new` prompt tokens after the history, then at most `limit` outputs."""

    new: int
    outputs: int
    limit: int
    ignore_eos: bool
    tool_s: float
    abort_after_s: float


@dataclass
class Conversation:
    shared: int
    """Content id of the part of the first prompt that other conversations have too, and its length."""
    shared_tokens: int
    start: float
    namespace: int
    turns: list[Turn] = field(default_factory=list)


@dataclass
class Workload:
    options: EngineModelOptions
    costs: LinearCosts
    conversations: list[Conversation]
    pauses: list[tuple[float, str, float, bool]]
    """(when, mode, for how long, whether to flush)"""
    salt: bool
    """Whether a new weight version gets a namespace of its own."""


def random_workload(seed: int, **fixed: Any) -> Workload:
    """Small pools, so that eviction and retraction happen; `fixed` options override the drawn ones."""
    rnd = random.Random(seed)
    page = fixed.get("page_size", rnd.choice([1, 1, 16]))
    drawn = {
        "max_total_num_tokens": rnd.choice([300, 600, 1200, 4000]) // page * page,
        "max_running_requests": rnd.choice([2, 4, 8, 16]),
        "chunked_prefill_size": rnd.choice([-1, 16, 64, 4096]),
        "max_prefill_tokens": rnd.choice([16384, 128]),
        "page_size": page,
        "schedule_policy": rnd.choice(["fcfs", "lpm"]),
        "schedule_conservativeness": rnd.choice([1.0, 0.3, 0.02]),
        "disable_overlap_schedule": rnd.random() < 0.35,
        "new_token_ratio_decay_steps": rnd.choice([600, 5]),
        "forward": rnd.choice(["device", "host"]),
        "exact_spans": rnd.random() < 0.3,
        "context_length": 2048,
        "disable_radix_cache": rnd.random() < 0.1,
    }
    options = EngineModelOptions(**{**drawn, **fixed})
    spread = rnd.choice([0.0, 1.0, 5.0])
    conversations = []
    for _ in range(rnd.randrange(3, 25)):
        c = Conversation(
            rnd.choice([0, 1, 2]), rnd.randrange(0, 120), rnd.random() * spread, rnd.choice([0, 0, 0, 7]), []
        )
        for _ in range(rnd.randrange(1, 4)):
            limit = rnd.randrange(1, 120)
            outputs = limit if rnd.random() < 0.4 else rnd.randrange(1, limit + 1)
            tool = rnd.choice([0.0, 0.0, rnd.random()])
            abort = rnd.random() * 2 if rnd.random() < 0.06 else 0.0
            c.turns.append(Turn(rnd.randrange(1, 100), outputs, limit, rnd.random() < 0.3, tool, abort))
        conversations.append(c)
    pauses, t = [], 0.0
    for _ in range(rnd.choice([0, 0, 1, 3])):
        t += rnd.random() * 3
        seconds = rnd.random()
        pauses.append((t, rnd.choice(["abort", "retract", "in_place"]), seconds, rnd.random() < 0.5))
        t += seconds + 0.5
    costs = LinearCosts(0.01, 1e-4, 1e-5 if rnd.random() < 0.7 else 0.0)
    return Workload(options, costs, conversations, pauses, rnd.random() < 0.33)


class Driver:
    """Runs a workload on an engine, in order of (time, priority, sequence); collects notices and checks invariants."""

    def __init__(self, work: Workload, engine: EngineModel, check: bool = True, sync_every: float = 0.0) -> None:
        self.work, self.engine, self.check = work, engine, check
        self.events: list[Any] = []
        self.order = itertools.count()
        self.said: list[Notice] = []
        self.flushed: list[bool] = []
        self.requests: dict[int, Request] = {}
        self.version = 0
        self.pause_for = (0.0, False)
        self.wake_ups = 0
        for i, c in enumerate(work.conversations):
            self.at(c.start, 1, self._turn, i, 0, ((c.shared, 0, c.shared_tokens),) if c.shared_tokens else ())
        for when, mode, seconds, flush in work.pauses:
            self.at(when, 1, self._pause, mode, seconds, flush)
        if sync_every:
            for k in range(1, 40):
                self.at(k * sync_every, 0, engine.sync)

    def at(self, t: float, priority: int, what: Any, *args: Any) -> None:
        heapq.heappush(self.events, (t, priority, next(self.order), what, args))

    def _turn(self, t: float, i: int, k: int, history: tuple[Any, ...]) -> None:
        c = self.work.conversations[i]
        turn = c.turns[k]
        rid = i * 10 + k
        content = (*history, (1000 + rid, 0, turn.new))
        n = sum(run[2] for run in content)
        if n > 0.8 * min(2048, self.work.options.max_total_num_tokens):
            return
        r = Request(
            rid=rid,
            content=content,
            prompt_tokens=n,
            output_tokens=turn.outputs,
            max_new_tokens=turn.limit,
            stops=turn.outputs < turn.limit,
            ignore_eos=turn.ignore_eos,
            output_content=5000 + rid,
            namespace=(c.namespace, self.version) if self.work.salt else c.namespace,
            known_tokens=n - turn.new if k else 0,
            priority=i * 17 % 40,
        )
        self.requests[rid] = r
        self.engine.submit(t, r)
        if turn.abort_after_s:
            self.at(t + turn.abort_after_s, 1, self.engine.abort, rid)

    def _pause(self, t: float, mode: str, seconds: float, flush: bool) -> None:
        if not self.engine.closed:
            self.pause_for = (seconds, flush)
            self.engine.pause(t, mode)

    def _resume(self, t: float, flush: bool) -> None:
        if flush:
            self.flushed.append(self.engine.flush(t))
        self.version += 1
        self.engine.set_version(t, self.version)
        self.engine.resume(t)

    def run(self) -> Driver:
        engine = self.engine
        while True:
            wake = engine.wake_at
            if self.events and (self.events[0][0], self.events[0][1]) <= (wake, ENGINE):
                t, _, _, what, args = heapq.heappop(self.events)
                what(t, *args)
            elif wake < math.inf:
                self.wake_ups += 1
                for notice in engine.advance(wake):
                    self._hear(notice, wake)
            else:
                break
            if self.check:
                check_slots(engine)
        if self.check:
            assert not engine.live, "every request ends"
        return self

    def _hear(self, notice: Notice, now: float) -> None:
        self.said.append(notice)
        assert abs(notice.t - now) < 1e-12, "a notice is given when it is due"
        if isinstance(notice, Paused):
            seconds, flush = self.pause_for
            self.at(notice.t + seconds, 1, self._resume, flush)
            return
        check_spans(notice)
        if isinstance(notice, Finished):
            i, k = divmod(notice.rid, 10)
            turns = self.work.conversations[i].turns
            if k + 1 < len(turns):
                history = self.requests[notice.rid].content
                if notice.output_tokens:
                    history = (*history, (5000 + notice.rid, 0, notice.output_tokens))
                self.at(notice.t + turns[k].tool_s, 1, self._turn, i, k + 1, history)


def tree_sizes(scheduler: Scheduler) -> tuple[int, int]:
    """(slots in all trees, of them unlocked), by walking the trees."""
    total = unlocked = 0
    todo = list(scheduler.cache.roots.values())
    while todo:
        node = todo.pop()
        total += node.size
        if not node.lock:
            unlocked += node.size
        if node.kids:
            todo += node.kids.values()
    return total, unlocked


def check_slots(engine: Scheduler) -> None:
    """KV conservation: free + tree + owned by requests = pool; rows and running sums add up."""
    total, unlocked = tree_sizes(engine)
    holders = [*engine.batch.values(), *([engine.chunked] if engine.chunked else [])]
    owned = 0
    for r in holders:
        kv = r.base + engine.steps if r.entry else r.kv
        owned += -(-kv // engine.page) * engine.page - r.owned
    assert engine.cache.free >= 0
    assert engine.cache.free + total + owned == engine.slots
    assert engine.cache.evictable == unlocked
    assert engine.rows == engine.max_run - len(holders)
    assert engine.context == sum(r.base + engine.steps for r in engine.batch.values())


def check_spans(notice: Finished | Aborted) -> None:
    """Spans partition the output tokens: no gap, no overlap, none empty; versions rise."""
    at, last = 0, -1
    for version, start, end in notice.spans:
        assert start == at
        assert end > start
        assert version > last
        at, last = end, version
    assert at == notice.output_tokens


def same(a: Any, b: Any, rel: float = 1e-12) -> bool:
    """Equality of notices, times to relative `rel`."""
    if type(a) is not type(b):
        return False
    for name in a.__struct_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, float):
            if x != y and abs(x - y) > rel * max(abs(x), abs(y)):
                return False
        elif x != y:
            return False
    return True
