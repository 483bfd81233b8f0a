"""Limits on turns in flight: what each policy allows, and prime-rl's controller on traces of load reports."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.core.events import LoadReported
from testbed.policies.concurrency import KvAimd, concurrency
from testbed.scenario.rollout import AimdConcurrency, FixedConcurrency, PerEngineConcurrency, Unlimited

INTERVAL_S = 5.0
KV_TOTAL = 1_000_000


def report(t: float, usage: float, running: int, *, engine: int = 0, waiting: int = 0, retractions: int = 0):
    return LoadReported(
        t=t,
        engine=engine,
        running=running,
        waiting=waiting,
        kv_used_tokens=round(usage * KV_TOTAL),
        kv_total_tokens=KV_TOTAL,
        retractions=retractions,
        prefill_s=0.0,
        recompute_s=0.0,
        decode_s=0.0,
    )


class Trace:
    """Feeds one poll after another, every engine once, to a controller whose first poll has been idle."""

    def __init__(self, engines: int = 1, **options) -> None:
        self.policy = concurrency(AimdConcurrency(report_interval_s=INTERVAL_S, **options))
        assert isinstance(self.policy, KvAimd)
        self.engines = engines
        self.t = 0.0
        self.retractions = [0] * engines
        # How many engines report is known once the second poll begins.
        self.poll([0.7] * engines, 0)

    def poll(self, usage: list[float], running: int, *, waiting: int = 0, retracted: tuple[int, ...] = ()) -> int:
        """The limit after a poll in which every engine has `running` turns."""
        self.t += INTERVAL_S
        for engine in range(self.engines):
            self.retractions[engine] += engine in retracted
            self.policy.observe(
                report(
                    self.t,
                    usage[engine],
                    running,
                    engine=engine,
                    waiting=waiting,
                    retractions=self.retractions[engine],
                )
            )
        return self.policy.limit

    def turn_over(self, ended: int, in_flight: int) -> int:
        """`ended` turns end, each with `in_flight` in flight, and each is replaced: the limit after that."""
        for _ in range(ended):
            self.policy.may_start(in_flight)
            self.policy.may_start(in_flight - 1)
        return self.policy.limit


def test_unlimited_always_starts():
    policy = concurrency(Unlimited())
    assert policy.may_start(10**9) and not policy.engine_full(0, 10**9) and policy.report_interval_s is None


def test_fixed_counts_all_engines():
    policy = concurrency(FixedConcurrency(max_concurrent=3))
    assert [policy.may_start(n) for n in range(5)] == [True, True, True, False, False]
    assert not policy.engine_full(0, 100) and policy.report_interval_s is None


def test_per_engine_fills_engines_one_by_one():
    policy = concurrency(PerEngineConcurrency(max_concurrent_per_engine=2))
    assert [policy.engine_full(0, n) for n in range(4)] == [False, False, True, True]
    assert policy.may_start(10**6)


def test_kv_aimd_starts_at_initial_inflight_and_asks_for_reports():
    policy = concurrency(AimdConcurrency(initial_inflight=4, report_interval_s=2.5))
    assert policy.report_interval_s == 2.5
    assert [policy.may_start(n) for n in (0, 3, 4, 5)] == [True, True, False, False]


def test_kv_aimd_grows_by_a_quarter_per_turnover():
    trace = Trace(initial_inflight=100)
    trace.poll([0.3], 100)
    # Half a turnover, then more with the pool filled up to the new limit (100 in flight do not bind a limit of 112).
    assert trace.turn_over(50, 100) == 111  # 100 x 1.25^(50/100) = 111.80
    assert trace.turn_over(40, 111) == 121  # 111.80 x 1.25^(40/111) = 121.16


def test_kv_aimd_counts_turns_that_end_together_once_each():
    trace = Trace(initial_inflight=1000)
    trace.poll([0.3], 1000)
    trace.policy.may_start(1000)
    trace.policy.may_start(950)
    assert trace.policy.limit == int(1000 * 1.25 ** (50 / 1000))  # 1011


@pytest.mark.parametrize("usage", [0.6, 0.7, 0.8])
def test_kv_aimd_holds_between_grow_and_trim(usage):
    trace = Trace(initial_inflight=100)
    assert trace.poll([usage], 100) == 100
    assert trace.turn_over(200, 100) == 100


def test_kv_aimd_does_not_grow_when_the_limit_does_not_bind():
    trace = Trace(initial_inflight=100)
    trace.poll([0.1], 80)
    for _ in range(500):
        assert trace.policy.may_start(89)  # below 0.9 of the limit
        trace.policy.may_start(88)
    assert trace.policy.limit == 100


def test_kv_aimd_counts_only_the_part_of_a_drain_in_which_the_limit_bound():
    trace = Trace(initial_inflight=100)
    trace.poll([0.1], 100)
    trace.policy.may_start(100)
    trace.policy.may_start(0)
    # turns that ended at 100, 99, ..., 90 in flight: 11
    assert trace.policy.limit == int(100 * 1.25 ** (11 / 100))  # 102


def test_kv_aimd_does_not_grow_before_a_report_or_while_turns_wait_in_an_engine():
    silent = concurrency(AimdConcurrency(initial_inflight=100))
    assert [silent.may_start(100), silent.may_start(0), silent.may_start(100)] == [False, True, False]
    trace = Trace(initial_inflight=100)
    trace.poll([0.1], 60, waiting=40)
    trace.poll([0.1], 60, waiting=40)
    assert trace.turn_over(200, 100) == 100
    trace.poll([0.1], 100)  # no longer
    assert trace.turn_over(50, 100) == 111


def test_kv_aimd_trims_to_seventy_percent_above_eighty():
    trace = Trace(initial_inflight=90)
    assert trace.poll([0.9], 90) == 70  # 90 x 0.7 / 0.9


def test_kv_aimd_trims_for_the_fullest_engine():
    trace = Trace(engines=3, initial_inflight=300)
    assert trace.poll([0.3, 0.84, 0.5], 100) == 250  # 300 x 0.7 / 0.84


def test_kv_aimd_waits_six_polls_between_trims():
    trace = Trace(initial_inflight=90)
    assert [trace.poll([0.9], running) for running in (90, 85, 80, 75, 70, 63)] == [70] * 6
    assert trace.poll([0.9], 63) == 49  # 63 x 0.7 / 0.9


def test_kv_aimd_cuts_on_retractions_and_lets_the_cut_drain():
    trace = Trace(engines=2, initial_inflight=100)
    assert trace.poll([0.5, 0.5], 50, retracted=(1,)) == 80  # 0.8 x 100
    assert trace.poll([0.5, 0.5], 45, retracted=(0, 1)) == 80  # 90 still in flight: not a second cut
    assert trace.poll([0.5, 0.5], 40, retracted=(0,)) == 80  # drained; these retractions are from before
    assert trace.poll([0.5, 0.5], 40, retracted=(0,)) == 64  # 0.8 x 80
    assert trace.turn_over(50, 64) == 64  # no growth after a cut


def test_kv_aimd_cut_comes_before_trim():
    trace = Trace(initial_inflight=100)
    assert trace.poll([0.95], 100, retracted=(0,)) == 80  # a trim would give 73


def test_kv_aimd_never_raises_the_limit_by_a_cut_or_trim():
    trace = Trace(initial_inflight=10)
    assert trace.poll([0.85], 100) == 10
    assert trace.poll([0.5], 100, retracted=(0,)) == 10


def test_kv_aimd_keeps_its_bounds():
    trace = Trace(initial_inflight=100, min_inflight=60, max_inflight=105)
    trace.poll([0.1], 100)
    assert trace.turn_over(300, 105) == 105
    assert trace.poll([1.0], 20) == 60
    assert concurrency(AimdConcurrency(initial_inflight=500, max_inflight=64)).may_start(64) is False


def test_kv_aimd_judges_without_an_engine_that_stopped_reporting():
    trace = Trace(engines=2, initial_inflight=90)
    trace.t += INTERVAL_S
    trace.policy.observe(report(trace.t, 0.9, 90))  # engine 1 is missing: not judged yet
    assert trace.policy.limit == 90
    trace.engines = 1
    assert trace.poll([0.5], 90) == 70  # the late poll first: 90 x 0.7 / 0.9
    trace.poll([0.1], 70)
    assert trace.turn_over(35, 70) == int(70 * 1.25**0.5)


def test_kv_aimd_reads_a_restarted_counter_from_zero():
    trace = Trace(initial_inflight=100)
    trace.poll([0.7], 100, retracted=(0,))
    trace.poll([0.7], 80)  # drained at 80
    trace.retractions = [-1]
    assert trace.poll([0.7], 80, retracted=(0,)) == 80  # the counter fell from 1 to 0
    assert trace.poll([0.7], 80, retracted=(0,)) == 64


def test_kv_aimd_reads_an_engine_without_kv_as_empty():
    policy = concurrency(AimdConcurrency(initial_inflight=10, report_interval_s=INTERVAL_S))
    for t in (0.0, 5.0, 10.0):
        policy.observe(LoadReported(t, 0, 5, 0, 0, 0, 0, 0.0, 0.0, 0.0))
    assert not policy.may_start(10) and policy.may_start(9)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(0, 10), st.booleans(), st.integers(0, 60), st.integers(0, 120)), max_size=40),
)
def test_kv_aimd_limit_stays_in_bounds_and_falls_only_in_a_poll(low, span, steps):
    trace = Trace(initial_inflight=32, min_inflight=low, max_inflight=low + span)
    for tenths, retracted, running, in_flight in steps:
        trace.poll([tenths / 10], running, retracted=(0,) if retracted else ())
        before = trace.policy.limit
        trace.policy.may_start(in_flight)
        assert trace.policy.may_start(max(0, in_flight - 3)) == (max(0, in_flight - 3) < trace.policy.limit)
        assert before <= trace.policy.limit
        assert low <= trace.policy.limit <= low + span


def test_rk_04_a_static_batch_takes_no_turn_between_its_first_end_and_its_last() -> None:
    from testbed.policies.concurrency import StaticBatch

    batch = StaticBatch(3)
    assert not batch.engine_full(0, 1) and not batch.engine_full(0, 2)
    assert batch.left(0, 1), "one has ended, one is left"
    assert batch.engine_full(0, 1) and not batch.left(0, 0)
    assert batch.engine_full(0, 3) and batch.engine_full(0, 2) and not batch.engine_full(0, 0)
