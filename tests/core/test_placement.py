"""PL: which GPUs do what, what a switch costs, and that neither GPUs nor processes are roles."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario.layout import layout_of
from testbed.scenario.rules import check
from tests.support.invariants import watched
from tests.support.scenarios import COLOCATED, scenario
from tests.support.scripted import Scripted
from tests.support.timeline import generation, overlap_of_phases, publications, training

HERE = Path(__file__).parent


def gpus(rollout: int, actor: int, mode: str = "disaggregated") -> dict[str, Any]:
    return {"mode": mode, "rollout_num_gpus": rollout, "actor_num_gpus": actor}


def test_pl_01_four_shared_gpus_take_turns_and_each_phase_uses_all_four() -> None:
    config = scenario(**COLOCATED)
    run = Scripted(config).run()
    pool = layout_of(config).pools[0]
    assert (pool.gpus, pool.shared, pool.engines) == (4, True, (0, 1, 2, 3))
    assert {a.engine for _, a in run.of(do.StartTurn)} == {0, 1, 2, 3} and {a.pool for _, a in run.of(do.Train)} == {0}
    assert overlap_of_phases(run) == 0
    watched(config, run.records)  # checks it at every action: no turn on the pool's engines while it trains or switches


@pytest.mark.parametrize("switch", [0.0, 2.0, 30.0])
def test_pl_02_a_cycle_is_generation_switch_training_switch_and_the_update(switch: float) -> None:
    """Four trajectories on four engines: 10 s generation + 1 s score + switch + 5 s training + switch + 1 s copy."""
    run = Scripted(scenario(**COLOCATED, run__num_rollout=4), turn=10.0, train=5.0, copy=1.0, switch=switch).run()
    starts = [start for start, _ in training(run)]
    assert [b - a for a, b in pairwise(starts)] == [10 + 1 + switch + 5 + switch + 1] * 3
    phases = [a.phase for _, a in run.of(do.SwitchPool)]
    assert phases == ["train", "generate"] * 4


def test_pl_03_two_and_two_overlap_without_a_switch_and_pay_the_configured_path() -> None:
    runs = {}
    for path in ("broadcast", "disk"):
        config = scenario(
            placement=gpus(2, 2),
            rollout__admission={"type": "one_step_ahead"},
            weights__path={"type": "fixed", "update_weight_transfer_mode": path},
        )
        seconds = {"broadcast": 1.0, "disk": 4.0}
        run = runs[path] = Scripted(config, copy=lambda a, s=seconds: s[a.path], prepare=0.5).run()
        assert not run.of(do.SwitchPool) and overlap_of_phases(run) > 0
        assert {a.path for _, a in run.of(do.CopyWeights)} == {path}
        assert {end - start for start, end in publications(run).values()} == {0.5 + seconds[path]}


def test_pl_04_the_learner_waits_less_the_more_gpus_generate_and_the_optimum_depends_on_the_work() -> None:
    """Turns of 10 s, one at a time on each engine; training takes `work` GPU-seconds."""

    def sweep(work: float) -> dict[int, tuple[float, float]]:
        results = {}
        for rollout in (1, 2, 3):
            config = scenario(
                placement=gpus(rollout, 4 - rollout),
                rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4},
                rollout__concurrency={"type": "per_engine", "max_concurrent_per_engine": 1},
                run__num_rollout=12,
            )
            run = Scripted(config, train=work / (4 - rollout), copy=0.0, reward=0.0).run()
            busy = sum(end - start for start, end in training(run))
            end = run.records[-1][0].t
            results[rollout] = (1 - busy / end, end)
        return results

    light, heavy = sweep(12.0), sweep(75.0)
    for results in (light, heavy):
        idle = [results[n][0] for n in (1, 2, 3)]
        assert idle == sorted(idle, reverse=True) and idle[0] > idle[2]
    # four turns a batch: max(40 s / rollout GPUs, work / trainer GPUs) is least at 3 + 1 and at 2 + 2
    assert [min(results, key=lambda n: results[n][1]) for results in (light, heavy)] == [3, 2]


@pytest.mark.parametrize("admission", ["sync", "bounded"])
def test_pl_05_disjoint_gpus_do_not_make_it_asynchronous(admission: str) -> None:
    config = scenario(placement=gpus(2, 2), rollout__admission={"type": admission})
    run = Scripted(config).run()
    assert check(config, HERE) == []
    batch_of = {x.group: i for i, (_, a) in enumerate(run.of(do.Train)) for x in a.experiences}
    intervals = training(run)
    ahead = sum(
        max(0.0, min(end, intervals[k][1]) - max(start, intervals[k][0]))
        for start, end, group in generation(run)
        for k in range(len(intervals))
        if batch_of.get(group) == k + 1
    )
    assert (ahead == 0) == (admission == "sync")


@pytest.mark.parametrize("admission", ["sync", "bounded"])
def test_pl_05_shared_gpus_run_synchronously_and_asynchronously_is_refused_with_the_reason(admission: str) -> None:
    config = scenario(**COLOCATED, rollout__admission={"type": admission})
    faults = check(config, HERE)
    if admission == "sync":
        assert faults == [] and overlap_of_phases(Scripted(config).run()) == 0
    else:
        assert [f.key for f in faults] == ["rollout.admission.type"]
        assert "cannot generate while it trains" in faults[0].what and faults[0].nearest


def test_pl_06_shared_placement_serves_new_weights_only_after_an_update() -> None:
    run = Scripted(scenario(**COLOCATED)).run()
    resumed = {(e.engine, e.version): t for t, e in run.of(said.EngineResumed)}
    copied = {(e.engine, e.version): t for t, e in run.of(said.WeightsCopied)}
    trained = [end for _, end in training(run)]
    for t, e in run.of(said.TurnFinished):
        for version, _, _ in e.spans:
            if version > 0:
                assert trained[version - 1] < copied[e.engine, version] <= resumed[e.engine, version] < t
    assert {v for _, v in resumed} == {1, 2, 3}


FOUR_ROLES = {"advantage": "critic", "kl_coef": 0.1, "recompute_old_log_probs": True}
"""Actor, critic, reference, and a verifier as the fourth."""


@pytest.mark.parametrize(
    "placement",
    [
        {"mode": "colocated", "num_gpus": 1},
        gpus(1, 1),
        gpus(2, 1),
    ],
    ids=["1 GPU", "2 GPUs", "3 GPUs"],
)
def test_pl_07_four_roles_on_one_two_and_three_gpus(placement: dict[str, Any]) -> None:
    changes = dict(COLOCATED) if placement["mode"] == "colocated" else {}
    changes["placement"] = placement
    config = scenario(**changes, algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 2, **FOUR_ROLES})
    run = Scripted(config).run()
    watch = watched(config, run.records)
    assert watch.batches == 3 and watch.layout.num_gpus < 4
    assert {a.signal for _, a in run.of(do.ComputeSignals)} == {"reward", "old_log_probs", "reference", "critic"}
    on_trainer = {a.pool for _, a in run.of(do.ComputeSignals) if a.signal != "reward"}
    assert on_trainer == {watch.layout.train_pool}, "several roles use the same GPUs at different times"


def test_pl_07_one_role_on_four_gpus() -> None:
    config = scenario(
        **{**COLOCATED, "placement": {"mode": "colocated", "num_gpus": 4, "rollout_num_gpus_per_engine": 4}}
    )
    run = Scripted(config).run()
    assert {e.gpus for e in layout_of(config).engines} == {4} and {a.engine for _, a in run.of(do.StartTurn)} == {0}
    assert {a.signal for _, a in run.of(do.ComputeSignals)} == {"reward"}


def test_pl_08_generation_and_training_in_one_worker_pass_the_same_contract() -> None:
    config = scenario(**{**COLOCATED, "placement": {"mode": "colocated", "num_gpus": 1}})
    assert watched(config, Scripted(config).run().records).batches == 3


@pytest.mark.parametrize(
    ("algorithm", "jobs"),
    [
        ({"advantage": "group"}, {"reward"}),
        ({"advantage": "group", "kl_coef": 0.1}, {"reward", "reference"}),
        ({"advantage": "critic"}, {"reward", "critic"}),
        ({"advantage": "distillation"}, {"teacher"}),
        ({"advantage": "group_with_distillation"}, {"reward", "teacher"}),
        ({"advantage": "group", "recompute_old_log_probs": True}, {"reward", "old_log_probs"}),
    ],
)
def test_pl_09_only_roles_that_the_setup_asks_for_are_scheduled(algorithm: dict[str, Any], jobs: set[str]) -> None:
    config = scenario(algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 2, **algorithm})
    run = Scripted(config).run()
    assert {a.signal for _, a in run.of(do.ComputeSignals)} == jobs


def test_pl_10_an_agent_that_acts_holds_no_engine_and_an_engine_no_environment() -> None:
    config = scenario(algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 1}, run__num_rollout=1)
    run = Scripted(config, turns=2, tool=100.0, environments=True)
    run.run(until=50)
    assert [t for t, _ in run.of(do.RunTool)] == [10] and run.core.rollouts.in_flight == 0
    assert not any(e.in_flight for e in run.core.context.engines)
    prepared = run.of(do.PrepareEnvironment)[0][1]
    assert not hasattr(prepared, "engine") and prepared.trajectory == 0


def test_pl_11_readiness_batch_and_publication_are_three_decisions_each_logged_with_its_reason() -> None:
    run = Scripted(scenario(experience__selection={"order": {"type": "oldest_first"}})).run()
    assert {a.why for _, a in run.of(do.DrawTask)} == {"sync"}
    assert {a.why for _, a in run.of(do.StartTurn)} == {"least_load"}
    assert {a.why for _, a in run.of(do.Train)} == {"oldest_first"}
    assert {a.why for _, a in run.of(do.PrepareWeights)} == {"fixed"}
    assert all(x.group_ready_t <= x.dequeued_t for _, a in run.of(do.Train) for x in a.experiences)
    waits = [a.state for _, a in run.of(do.Note) if a.subject == "trainer"]
    assert {"empty", "too_few_ready", "busy", "publishing"} <= set(waits)


def test_pl_11_the_path_is_chosen_by_total_cost_and_says_so() -> None:
    config = scenario(weights__path={"type": "cheapest", "among": ["broadcast", "p2p"]}, run__num_rollout=1)
    run = Scripted(config)
    # the faster transfer loses on the total
    costs = (
        said.PathCost("broadcast", prepare_s=1.0, transfer_s=5.0, apply_s=0.5, requantize_s=0.0),
        said.PathCost("p2p", prepare_s=6.0, transfer_s=1.0, apply_s=0.5, requantize_s=0.0),
    )
    run.tell(said.RunStarted(0.0, costs))
    run.run()
    chosen = run.of(do.PrepareWeights)[0][1]
    assert chosen.path == "broadcast" and chosen.why == "cheapest: 6.500 s of broadcast 6.500, p2p 7.500"


def test_hybrid_gpus_generate_and_train_in_turns_while_the_dedicated_engines_go_on() -> None:
    config = scenario(
        placement=gpus(2, 2, "hybrid"),
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4},
        rollout__concurrency={"type": "per_engine", "max_concurrent_per_engine": 1},
        run__num_rollout=6,
    )
    run = Scripted(config).run()
    watched(config, run.records)
    flex = layout_of(config).pools[1].engines
    turns = [(s, e) for engine in flex for s, e, _ in generation(run, engine)]
    assert turns and overlap_of_phases(run) > 0
    assert any(start > training(run)[0][1] for start, _ in turns), "they come back to generation after training"
