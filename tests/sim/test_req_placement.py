"""Placement (PL), shown by whole simulated runs: who holds which GPUs when, what a switch and an update cost, who
waits.

Closed forms use the parameters of Qwen3-8B as its authors publish them (8.19 B parameters, 36 layers), the GPU
catalogue's H100 (3.35 TB/s, 50 GB/s of PCIe a direction) and the overheads that the weight paths state.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.coefficients import coefficients
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario.rules import check
from tests.support.scenarios import COLOCATED, scenario
from tests.support.simulated import HERE, Run, fixed, linear_run, run, split, turn_seconds
from tests.support.timeline import overlap, pauses, training

PARAMS = 8_190_735_360
BYTES = 2 * PARAMS
TENSORS = 36 * 11 + 3
"""A layer of Qwen3-8B has q, k, v, o, their two norms, gate, up, down and two norms; then embedding, head and last
norm."""
PCIE = 50e9
APPLY_S = 2 * BYTES / (0.8 * 3.35e12)
"""Into the served tensors: read and written once at 80 % of memory bandwidth."""
PAUSE_S = 0.05
TASK_S = turn_seconds(50) + 1.0
"""One turn of 50 tokens, and the score of its answer."""
HYBRID = {"mode": "hybrid", "rollout_num_gpus": 2, "actor_num_gpus": 2, "rollout_num_gpus_per_engine": 1}
RESIDENT = {"rollout__engine": {"mem_fraction_static": 0.4}}
"""Small enough that engine and trainer fit side by side."""


def switches(r: Run) -> dict[str, list[tuple[float, float]]]:
    """Phase -> (asked, done) of every switch to it."""
    asked = {"train": [], "generate": []}
    for t, a in r.of(do.SwitchPool):
        asked[a.phase].append(t)
    done = {"train": [], "generate": []}
    for t, e in r.of(said.PoolSwitched):
        done[e.phase].append(t)
    return {p: list(zip(asked[p], done[p], strict=True)) for p in asked}


def generating(r: Run) -> list[tuple[float, float]]:
    return [(sent, e.t) for sent, e, _ in r.turns()]


# --- shared -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [COLOCATED["placement"], HYBRID])
def test_pl_01_no_instant_in_which_generation_and_training_hold_a_shared_gpu(placement: dict[str, Any]) -> None:
    colocated = placement["mode"] == "colocated"
    r = linear_run(
        **(COLOCATED if colocated else {"placement": placement}),
        rollout__admission={"type": "sync" if colocated else "one_step_ahead"},
        workload__reply={"type": "uniform", "low": 10, "high": 300},
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 2},
        run__num_rollout=5,
    )
    pool = r.backend.core.layout.pools[r.backend.core.layout.train_pool]
    mine = [(sent, e.t) for sent, e, a in r.turns() if a.engine in pool.engines]
    assert mine and overlap(training(r), mine) == 0.0
    moves = [s for both in switches(r).values() for s in both]
    assert overlap(moves, mine) == overlap(moves, training(r)) == 0.0
    assert {a.engine for _, _, a in r.turns()} == {e.index for e in r.backend.core.layout.engines}, "all four generate"
    if colocated:
        assert pool.gpus == 4 and overlap(training(r), generating(r)) == 0.0, "and all four train"
    r.checked()


@pytest.mark.parametrize("fixed_s", [0.0, 1.0, 7.0])
def test_pl_02_a_cycle_is_generation_switch_training_update_and_switch(fixed_s: float) -> None:
    """gen + score + switch + train + (gather and convert) + switch + (apply, pause). Nothing is moved, for all of it
    stays resident."""
    r = linear_run(
        **COLOCATED, **RESIDENT, placement__switch={"offload": False, "fixed_s": fixed_s}, run__num_rollout=4
    )
    fitted = coefficients()
    prepare = BYTES / fitted.ipc_convert_bytes_per_s + TENSORS * fitted.ipc_tensor_s
    update = prepare + APPLY_S + PAUSE_S
    assert r.cycles == pytest.approx([TASK_S + 2 * fixed_s + 4.0 + update] * 3)
    assert [b - a for both in switches(r).values() for a, b in both] == pytest.approx([fixed_s] * 8)


def test_pl_02_a_switch_clears_the_cache_if_it_is_set_so() -> None:
    """Two turns around a system prompt; KV may be kept over updates, but not over a switch that clears it."""
    changes: dict[str, Any] = {
        **COLOCATED,
        **RESIDENT,
        "workload__shared_prefix_tokens": 64,
        "workload__prompt": fixed(36),
        "weights__transition": {"pause_generation_mode": "retract", "kv": "keep"},
        "run__num_rollout": 3,
    }
    cached = {}
    for clear in (True, False):
        r = linear_run(**changes, placement__switch={"offload": False, "clear_kv": clear})
        first: dict[tuple[int, int], int] = {}
        for sent, e, a in r.turns():
            step = sum(t <= sent for t in r.steps)
            first.setdefault((step, a.engine), e.cached_tokens)
        cached[clear] = [v for (step, _), v in first.items() if step > 0]
    assert set(cached[True]) == {0}
    assert set(cached[False]) == {64}, "the system prompt of earlier steps"


def test_pl_06_a_shared_pool_serves_new_weights_only_after_an_update() -> None:
    """Published every second batch: the version of every token is that of the last update, not of the last training."""
    r = linear_run(**COLOCATED, weights__update_weights_interval=2, run__num_rollout=6)
    version = [0] * 4
    for _, x in r.log:
        if isinstance(x, said.EngineResumed):
            version[x.engine] = x.version
        elif isinstance(x, said.TurnFinished):
            assert {v for v, _, _ in x.spans} == {version[x.engine]}
    assert [max(x.newest_version for x in b.experiences) for b in r.batches] == [0, 0, 1, 1, 2, 2]
    assert [b.experiences[0].trainer_version for b in r.batches] == [0, 1, 2, 3, 4, 5]


def test_pl_08_generation_and_training_in_one_worker_keep_the_same_contract() -> None:
    """The pool's engines and its trainer are one set of GPUs, with one engine over all of them or one on each."""
    for per_engine in (1, 2, 4):
        placement = {"mode": "colocated", "num_gpus": 4, "rollout_num_gpus_per_engine": per_engine}
        r = linear_run(**{**COLOCATED, "placement": placement}, run__num_rollout=3)
        r.checked()
        layout = r.backend.core.layout
        assert len(layout.pools) == 1 and len(layout.engines) == 4 // per_engine
        assert len(r.steps) == 3


