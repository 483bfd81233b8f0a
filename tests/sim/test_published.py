"""Published numbers that the simulator is to give: scenarios/published, run in full, against what was published.

Expected values are the published ones (named in each file's comments), or the closed form of the same publication. What
a file chooses for lack of a published value is said there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.driver import SimulatedBackend
from sim.run import simulate
from testbed.core import actions as do
from testbed.metrics.summary import RunSummary
from testbed.scenario import Scenario
from testbed.scenario.load import load_scenario
from testbed.scenario.study import Variant, load_study
from tests.support.scenarios import scenario

FOLDER = Path(__file__).resolve().parents[2] / "scenarios" / "published"


@cache
def variants(study: str) -> dict[str, Variant]:
    return {v.name: v for v in load_study(FOLDER / f"{study}.yaml").variants}


@cache
def summary_of(study: str, variant: str) -> RunSummary:
    done = simulate(variants(study)[variant].scenario, FOLDER, name=variant)
    assert done.problem == ""
    return done.summary


def idle_share_of_trainer(summary: RunSummary) -> float:
    (trainer,) = [pool for pool in summary.pools if pool.lane == "trainer"]
    return trainer.gpu_seconds.get("idle_data", 0.0) / sum(trainer.gpu_seconds.values())


# --- a queue check ----------------------------------------------------------------------------------------------------


def test_br_10_trainer_waits_29_to_30_percent_at_2_75_against_1_95_samples_per_s() -> None:
    """SemiAnalysis: 30 % (published, whole percents); 1 - 1.95 / 2.75 = 29.09 % by arithmetic."""
    loaded = load_scenario(FOLDER / "semianalysis_mind_the_gap.yaml")
    summary = simulate(loaded.scenario, loaded.base_dir).summary
    share = idle_share_of_trainer(summary)
    assert round(100 * share) in (29, 30)
    assert share == pytest.approx(1 - 1.95 / 2.75, abs=0.003)
    assert summary.trajectories_per_s == pytest.approx(1.95, rel=0.005)


# --- staleness of fully asynchronous runs -----------------------------------------------------------------------------

APPLIED_COMPUTE = [
    # C, B, q, rho, M, measured (published)
    (120, 240, 2, 0.63, 1.42, 1.26),
    (240, 120, 2, 0.92, 1.43, 3.59),
    (128, 128, 2, 1.07, 1.44, 3.09),
    (120, 120, 1, 0.67, 1.42, 1.92),
]


def closed_form(c: float, b: float, q: float, rho: float, m: float) -> float:
    """Applied Compute's mean staleness, as summarised."""
    return c * m / b + rho if rho < 1 else c * m / (rho * b) + (2 * q + rho - 1) / (2 * rho)


@pytest.mark.parametrize(("c", "b", "q", "rho", "m", "measured"), APPLIED_COMPUTE)
def test_as_14_mean_staleness_within_10_percent_of_the_measured_runs(
    c: int, b: int, q: int, rho: float, m: float, measured: float
) -> None:
    name = f"C {c}, B {b}, q {q}, rho {rho}"
    given = variants("applied_compute_staleness")[name].scenario
    summary = summary_of("applied_compute_staleness", name)
    reading = summary.staleness["trainer_steps"].dequeue.mean
    assert reading == pytest.approx(measured, rel=0.10)
    assert reading == pytest.approx(closed_form(c, b, q, rho, m), rel=0.03)
    assert rows_parameters(given) == (c, b, q)
    assert utilisation(given) == pytest.approx(rho, rel=0.001)


def rows_parameters(given: Scenario) -> tuple[int, int, float]:
    return (
        given.rollout.concurrency.max_concurrent,
        given.algorithm.trajectories_per_batch,
        given.experience.buffer.async_data_buffer_capacity_factor,
    )


def utilisation(given: Scenario) -> float:
    """rho = v_R / v_T: slots / (mean length x token time), over the trainer's rate."""
    rollout = given.rollout.concurrency.max_concurrent / (
        given.workload.reply.mean * given.simulation.engine_costs.base_s
    )
    return rollout / given.training.cost.samples_per_s


def test_as_14_staleness_adds_up_from_generation_and_queue() -> None:
    """More slots mean more staleness, a shorter queue means less: C and q of the published rows, one at a time."""
    study = "applied_compute_staleness"
    few, many = summary_of(study, "C 120, B 120, q 1, rho 0.67"), summary_of(study, "C 240, B 120, q 2, rho 0.92")
    assert few.staleness["trainer_steps"].dequeue.mean < many.staleness["trainer_steps"].dequeue.mean
    for summary in (few, many):
        reading = summary.staleness["trainer_steps"]
        assert reading.completion.mean < reading.dequeue.mean


def test_br_15_dropping_by_age_prefers_short_replies() -> None:
    """Published: queue-max(1) 1,354 -> 897 tokens, queue-drop about 1,350. The size depends on an unpublished tail."""
    by_arrival = summary_of("applied_compute_ejection", "queue-drop")
    by_age = summary_of("applied_compute_ejection", "queue-max(1)")
    assert by_arrival.waste.share > 0.1 and by_age.waste.share > 0.1
    assert by_arrival.output_length.mean == pytest.approx(1354, rel=0.05)
    assert by_age.output_length.mean < 0.8 * by_arrival.output_length.mean
    assert by_age.staleness["trainer_steps"].dequeue.max == 1


