"""The clock and the queues against queueing theory: closed forms, exact path identities, and bounds of RL pipelines.

Statistical checks use fixed seeds, independent replications, a warm-up cut of 10 % and a 99.9 % t-interval; sizes
are 20 replications of 20,000 jobs unless a test says otherwise. Whatever holds on every sample path is checked to
1e-9 or exactly instead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng
from scipy import stats

from sim.clock import ARRIVE, COMPLETE, TIMER, Clock
from sim.tools import Station

REPLICATIONS, JOBS = 20, 20_000
Draw = Callable[[Generator, int], np.ndarray]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of the 99.9 % t-interval of independent replications."""
    n = len(values)
    return float(np.mean(values)), float(stats.t.ppf(0.9995, n - 1) * np.std(values, ddof=1) / math.sqrt(n))


def assert_mean(values: list[float], expected: float, narrow: float) -> None:
    """`expected` is inside the interval, and the interval is narrow enough (relative half width) to mean something."""
    mean, half = interval(values)
    assert half < narrow * expected, f"{half} is too wide"
    assert abs(mean - expected) <= half, f"{mean} +- {half}, expected {expected}"


def pass_through(arrivals: np.ndarray, services: np.ndarray, station: Any) -> np.ndarray:
    """Sojourn times (s) of jobs that arrive at `arrivals` (s, absolute) and need `services` (s)."""
    clock, times, needs = station.clock, arrivals.tolist(), services.tolist()
    sojourns = [0.0] * len(times)

    def arrive(k: int) -> None:
        if k + 1 < len(times):
            clock.at(times[k + 1], ARRIVE, arrive, k + 1)
        station.submit(needs[k], leave, k)

    def leave(k: int) -> None:
        sojourns[k] = clock.now - times[k]

    clock.at(times[0], ARRIVE, arrive, 0)
    clock.run()
    return np.array(sojourns)