# --- disaggregated ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["broadcast", "p2p", "disk", "disk_delta"])
def test_pl_03_two_and_two_pay_the_path_that_is_configured_and_no_switch(path: str) -> None:
    """A synchronous cycle: generation, score, training, then whatever the path says until the engines serve again."""
    r = linear_run(weights__path={"type": "fixed", "update_weight_transfer_mode": path}, run__num_rollout=4)
    assert not r.of(do.SwitchPool) and not r.of(said.PoolSwitched)
    assert {a.path for _, a in r.of(do.PrepareWeights, do.CopyWeights)} == {path}
    expected = r.backend.paths.expected(path)
    update = [
        max(t for t, e in r.of(said.EngineResumed) if e.version == a.version) - asked
        for asked, a in r.of(do.PrepareWeights)
    ]
    assert update == pytest.approx([expected.total_s + PAUSE_S] * len(update), rel=1e-9)
    assert r.cycles == pytest.approx([TASK_S + 4.0 + expected.total_s + PAUSE_S] * 3)


def test_pl_03_disjoint_gpus_can_overlap() -> None:
    r = linear_run(rollout__admission={"type": "one_step_ahead"}, run__num_rollout=5)
    assert overlap(training(r), generating(r)) > 0
    assert r.summary.overlap_s_per_step > 0


SPLITS = ((1, 3), (2, 2), (3, 1))


def balance(**changes: Any) -> dict[tuple[int, int], tuple[float, float]]:
    """Split -> (share of time that the learner's GPUs wait for data, seconds per step)."""
    found = {}
    for rollout, trainer in SPLITS:
        r = run(
            scenario(
                **{
                    "model": {"type": "preset", "name": "Qwen3-0.6B"},
                    "placement": split(rollout, trainer),
                    "rollout__admission": {"type": "one_step_ahead"},
                    "rollout__engine": {"max_running_requests": 4},
                    "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 6},
                    "workload__rewards": {"latency": {"type": "fixed", "seconds": 0.0}},
                    "run__num_rollout": 8,
                    "run__warmup_steps": 3,
                    **changes,
                }
            )
        )
        s = r.summary
        trainer_lane = next(p for p in s.pools if p.lane == "trainer")
        share = trainer_lane.gpu_seconds["idle_data"] / (trainer_lane.gpus * s.measured_s)
        found[rollout, trainer] = (share, s.step_time_mean_s)
    return found