# --- AReaL's admission bound ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_as_13_submission_order_bounds_staleness_by_eta(eta: int) -> None:
    summary = summary_of("areal_admission_bound", f"eta {eta}, submission order")
    assert summary.staleness["dispatch"].dequeue.max <= eta
    assert summary.staleness["oldest_token"].dequeue.max <= eta
    assert summary.waste.dropped_trajectories == {}


def test_as_13_eta_0_is_on_policy() -> None:
    summary = summary_of("areal_admission_bound", "eta 0, submission order")
    assert summary.staleness["trainer_steps"].dequeue.max == 0
    assert summary.overlap_s_per_step == 0.0


def test_as_13_completion_order_breaks_the_bound() -> None:
    summary = summary_of("areal_admission_bound", "eta 2, completion order")
    assert summary.staleness["dispatch"].dequeue.max > 2


@pytest.mark.parametrize("variant", ["eta 0, submission order", "eta 2, submission order", "eta 2, completion order"])
def test_as_13_submissions_never_exceed_version_plus_eta_plus_one_batches(variant: str) -> None:
    """N_submitted <= (version + eta + 1) B at every submission, counted from the actions alone; AReaL's own formula."""
    given = variants("areal_admission_bound")[variant].scenario
    eta, size = given.rollout.admission.max_head_offpolicyness, given.algorithm.rollout_batch_size
    submitted, closest = 0, []

    def watch(event: Any, actions: list[do.Action]) -> None:
        nonlocal submitted
        for action in actions:
            if isinstance(action, do.DrawTask):
                submitted += 1
                closest.append((backend.core.context.progress.deployed + eta + 1) * size - submitted)

    backend = SimulatedBackend(given, FOLDER, [watch])
    backend.run()
    assert min(closest) == 0


# --- one step of asynchrony -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "sync", "one_off"),
    [("152 + 40 s", 192.0, 152.0), ("64.1 + 46.9 s", 111.0, 64.1)],
)
def test_as_01_as_02_one_step_off_takes_the_longer_phase(phases: str, sync: float, one_off: float) -> None:
    """NeMo RL: 192 -> 152 s (1.26 times) and 111 -> 64.1 s (1.73 times), published."""
    before = summary_of("nemo_rl_one_step_off", f"{phases}, sync")
    after = summary_of("nemo_rl_one_step_off", f"{phases}, one step ahead")
    assert before.step_time_mean_s == pytest.approx(sync, rel=0.005)
    assert after.step_time_mean_s == pytest.approx(one_off, rel=0.005)
    assert before.step_time_mean_s / after.step_time_mean_s == pytest.approx(sync / one_off, rel=0.01)
    assert before.overlap_s_per_step == 0.0
    assert after.overlap_s_per_step > 0.9 * (sync - one_off)


# --- the long tail ----------------------------------------------------------------------------------------------------


SLOTS = 128


def tail_step(admission: dict[str, Any], tail: int, folder: Path) -> float:
    """Seconds a step of 64 replies: 63 of 500 tokens and one of `tail`, at 10 ms a token."""
    line = '{{"timestamp": {t}, "input_length": 100, "output_length": {n}, "hash_ids": [{t}]}}\n'
    rows = [line.format(t=i, n=tail if i % 64 == 63 else 500) for i in range(160 * 64)]
    (folder / "tail.jsonl").write_text("".join(rows))
    given = scenario(
        algorithm={"advantage": "distillation", "n_samples_per_prompt": 1, "rollout_batch_size": 64},
        workload={"type": "trace", "trace": "tail.jsonl", "max_response_length": 65536},
        rollout={"admission": admission, "engine": {"max_running_requests": 256}},
        experience={"buffer": {"type": "insert_when_ready", "async_data_buffer_capacity_factor": 8.0}},
        placement__roles={"external_seconds_per_trajectory": 0.0},
        training__cost={"type": "rate", "samples_per_s": 1000.0},
        cluster__links={"ib_gb_per_s": 1e5, "nvlink_gb_per_s": 1e5, "latency_us": 0},
        weights__path={"type": "fixed", "update_weight_transfer_mode": "p2p"},
        weights__transition={"pause_generation_mode": "in_place", "kv": "keep"},
        weights__pause_overhead_s=0.0,
        training__sharding="zero1",
        run={"num_rollout": 120, "warmup_steps": 30},
        simulation={"engine_costs": {"type": "linear", "base_s": 0.01, "per_sequence_s": 0.0}},
    )
    return simulate(given, folder).summary.step_time_mean_s


@pytest.mark.parametrize("tail", [2000, 4000])
def test_as_16_tail_sets_the_synchronous_step_and_hardly_the_asynchronous_one(tail: int, tmp_path: Path) -> None:
    """Synchronous: the longest reply and 64 ms of training, 20.1 and 40.1 s, so doubling the tail doubles the step.

    Asynchronous, with all slots busy: 64 x mean length x 10 ms / 128 slots, 2.62 and 2.77 s.
    """
    mean = (63 * 500 + tail) / 64
    ahead = {"type": "fully_async", "async_max_concurrent_groups": SLOTS}
    assert tail_step({"type": "sync"}, tail, tmp_path) == pytest.approx(tail * 0.01 + 0.064, rel=0.01)
    assert tail_step(ahead, tail, tmp_path) == pytest.approx(64 * mean * 0.01 / SLOTS, rel=0.02)