def poisson_queue(seed: int, rate: float, services: Draw, slots: int) -> list[float]:
    """Mean sojourn time of each replication."""
    means = []
    for replication in range(REPLICATIONS):
        rng = default_rng([seed, replication])
        arrivals = rng.exponential(1.0 / rate, JOBS).cumsum()
        sojourns = pass_through(arrivals, services(rng, JOBS), Station(Clock(), slots))
        means.append(float(sojourns[JOBS // 10 :].mean()))
    return means


def exponential(rng: Generator, n: int) -> np.ndarray:
    return rng.exponential(1.0, n)


def constant(rng: Generator, n: int) -> np.ndarray:
    return np.ones(n)


def lognormal(rng: Generator, n: int) -> np.ndarray:
    """Mean 1, sigma of the logarithm 1."""
    return rng.lognormal(-0.5, 1.0, n)


def pollaczek_khinchine(rho: float, second_moment: float) -> float:
    """T = E S + lambda E S^2 / (2 (1 - rho)) for E S = 1."""
    return 1.0 + rho * second_moment / (2.0 * (1.0 - rho))


# --- open queues ------------------------------------------------------------------------------------------------------


def test_m_m_1() -> None:
    rho = 0.8
    assert_mean(poisson_queue(1, rho, exponential, 1), 1.0 / (1.0 - rho), narrow=0.08)


def test_m_d_1() -> None:
    expected = pollaczek_khinchine(0.8, 1.0)
    assert expected == pytest.approx(3.0)
    assert_mean(poisson_queue(2, 0.8, constant, 1), expected, narrow=0.05)


def test_m_g_1_lognormal() -> None:
    expected = pollaczek_khinchine(0.7, math.e)
    assert expected == pytest.approx(4.1713, abs=5e-5)
    assert_mean(poisson_queue(3, 0.7, lognormal, 1), expected, narrow=0.12)


def test_m_m_4() -> None:
    """W_q = C(c, a) / (c mu - lambda), with Erlang's C from Erlang's B."""
    c, a = 4, 3.2
    blocking = 1.0
    for k in range(1, c + 1):
        blocking = a * blocking / (k + a * blocking)
    erlang_c = blocking / (1.0 - (a / c) * (1.0 - blocking))
    wait = erlang_c / (c - a)
    assert wait == pytest.approx(0.7455, abs=5e-5)
    assert_mean([mean - 1.0 for mean in poisson_queue(4, a, exponential, 4)], wait, narrow=0.12)


def test_m_m_infinity_never_waits() -> None:
    rng = default_rng(5)
    services = exponential(rng, 2000)
    station = Station(Clock(), 0)
    sojourns = pass_through(rng.exponential(0.1, 2000).cumsum(), services, station)
    assert np.allclose(sojourns, services, rtol=0, atol=1e-9) and station.wait_s == 0.0 and station.most_queued == 0


class SharedProcessor:
    """Egalitarian processor sharing: n jobs progress at rate 1 / n each. A job of x seconds ends when the attained
    service per job has grown by x since it came; one pending call for the next end."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.attained = self.updated = 0.0
        self.jobs: list[tuple[float, int, Any]] = []
        self.pending: Any = None

    def submit(self, service_s: float, done: Callable[[int], object], arg: int) -> None:
        self.progress()
        heapq.heappush(self.jobs, (self.attained + service_s, arg, done))
        self.plan()

    def progress(self) -> None:
        if self.jobs:
            self.attained += (self.clock.now - self.updated) / len(self.jobs)
        self.updated = self.clock.now

    def plan(self) -> None:
        if self.pending is not None:
            self.pending.cancel()
        self.pending = None
        if self.jobs:
            left = max(0.0, self.jobs[0][0] - self.attained) * len(self.jobs)
            self.pending = self.clock.at(self.clock.now + left, COMPLETE, self.end)

    def end(self, _: None) -> None:
        self.progress()
        self.attained, arg, done = heapq.heappop(self.jobs)
        self.pending = None
        self.plan()
        done(arg)


@pytest.mark.parametrize(("seed", "services"), [(6, lognormal), (7, constant)])
def test_m_g_1_ps_is_insensitive_and_linear_in_size(seed: int, services: Draw) -> None:
    """T(x) = x / (1 - rho), so the mean depends on E S alone. 20 replications of 6,000 jobs, rho = 0.6."""
    rho, jobs = 0.6, 6_000
    means: list[float] = []
    excess: dict[str, list[float]] = {"short": [], "long": []}
    for replication in range(REPLICATIONS):
        rng = default_rng([seed, replication])
        arrivals, sizes = rng.exponential(1.0 / rho, jobs).cumsum(), services(rng, jobs)
        sojourns = pass_through(arrivals, sizes, SharedProcessor(Clock()))[jobs // 10 :]
        sizes = sizes[jobs // 10 :]
        means.append(float(sojourns.mean() / sizes.mean()))
        stretch = sojourns - sizes / (1.0 - rho)
        excess["short"].append(float(stretch[sizes <= 1.0].mean()))
        if services is lognormal:
            excess["long"].append(float(stretch[sizes > 1.0].mean()))
    assert_mean(means, 1.0 / (1.0 - rho), narrow=0.06)
    for values in excess.values():
        if values:
            mean, half = interval(values)
            assert abs(mean) <= half < 0.5


def test_d_d_1_is_exact() -> None:
    """No wait for rho <= 1, the n-th job waits n (S - A) under overload. All times are dyadic: no tolerance."""
    for gap in (1.25, 1.0):
        station = Station(Clock(), 1)
        assert (pass_through(np.arange(100) * gap, np.ones(100), station) == 1.0).all()
    sojourns = pass_through(np.arange(100) * 1.0, np.full(100, 1.5), Station(Clock(), 1))
    assert (sojourns - 1.5 == np.arange(100) * 0.5).all()


# --- path identities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_every_wait_follows_the_kiefer_wolfowitz_recursion(slots: int) -> None:
    """The work vector of c servers, advanced job by job (c = 1: Lindley's W' = max(0, W + S - A)): an independent
    simulation."""
    rng = default_rng([8, slots])
    arrivals, services = rng.exponential(1.0 / (0.9 * slots), 20_000).cumsum(), lognormal(rng, 20_000)
    sojourns = pass_through(arrivals, services, Station(Clock(), slots))
    free = [0.0] * slots
    for k, (arrival, service) in enumerate(zip(arrivals.tolist(), services.tolist(), strict=True)):
        begin = max(arrival, heapq.heappop(free))
        heapq.heappush(free, begin + service)
        assert abs(sojourns[k] - (begin + service - arrival)) < 1e-9 * arrival + 1e-9


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4))
def test_littles_law_and_the_utilisation_law_hold_on_every_path(seed: int, slots: int) -> None:
    """L T = sum of sojourn times and busy time = sum of services, with an empty start and end; areas from the job
    list alone."""
    rng = default_rng(seed)
    arrivals, services = rng.exponential(1.0, 200).cumsum(), lognormal(rng, 200)
    station = Station(Clock(), slots)
    sojourns = pass_through(arrivals, services, station)
    changes = sorted([(t, 1) for t in arrivals] + [(t, -1) for t in arrivals + sojourns])
    area = number = 0.0
    for (t, change), (after, _) in pairwise(changes):
        number += change
        area += number * (after - t)
    assert area == pytest.approx(sojourns.sum(), rel=1e-9)
    assert station.queued_area_s + station.busy_area_s == pytest.approx(area, rel=1e-9)
    assert station.sojourn_s == pytest.approx(area, rel=1e-9)
    assert station.queued_area_s == pytest.approx(station.wait_s, rel=1e-9, abs=1e-9)
    assert station.busy_area_s == pytest.approx(services.sum(), rel=1e-9)
    throughput = station.completed / station.clock.now
    assert station.busy_area_s / station.clock.now == pytest.approx(throughput * services.mean(), rel=1e-9)
    assert station.arrived == station.completed == 200 and station.busy == station.queued == 0


# --- closed networks --------------------------------------------------------------------------------------------------

DEMANDS, THINK, CUSTOMERS = (0.9, 0.5, 0.05), 2.0, 8


def mean_value_analysis(demands: tuple[float, ...], think: float, customers: int) -> tuple[float, list[float]]:
    """(throughput, residence time per station): R_i(n) = D_i (1 + Q_i(n - 1)), X = n / (Z + sum R), Q_i = X R_i."""
    queue = [0.0] * len(demands)
    rate, residence = 0.0, list(demands)
    for n in range(1, customers + 1):
        residence = [d * (1.0 + q) for d, q in zip(demands, queue, strict=True)]
        rate = n / (think + sum(residence))
        queue = [rate * r for r in residence]
    return rate, residence


class ClosedNetwork:
    """Customers that think, then visit every station once, for ever."""

    def __init__(self, rng: Generator, draw: Draw, demands: tuple[float, ...], think: float, customers: int) -> None:
        self.clock = Clock()
        self.stations = [Station(self.clock, 1) for _ in demands]
        self.demands, self.think = demands, think
        self.rng, self.draw, self.pool = rng, draw, []
        self.cycles = 0
        self.thought_s = 0.0
        for customer in range(customers):
            self.sleep(customer)

    def one(self) -> float:
        if not self.pool:
            self.pool = self.draw(self.rng, 4096).tolist()
        return self.pool.pop()

    def sleep(self, customer: int) -> None:
        self.clock.at(self.clock.now + self.think * self.one(), ARRIVE, self.wake, (customer, self.clock.now))

    def wake(self, at: tuple[int, float]) -> None:
        customer, since = at
        self.thought_s += self.clock.now - since
        self.visit((customer, 0))

    def visit(self, at: tuple[int, int]) -> None:
        customer, station = at
        if station == len(self.stations):
            self.cycles += 1
            self.sleep(customer)
        else:
            self.stations[station].submit(self.demands[station] * self.one(), self.visit, (customer, station + 1))


def test_a_closed_network_matches_exact_mean_value_analysis() -> None:
    """12 replications of 10,000 s (about 10,800 cycles each)."""
    rate, residence = mean_value_analysis(DEMANDS, THINK, CUSTOMERS)
    assert rate == pytest.approx(1.0831, abs=5e-5)
    assert residence == [pytest.approx(r, abs=5e-5) for r in (4.3255, 1.0078, 0.0528)]
    rates: list[float] = []
    times: list[list[float]] = [[] for _ in DEMANDS]
    for replication in range(12):
        network = ClosedNetwork(default_rng([9, replication]), exponential, DEMANDS, THINK, CUSTOMERS)
        network.clock.run(until=1_000.0)
        cycles, before = network.cycles, [(s.sojourn_s, s.completed) for s in network.stations]
        network.clock.run(until=11_000.0)
        rates.append((network.cycles - cycles) / 10_000.0)
        for values, station, (sojourn_s, completed) in zip(times, network.stations, before, strict=True):
            values.append((station.sojourn_s - sojourn_s) / (station.completed - completed))
    assert_mean(rates, rate, narrow=0.02)
    for values, expected in zip(times, residence, strict=True):
        assert_mean(values, expected, narrow=0.06)


@pytest.mark.parametrize("draw", [exponential, lognormal, constant])
@pytest.mark.parametrize("customers", [1, 3, 20])
def test_operational_bounds_hold_on_every_run(draw: Draw, customers: int) -> None:
    """X <= min(N / (sum D + Z), 1 / D_max) with demands and think time as they were in this run: no law of chance
    involved."""
    network = ClosedNetwork(default_rng(10), draw, DEMANDS, THINK, customers)
    network.clock.run(until=500.0)
    for station in network.stations:
        station.settle(500.0)
    demands = [station.busy_area_s / network.cycles for station in network.stations]
    think = network.thought_s / network.cycles
    rate = network.cycles / 500.0
    assert rate <= 1.0 / max(demands) + 1e-12
    assert rate <= customers / (sum(demands) + think) + 1e-12


# --- the RL loop ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_graham_bounds_of_a_list_schedule(services: list[int], slots: int) -> None:
    """max(W / m, L) <= T <= W / m + (1 - 1 / m) L, in whole numbers (times m)."""
    clock = Clock()
    station = Station(clock, slots)
    for service in services:
        station.submit(float(service), lambda _: None)
    clock.run()
    work, longest, makespan = sum(services), max(services), int(clock.now)
    assert makespan == clock.now
    assert max(work, slots * longest) <= slots * makespan <= work + (slots - 1) * longest


class Pipeline:
    """A generator and a trainer, one batch at a time each; the generator may be `ahead` batches in front of the one
    in training.

    The right to generate one more batch is given whenever a training starts. ahead = 1 is one-step-off: batch i + 1
    is generated while batch i trains.
    """

    def __init__(self, generate: list[float], train: list[float], ahead: int) -> None:
        self.clock = Clock()
        self.generator, self.trainer = Station(self.clock, 1), Station(self.clock, 1)
        self.generate, self.train = generate, train
        self.started: list[float] = []
        self.asked = 0
        for _ in range(ahead):
            self.ask()
        self.clock.run()

    def ask(self) -> None:
        if self.asked < len(self.generate):
            self.generator.submit(self.generate[self.asked], self.generated, self.asked)
            self.asked += 1

    def generated(self, batch: int) -> None:
        starts = self.trainer.busy == 0
        self.trainer.submit(self.train[batch], self.trained)
        if starts:
            self.training_started()

    def trained(self, _: None) -> None:
        if self.trainer.busy:
            self.training_started()

    def training_started(self) -> None:
        self.started.append(self.clock.now)
        self.ask()


def steady_step_s(pipeline: Pipeline) -> float:
    """Seconds between the starts of trainings, without the first 10 %."""
    skip = len(pipeline.started) // 10
    return (pipeline.started[-1] - pipeline.started[skip]) / (len(pipeline.started) - 1 - skip)


@pytest.mark.parametrize(("generate", "train"), [(2.0, 0.5), (0.5, 2.0), (1.25, 1.25)])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_as_one_step_off_takes_the_longer_of_generation_and_training(generate: float, train: float, ahead: int) -> None:
    """Constant times: step = max(T_g, T_t) exactly, so the gain over sync is (T_g + T_t) / max(T_g, T_t) <= 2."""
    pipeline = Pipeline([generate] * 50, [train] * 50, ahead)
    assert steady_step_s(pipeline) == max(generate, train)
    assert 1.0 < (generate + train) / steady_step_s(pipeline) <= 2.0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_a_pipeline_with_buffer_follows_its_recursion_and_is_monotone_in_the_buffer(seed: int, ahead: int) -> None:
    """s_i = max(s_(i-1) + T_(i-1), g_i), g_i = max(g_(i-1), s_(i-K)) + G_i; more room never delays a start."""
    rng = default_rng(seed)
    generate, train = lognormal(rng, 60).tolist(), exponential(rng, 60).tolist()
    starts, ends = [], []
    for i in range(60):
        allowed = starts[i - ahead] if i >= ahead else 0.0
        ends.append(max(ends[-1] if ends else 0.0, allowed) + generate[i])
        starts.append(max(starts[-1] + train[i - 1], ends[-1]) if starts else ends[-1])
    pipeline = Pipeline(generate, train, ahead)
    assert pipeline.started == pytest.approx(starts, rel=1e-12)
    roomier = Pipeline(generate, train, ahead + 1)
    assert all(b <= a + 1e-9 for a, b in zip(pipeline.started, roomier.started, strict=True))


def test_random_steps_lie_between_lock_step_and_the_slower_mean() -> None:
    """Exponential, mean 1 each: E max = 1.5 for K = 1; max(1, 1) = 1 for K without end. 20 replications of 4,000
    batches."""
    steps: dict[int, list[float]] = {1: [], 4: [], 4000: []}
    for replication in range(REPLICATIONS):
        rng = default_rng([11, replication])
        generate, train = exponential(rng, 4000).tolist(), exponential(rng, 4000).tolist()
        for ahead, values in steps.items():
            values.append(steady_step_s(Pipeline(generate, train, ahead)))
    assert_mean(steps[1], 1.5, narrow=0.03)
    assert np.mean(steps[1]) > np.mean(steps[4]) > np.mean(steps[4000]) > 0.97


class AsyncRun:
    """Trajectories on `slots` slots feed a FIFO buffer; the trainer takes `batch` of them and publishes a version
    when done.

    Keeps two books: per trajectory, the versions at start and use; per publication, how many trajectories were then
    in generation or in the buffer.
    """

    def __init__(self, lengths: list[float], slots: int, batch: int, train_s: float) -> None:
        self.clock = Clock()
        self.lengths, self.batch, self.train_s = lengths, batch, train_s
        self.version = self.unused = self.next = self.generating = 0
        self.training = False
        self.born: dict[int, int] = {}
        self.buffer: list[int] = []
        self.passed: list[int] = []
        self.present: list[int] = []
        for _ in range(slots):
            self.start()
        self.clock.run()

    def start(self) -> None:
        if self.next < len(self.lengths):
            self.born[self.next] = self.version
            self.unused += 1
            self.generating += 1
            self.clock.at(self.clock.now + self.lengths[self.next], COMPLETE, self.finish, self.next)
            self.next += 1

    def finish(self, trajectory: int) -> None:
        self.buffer.append(trajectory)
        self.generating -= 1
        self.start()
        self.take()

    def take(self) -> None:
        size = self.batch if self.generating else min(self.batch, len(self.buffer))  # the last batch may be short
        if self.training or size == 0 or len(self.buffer) < size:
            return
        for trajectory in self.buffer[:size]:
            self.passed.append(self.version - self.born[trajectory])
            self.unused -= 1
        del self.buffer[:size]
        self.training = True
        self.clock.at(self.clock.now + self.train_s, TIMER, self.publish)

    def publish(self, _: None) -> None:
        self.training = False
        self.present.append(self.unused)
        self.version += 1
        self.take()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 8), st.sampled_from([0.0, 0.5, 2.0, 10.0]))
def test_as_staleness_is_counted_twice_and_agrees(seed: int, slots: int, batch: int, train_s: float) -> None:
    """Sum over trajectories of versions passed between start and use = sum over publications of trajectories then
    in generation or buffer: exact on every run that starts and ends empty."""
    run = AsyncRun(lognormal(default_rng(seed), 80).tolist(), slots, batch, train_s)
    assert len(run.passed) == 80 and run.unused == 0 and not run.buffer
    assert sum(run.passed) == sum(run.present)


def test_as_staleness_of_a_deterministic_run() -> None:
    """Two slots, replies of 1 s, batches of 2, training 0.75 s: used at 1, 2, 3, ...; the version published at 1.75
    is passed by the two that started at 1, and so on. The first two pass none."""
    run = AsyncRun([1.0] * 8, 2, 2, 0.75)
    assert run.passed == [0, 0, 1, 1, 1, 1, 1, 1]
    assert run.present == [2, 2, 2, 0]
