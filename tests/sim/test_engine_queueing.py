"""A batching engine against queueing theory: a load-dependent birth-death chain.

Poisson arrivals, replies of m tokens on average, step time tau(n) = 5 ms + 0.05 ms n, no prefill cost, no overlap, at
most B at once. The number in the system is a birth-death chain with death rate mu(n) = min(n, B) / (m tau(min(n, B))):
exact for geometric lengths, and for any law of lengths if there is no cap (processor sharing is insensitive). Admission
waits for the step in progress, half a step on average. Every interval is a 99.9 % t-interval over independent
replications with fixed seeds, after 10 % warm-up.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats

from sim.engine import EngineModel, EngineModelOptions, Finished, Request
from tests.support.engine_workloads import LinearCosts

MEAN = 512
BASE_S, PER_SEQUENCE_S = 5e-3, 5e-5
FULL_RATE = 64 / (MEAN * (BASE_S + 64 * PER_SEQUENCE_S))
"""Replies per second of an engine with 64 running; loads are shares of it."""
NO_CAP = 10**6


def tau(n: int) -> float:
    return BASE_S + PER_SEQUENCE_S * n


def chain_time(load: float, cap: int) -> float:
    """Mean time in system of the chain, by Little's law on its stationary distribution."""
    rate = load * FULL_RATE
    weight, total, weighted = 1.0, 1.0, 0.0
    for n in range(1, 5000):
        k = min(n, cap)
        weight *= rate * MEAN * tau(k) / k
        total += weight
        weighted += n * weight
    return weighted / total / rate


def lengths(law: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Decode steps of each reply; mean 512."""
    if law == "geometric":
        return rng.geometric(1 / MEAN, n)
    if law == "lognormal":
        return np.maximum(1, np.round(rng.lognormal(math.log(MEAN) - 0.5, 1.0, n))).astype(int)
    return np.full(n, MEAN)


def mean_time(law: str, load: float, cap: int, jobs: int, seed: int) -> float:
    rng = np.random.default_rng([seed, cap, int(load * 100)])
    arrivals = np.cumsum(rng.exponential(1 / (load * FULL_RATE), jobs)).tolist()
    steps = lengths(law, jobs, rng).tolist()
    engine = EngineModel(
        EngineModelOptions(
            max_total_num_tokens=10**9,
            max_running_requests=cap,
            chunked_prefill_size=-1,
            max_prefill_tokens=10**9,
            disable_overlap_schedule=True,
            disable_radix_cache=True,
        ),
        LinearCosts(BASE_S, PER_SEQUENCE_S, 0.0, 0.0, 0.0, 0.0),
    )
    times = np.empty(jobs)
    i = done = 0
    while done < jobs:
        if i < jobs and arrivals[i] <= engine.wake_at:
            n = steps[i] + 1  # the first token comes with the prefill, which costs nothing here
            engine.submit(arrivals[i], Request(i, ((i, 0, 1),), 1, n, n, False))
            i += 1
            continue
        for notice in engine.advance(engine.wake_at):
            assert type(notice) is Finished
            times[notice.rid] = notice.t - arrivals[notice.rid]
            done += 1
    return float(times[jobs // 10 :].mean())


def interval(law: str, load: float, cap: int, replications: int, jobs: int) -> tuple[float, float]:
    """(mean, half width of the 99.9 % t-interval) of the time in system."""
    means = np.array([mean_time(law, load, cap, jobs, seed) for seed in range(replications)])
    half = stats.t.ppf(0.9995, replications - 1) * means.std(ddof=1) / math.sqrt(replications)
    return float(means.mean()), float(half)


@pytest.mark.parametrize(
    ("load", "cap", "published"), [(0.5, 64, 3.2124), (0.9, 64, 4.1238), (0.5, NO_CAP, 3.2124), (0.9, NO_CAP, 3.9853)]
)
def test_the_chain_is_the_published_one(load: float, cap: int, published: float) -> None:
    assert chain_time(load, cap) == pytest.approx(published, abs=5e-5)


@pytest.mark.parametrize(
    ("law", "cap", "load", "jobs", "published", "off"),
    [
        ("geometric", 64, 0.5, 4000, 3.213, 0.026),
        ("geometric", 64, 0.9, 8000, 4.104, 0.058),
        ("geometric", NO_CAP, 0.9, 8000, 3.980, 0.041),
        ("lognormal", NO_CAP, 0.5, 4000, 3.217, 0.016),
        ("lognormal", NO_CAP, 0.9, 8000, 3.986, 0.034),
        ("fixed", NO_CAP, 0.9, 4000, 3.992, 0.008),
    ],
)
def test_the_engine_is_the_chain(law: str, cap: int, load: float, jobs: int, published: float, off: float) -> None:
    """And it is what was published for such an engine (10 replications of 20,000; here fewer, so wider intervals)."""
    want = chain_time(load, cap)
    got, half = interval(law, load, cap, 10, jobs)
    admission = 0.5 * tau(64)  # at most this much, half a step
    assert half < 0.06 * want, "the interval says something"
    assert want - half <= got <= want + half + admission, (got, half, want)
    assert abs(got - published) <= half + off


def test_fixed_lengths_under_a_cap_must_differ() -> None:
    """Capped processor sharing is not insensitive: published 4.065 +- .020 against the chain's 4.1238."""
    got, half = interval("fixed", 0.9, 64, 10, 8000)
    assert got + half < chain_time(0.9, 64)
    assert abs(got - 4.065) < 0.020 + half


def test_littles_law_holds_on_the_sample_path() -> None:
    """Number in the system, read at every event, integrated over time = sum of the times in system. Exact but for
    rounding."""
    engine = EngineModel(
        EngineModelOptions(max_total_num_tokens=10**7, max_running_requests=8), LinearCosts(1e-2, 1e-3, 1e-6)
    )
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(0.3, 400)).tolist()
    steps = rng.integers(1, 200, 400).tolist()
    events: dict[float, int] = defaultdict(int)
    total = 0.0
    i = 0
    while i < 400 or engine.wake_at < math.inf:
        if i < 400 and arrivals[i] <= engine.wake_at:
            engine.submit(arrivals[i], Request(i, ((i, 0, 30),), 30, steps[i], 500, output_content=-i))
            events[arrivals[i]] += 1
            i += 1
            continue
        for notice in engine.advance(engine.wake_at):
            events[notice.t] -= 1
            total += notice.t - arrivals[notice.rid]
    area, inside, before = 0.0, 0, 0.0
    for t in sorted(events):
        area += inside * (t - before)
        inside += events[t]
        before = t
    assert inside == 0
    assert area == pytest.approx(total, rel=1e-9)