def test_pl_04_the_learner_waits_less_the_more_gpus_generate_and_the_optimum_depends_on_the_work() -> None:
    long_replies = balance(workload__reply=fixed(400), training__cost={"type": "analytic", "mfu": 0.4})
    heavy_training = balance(workload__reply=fixed(50), training__cost={"type": "analytic", "mfu": 0.002})
    for found in (long_replies, heavy_training):
        shares = [found[s][0] for s in SPLITS]
        assert shares[0] >= shares[1] >= shares[2]
    waits = [long_replies[s][0] for s in SPLITS]
    assert waits[0] > waits[1] > waits[2] > 0.0, "generation sets the pace: the learner waits"
    assert min(SPLITS, key=lambda s: long_replies[s][1]) == (3, 1)
    assert min(SPLITS, key=lambda s: heavy_training[s][1]) == (1, 3)


def test_pl_05_disjoint_gpus_alone_do_not_make_it_asynchronous() -> None:
    """Two settings, four combinations: three run, the fourth is refused with its reason."""
    seconds = {}
    for name, placement in (("split", {}), ("shared", COLOCATED)):
        for admission in ("sync", "one_step_ahead"):
            config = {**placement, "rollout__admission": {"type": admission}, "run__num_rollout": 4}
            if (name, admission) == ("shared", "one_step_ahead"):
                faults = check(scenario(**config), HERE)
                assert [f.key for f in faults] == ["rollout.admission.type"]
                assert "colocated pool cannot generate while it trains" in faults[0].what
                continue
            r = linear_run(**config)
            seconds[name, admission] = overlap(training(r), generating(r))
    assert seconds["split", "sync"] == seconds["shared", "sync"] == 0.0
    assert seconds["split", "one_step_ahead"] > 0.0


def test_pl_05_in_synchronous_mode_a_batch_is_generated_after_the_one_before_is_trained() -> None:
    r = linear_run(run__num_rollout=4)
    ends = r.steps
    for sent, _, a in r.turns():
        batch = a.group // 2
        assert sent >= (ends[batch - 1] if batch else 0.0)


# --- roles ------------------------------------------------------------------------------------------------------------

FOUR_ROLES = {
    "algorithm": {
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "advantage": "critic",
        "kl_coef": 0.1,
        "recompute_old_log_probs": True,
    }
}
"""Actor, critic and reference, and the reward; `old_log_probs` is one more job of the actor."""
SMALL = {"model": {"type": "preset", "name": "Qwen3-0.6B"}}


@pytest.mark.parametrize(
    "placement",
    [
        {**COLOCATED, "placement": {"mode": "colocated", "num_gpus": 1}},
        {"placement": split(1, 1)},
        {"placement": split(2, 1)},
        {"placement": split(1, 2)},
    ],
)
def test_pl_07_four_roles_on_one_two_and_three_gpus(placement: dict[str, Any]) -> None:
    """Evaluation roles use the trainer's GPUs at different times; how many GPUs that are is another question."""
    r = linear_run(**SMALL, **FOUR_ROLES, **placement, run__num_rollout=3)
    jobs = [(t, a.signal) for t, a in r.of(do.ComputeSignals) if a.pool >= 0]
    assert {s for _, s in jobs} == {"old_log_probs", "reference", "critic"}
    ends = {}
    for t, e in r.of(said.SignalReady):
        if e.signal != "reward":
            ends[e.signal, e.trajectories] = t
    spans = [(t, ends[a.signal, a.trajectories]) for t, a in r.of(do.ComputeSignals) if a.pool >= 0]
    assert overlap(spans, training(r)) == 0.0
    assert sum(b - a for a, b in spans) == pytest.approx(sum(b - a for a, b in set(spans))), "one at a time"
    r.checked()


def test_pl_07_one_role_on_four_gpus() -> None:
    r = linear_run(
        **{**COLOCATED, "placement": {"mode": "colocated", "num_gpus": 4, "rollout_num_gpus_per_engine": 4}},
        run__num_rollout=2,
    )
    assert len(r.backend.engines) == 1 and r.backend.core.layout.num_gpus == 4
    assert {a.signal for _, a in r.of(do.ComputeSignals)} == {"reward"}
    shared = r.summary.pools[0]
    assert shared.gpus == 4 and shared.gpu_seconds["train"] == pytest.approx(4 * 4.0 * r.summary.measured_steps)


@pytest.mark.parametrize(
    ("algorithm", "jobs"),
    [
        ({"advantage": "group"}, {"reward"}),
        ({"advantage": "group", "kl_coef": 0.01}, {"reward", "reference"}),
        ({"advantage": "group", "recompute_old_log_probs": True}, {"reward", "old_log_probs"}),
        ({"advantage": "critic"}, {"reward", "critic"}),
        ({"advantage": "distillation"}, {"teacher"}),
        ({"advantage": "group_with_distillation"}, {"reward", "teacher"}),
    ],
)
def test_pl_09_only_roles_that_the_setup_asks_for_do_any_work(algorithm: dict[str, Any], jobs: set[str]) -> None:
    r = linear_run(algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 2, **algorithm})
    assert {a.signal for _, a in r.of(do.ComputeSignals)} == jobs
    assert {e.signal for _, e in r.of(said.SignalReady)} == jobs
    lane = next(p for p in r.summary.pools if p.lane == "trainer")
    assert (lane.gpu_seconds["signals"] > 0) == bool(jobs & {"reference", "old_log_probs", "critic"})


