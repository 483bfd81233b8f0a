"""A closed loop of clients before one engine: each sends its next request when its last one has ended.

The measured benchmarks do that: all clients start at once, and every request counts, the first burst included. It
refuses to know which engine it drives.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

import numpy as np
from msgspec import Struct

from sim.costs.base import CostModel
from sim.engine import EngineModel, EngineModelOptions, Finished, Request
from sim.serving.costs import StepCosts
from sim.serving.vllm_engine import Prompt, VllmEngine, VllmOptions

Lengths = list[tuple[int, int]]
"""(prompt tokens, output tokens) of each request, in the order in which they are sent."""


class Latencies(Struct, frozen=True):
    """Means over all requests, seconds, as the benchmark clients report them."""

    ttft_s: float
    tpot_s: float
    """(end - first token) / (output tokens - 1)."""
    requests_per_s: float


def lengths(requests: int, isl: int, osl: int, shortest: float, seed: int = 0) -> Lengths:
    """Uniform between `shortest` x and 1 x isl (osl), each drawn by itself."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(max(int(isl * shortest), 1), isl, requests, endpoint=True)
    replies = rng.integers(max(int(osl * shortest), 1), osl, requests, endpoint=True)
    return list(zip(prompts.tolist(), replies.tolist(), strict=True))


class _Clients:
    """Who sends when, and what they have seen. `away_s`: from the end of a reply until the next request is queued."""

    def __init__(self, asked: Lengths, concurrency: int, away_s: float) -> None:
        self.asked = asked
        self.away_s = away_s
        self.coming: list[tuple[float, int]] = [(0.0, i) for i in range(min(concurrency, len(asked)))]
        self.sent_t = [0.0] * len(asked)
        self.next = len(self.coming)
        self.ttft = self.tpot = self.end = 0.0

    def due(self) -> float:
        return self.coming[0][0] if self.coming else inf

    def send(self) -> int:
        t, i = heappop(self.coming)
        self.sent_t[i] = t
        return i

    def ended(self, i: int, first_t: float, t: float) -> None:
        self.ttft += first_t - self.sent_t[i]
        self.tpot += (t - first_t) / max(self.asked[i][1] - 1, 1)
        self.end = t
        if self.next < len(self.asked):
            heappush(self.coming, (t + self.away_s, self.next))
            self.next += 1

    def latencies(self) -> Latencies:
        n = len(self.asked)
        return Latencies(self.ttft / n, self.tpot / n, n / self.end)


def sglang_loop(
    options: EngineModelOptions, costs: CostModel, asked: Lengths, concurrency: int, away_s: float = 0.0
) -> Latencies:
    """The loop before SGLang's scheduler."""
    engine = EngineModel(options, costs)
    clients = _Clients(asked, concurrency, away_s)
    while (now := min(engine.wake_at, clients.due())) < inf:
        while clients.due() <= now:
            i = clients.send()
            prompt, reply = asked[i]
            engine.submit(now, Request(i, ((2 * i, 0, prompt),), prompt, reply, reply, False, True, 2 * i + 1))
        for notice in engine.advance(now):
            if type(notice) is not Finished:
                raise RuntimeError(f"a request did not finish: {notice}")
            clients.ended(notice.rid, notice.first_token_t, notice.t)
    return clients.latencies()


def vllm_loop(
    options: VllmOptions, costs: StepCosts, asked: Lengths, concurrency: int, away_s: float = 0.0
) -> Latencies:
    """The loop before vLLM's scheduler."""
    engine = VllmEngine(options, costs)
    clients = _Clients(asked, concurrency, away_s)
    while (now := min(engine.wake_at, clients.due())) < inf:
        while clients.due() <= now:
            i = clients.send()
            engine.submit(now, Prompt(i, *asked[i]))
        for r in engine.advance(now):
            clients.ended(r.rid, r.first_t, now)
    return clients.latencies()