def test_pl_10_an_agent_that_acts_holds_no_engine_and_keeps_its_environment() -> None:
    """Three calls with 10 s of tools in between: engines work for the calls alone, the environment stays one and the
    same."""
    r = linear_run(
        workload__turns=fixed(3),
        workload__observation=fixed(20),
        workload__tool_time={"type": "fixed", "seconds": 10.0},
        workload__tools={"environment_prepare": {"type": "fixed", "seconds": 2.0}},
        run__num_rollout=2,
        run__warmup_steps=0,
    )
    acting = []
    since: dict[int, float] = {}
    for t, x in r.log:
        if isinstance(x, do.RunTool):
            since[x.trajectory] = t
        elif isinstance(x, said.ToolFinished):
            acting.append((x.trajectory, since.pop(x.trajectory), t))
    of = {}
    for sent, e, _ in r.turns():
        of.setdefault(e.trajectory, []).append((sent, e.t))
    assert all(overlap([(a, b)], of[trajectory]) == 0.0 for trajectory, a, b in acting)
    assert all(b - a == pytest.approx(10.0) for _, a, b in acting)
    prepared = [a.trajectory for _, a in r.of(do.PrepareEnvironment)]
    assert sorted(prepared) == sorted(set(prepared)) == sorted(a.trajectory for _, a in r.of(do.ReleaseEnvironment))
    engines = next(p for p in r.summary.pools if p.lane == "engines").gpu_seconds
    per_batch = sum(b - a for turns in of.values() for a, b in turns) / 2
    busy = (engines["generate"] + engines["generate_tail"] + engines["recompute_kv"]) / 2
    assert busy <= per_batch + 1e-9 and engines["idle_no_work"] / 2 >= 2 * (2 * 10.0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_pl_12_phases_that_do_not_fit_together_are_refused_without_offload_and_pay_for_it_with() -> None:
    """8 B parameters on 4 GPUs: 32.8 GB of trainer state beside 68 GB of engine on 80 GB. With offload the state
    travels over PCIe."""
    without = scenario(**COLOCATED, placement__switch={"offload": False, "fixed_s": 1.0})
    faults = check(without, HERE)
    assert [f.key for f in faults] == ["placement.switch.offload"] and "offload: true" in faults[0].nearest
    r = linear_run(**COLOCATED, placement__switch={"offload": True, "fixed_s": 1.0}, run__num_rollout=3)
    state = 16 * PARAMS / 4 / PCIE  # weights 2, gradients 2, optimizer 12 bytes a parameter, spread over 4 GPUs
    weights = BYTES / PCIE
    times = switches(r)
    assert [b - a for a, b in times["train"]] == pytest.approx([1.0 + state] * 3)
    assert [b - a for a, b in times["generate"]] == pytest.approx([1.0 + state + weights] * 3)
    shared = r.summary.pools[0].gpu_seconds
    moved = sum(b - a for both in times.values() for a, b in both if b <= r.steps[-1])
    assert shared["phase_switch"] == pytest.approx(4 * moved)


def test_pl_13_placements_of_equal_size_are_compared_on_the_same_work() -> None:
    """Same GPU total, same tasks and lengths: only the placement differs."""
    totals, works = set(), []
    for placement in ({}, COLOCATED, {"placement": HYBRID}):
        r = linear_run(**placement, workload__reply={"type": "uniform", "low": 10, "high": 300}, run__num_rollout=4)
        totals.add(r.summary.num_gpus)
        works.append({x.task: x.output_tokens for b in r.batches for x in b.experiences if x.trajectory % 2 == 0})
        assert (
            r.backend.workload.fingerprint
            == linear_run(workload__reply={"type": "uniform", "low": 10, "high": 300}).backend.workload.fingerprint
        )
    assert totals == {4}
    common = set(works[0]) & set(works[1]) & set(works[2])
    assert len(common) >= 6 and all(works[0][t] == works[1][t] == works[2][t] for t in common)


def test_pauses_of_a_shared_pool_lie_outside_training() -> None:
    r = linear_run(**COLOCATED, run__num_rollout=3)
    assert overlap(pauses(r, 0), training(r)) == 0.0
