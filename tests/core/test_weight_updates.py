"""WS: the steps of a weight update, the barrier, the rule, waves, and what a failure leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from testbed.core import actions as do
from testbed.core import events as said
from testbed.policies.publication import choose_path, waves
from testbed.scenario import Scenario
from tests.support.invariants import watched
from tests.support.scenarios import COLOCATED, scenario, tree
from tests.support.scripted import Scripted, names
from tests.support.timeline import generation, pauses, publications

SINGLE = {"n_samples_per_prompt": 1, "rollout_batch_size": 1}
FP8 = {"rollout__engine": {"weight_precision": "fp8"}, "weights__requantize": "fp8"}
STEPS = (
    do.PrepareWeights,
    said.WeightsPrepared,
    do.PauseEngine,
    said.EnginePaused,
    do.FlushCache,
    do.CopyWeights,
    said.WeightsCopied,
    do.RequantizeWeights,
    said.EngineReady,
    do.ResumeEngine,
    said.EngineResumed,
)


def steps(run: Scripted, engine: int, version: int) -> list[str]:
    """Names of the steps that one engine went through towards one version, in order."""
    at = next(i for i, (_, x) in enumerate(run.log) if isinstance(x, do.PrepareWeights) and x.version == version)
    end = next(
        i
        for i, (_, x) in enumerate(run.log)
        if isinstance(x, said.EngineResumed) and (x.engine, x.version) == (engine, version)
    )
    return names(
        (t, x) for t, x in run.log[at : end + 1] if isinstance(x, STEPS) and getattr(x, "engine", engine) == engine
    )


def times(run: Scripted, kind: type, version: int) -> dict[int, float]:
    return {x.engine: t for t, x in run.of(kind) if x.version == version}


def test_ws_07_with_a_conversion_copied_is_not_ready_and_without_one_it_is() -> None:
    with_it = Scripted(scenario(**FP8, run__num_rollout=1)).run()
    assert steps(with_it, 0, 1) == [
        "PrepareWeights",
        "WeightsPrepared",
        "PauseEngine",
        "EnginePaused",
        "FlushCache",
        "CopyWeights",
        "WeightsCopied",
        "RequantizeWeights",
        "EngineReady",
        "ResumeEngine",
        "EngineResumed",
    ]
    without = Scripted(scenario(run__num_rollout=1)).run()
    assert steps(without, 0, 1) == [
        "PrepareWeights",
        "WeightsPrepared",
        "PauseEngine",
        "EnginePaused",
        "FlushCache",
        "CopyWeights",
        "WeightsCopied",
        "ResumeEngine",
        "EngineResumed",
    ]


def test_ws_07_without_requantization_copied_is_ready_at_once() -> None:
    run = Scripted(scenario(run__num_rollout=1)).run()
    assert not run.of(do.RequantizeWeights, said.EngineReady)
    assert times(run, do.ResumeEngine, 1) == times(run, said.WeightsCopied, 1)


@pytest.mark.parametrize("path", ["broadcast", "p2p", "disk", "disk_delta"])
def test_ws_03_every_path_is_one_interface(path: str) -> None:
    config = scenario(weights__path={"type": "fixed", "update_weight_transfer_mode": path})
    run = Scripted(config).run()
    assert {a.path for _, a in run.of(do.PrepareWeights, do.CopyWeights)} == {path}
    assert watched(config, run.records).batches == 3


def test_ws_04_conversion_transfer_and_application_are_compared_together() -> None:
    weights = scenario(weights__path={"type": "cheapest", "among": ["broadcast", "p2p", "disk_delta"]}).weights
    costs = [
        said.PathCost("broadcast", prepare_s=0.0, transfer_s=9.0, apply_s=1.0, requantize_s=2.0),
        said.PathCost("p2p", prepare_s=2.0, transfer_s=6.0, apply_s=1.0, requantize_s=2.0),
        said.PathCost("disk_delta", prepare_s=8.0, transfer_s=1.0, apply_s=3.0, requantize_s=2.0),
    ]
    assert choose_path(weights, costs)[0] == "p2p"
    assert min(costs, key=lambda c: c.transfer_s).path == "disk_delta", "the fastest transfer loses on the total"
    tie = [costs[0], said.PathCost("p2p", 3.0, 6.0, 1.0, 2.0)]
    assert choose_path(weights, tie)[0] == "broadcast", "ties go to the first of `among`"
    with pytest.raises(ValueError, match="no expected cost"):
        choose_path(weights, [])


# --- the barrier: v21 to A and B --------------------------------------------------------------------------------------

A, B, C = 0, 1, 2


def v21(engines: int = 2, **changes: Any) -> Scripted:
    """Twenty publications go by; v21 is requantised in 5 s on A and in 9 s on B. Generation never stops to ask for
    more."""
    config = scenario(
        algorithm=SINGLE,
        placement={"mode": "disaggregated", "rollout_num_gpus": engines, "actor_num_gpus": 1},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4},
        **FP8,
        run__num_rollout=30,
        **changes,
    )
    return Scripted(
        config, turn=30.0, requantize=lambda a: {A: 5.0, B: 9.0}.get(a.engine, 0.0) if a.version == 21 else 0.0
    )


def test_ws_05_worked_example_copy_done_is_not_ready_and_nothing_of_v21_is_admitted_meanwhile() -> None:
    run = v21().run()
    copied, ready = times(run, said.WeightsCopied, 21), times(run, said.EngineReady, 21)
    assert copied[A] == copied[B] < ready[A] < ready[B]
    assert (ready[A] - copied[A], ready[B] - copied[B]) == (5, 9)
    between = [a for t, a in run.of(do.StartTurn) if copied[A] <= t < ready[B]]
    assert not between, "A is ready and B is not: no request is admitted"
    early = [e for t, e in run.of(said.TurnFinished) if t <= ready[B] and any(v >= 21 for v, _, _ in e.spans)]
    assert not early


def test_ws_05_the_states_between_copy_and_ready_are_states_of_their_own() -> None:
    run = v21()
    seen: list[tuple[str, str]] = []
    tell = run.tell

    def watching(event: said.Event) -> list[do.Action]:
        actions = tell(event)
        update = run.core.publications.update
        if update is not None and update.version == 21:
            states = tuple(run.core.context.engines[e].state for e in (A, B))
            if not seen or seen[-1] != states:
                seen.append(states)  # type: ignore[arg-type]
        return actions

    run.tell = watching  # type: ignore[method-assign]
    run.run()
    assert ("requantizing", "requantizing") in seen
    assert seen.index(("ready", "requantizing")) < seen.index(("resuming", "resuming"))


def test_ws_06_barrier_time_is_the_latest_of_the_participants() -> None:
    run = v21().run()
    ready, resumed = times(run, said.EngineReady, 21), times(run, do.ResumeEngine, 21)
    assert resumed[A] == resumed[B] == max(ready.values())


def test_ws_06_a_worker_that_does_not_participate_does_not_hold_it() -> None:
    """Waves of one: A resumes at its own readiness, while B serves the old version and comes later."""
    run = v21(weights__participation={"type": "waves", "size": 1})
    run._turn = 120.0  # bound by generation: there is always a turn in B
    run.run()
    ready, resumed = times(run, said.EngineReady, 21), times(run, do.ResumeEngine, 21)
    assert resumed == ready and resumed[A] < times(run, do.PauseEngine, 21)[B] + 1e-9
    serving = [s for s, e, _ in generation(run, B) if s < resumed[A] < e]
    assert serving, "B generates while A is updated"


def test_ws_06_a_lost_worker_leaves_the_barrier() -> None:
    run = v21(engines=3)
    run._requantize = lambda a: {A: 5.0, B: 9.0, C: 1000.0}[a.engine] if a.version == 21 else 0.0
    start = next(t for t, a in v21(engines=3).run().of(do.PauseEngine) if a.version == 21)
    run.lose(start + 7.0, C)
    run.run()
    ready, resumed = times(run, said.EngineReady, 21), times(run, do.ResumeEngine, 21)
    assert set(resumed) == {A, B} and resumed[A] == resumed[B] == ready[B]


def test_ws_06_a_collective_copy_starts_when_every_engine_of_the_wave_is_paused() -> None:
    run = Scripted(scenario(run__num_rollout=1))
    slow = {0: 0.0, 1: 3.0}
    run._on_PauseEngine = lambda a: run.at(  # type: ignore[method-assign]
        run.now + slow[a.engine], lambda t: said.EnginePaused(t, a.engine)
    )
    run.run()
    assert set(times(run, do.CopyWeights, 1).values()) == {max(t for t, _ in run.of(said.EnginePaused))}
    assert {a.participants for _, a in run.of(do.CopyWeights)} == {(0, 1)}


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["transition", "pause_generation_mode", "kv"])
def test_ws_08_an_update_without_a_declared_rule_is_impossible(missing: str) -> None:
    data = tree()
    del (data["weights"] if missing == "transition" else data["weights"]["transition"])[missing]
    with pytest.raises(ValidationError, match=missing):
        Scenario.model_validate(data)


def test_ws_08_the_rule_is_frozen() -> None:
    rule = scenario().weights.transition
    with pytest.raises(ValidationError, match="frozen"):
        rule.kv = "keep"  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["finish", "retract", "in_place", "abort"])
@pytest.mark.parametrize("kv", ["flush", "salt_by_version", "keep"])
def test_ws_08_every_engine_of_an_update_gets_the_declared_rule(mode: str, kv: str) -> None:
    config = scenario(
        algorithm=SINGLE,
        rollout__admission={"type": "one_step_ahead"},
        weights__transition={"pause_generation_mode": mode, "kv": kv},
    )
    run = Scripted(config, turn=lambda a: 10.0 + 30 * (a.group == 1)).run()
    assert {a.mode for _, a in run.of(do.PauseEngine)} == {"retract" if mode == "finish" else mode}
    assert {a.kv for _, a in run.of(do.ResumeEngine)} == {kv}
    assert len(run.of(do.FlushCache)) == (len(run.of(do.PauseEngine)) if kv == "flush" else 0)
    in_flight = next(s for s, _, g in generation(run) if g == 1)
    first_pause = run.of(do.PauseEngine)[0][0]
    if mode == "finish":
        assert first_pause >= in_flight + 40, "requests in flight end on the old version first"
    aborted = [e for _, e in run.of(said.TurnFailed)]
    assert bool(aborted) == (mode == "abort")
    watched(config, run.records)


def test_ws_09_served_versions_at_start_and_end_are_recorded_and_not_mixed_across_participants() -> None:
    """All participants together: no two turns that start at the same time start at different versions."""
    config = scenario(rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 4}, run__num_rollout=8)
    run = Scripted(config, turn=lambda a: 5.0 + a.trajectory % 5).run()
    served: dict[float, set[int]] = {}
    version = {0: 0, 1: 0}
    for t, x in run.log:
        if isinstance(x, said.EngineResumed):
            version[x.engine] = x.version
        elif isinstance(x, do.StartTurn):
            served.setdefault(t, set()).add(version[x.engine])
    assert all(max(v) - min(v) <= 1 for v in served.values())
    late = {t: v for t, v in served.items() if len(v) > 1}
    resumes = {t for t, _ in run.of(said.EngineResumed)}
    assert set(late) <= resumes, "only between two reports of one and the same moment"
    for _, e in run.of(said.TurnFinished):
        assert e.spans[0][0] <= e.spans[-1][0]


def test_ws_10_pause_and_total_sync_time_are_two_numbers() -> None:
    """Preparation (8 s) overlaps with generation; the pause is copy, requantisation and resume."""
    config = scenario(
        rollout__admission={"type": "one_step_ahead"},
        weights__transition={"pause_generation_mode": "in_place", "kv": "keep"},
        **FP8,
        run__num_rollout=2,
    )
    run = Scripted(config, turn=40.0, prepare=8.0, pause=0.5, copy=2.0, requantize=1.5, resume=0.25).run()
    start, end = publications(run)[1]
    pause = pauses(run, 0)[0]
    assert (pause[1] - pause[0], end - start) == (0.5 + 2 + 1.5 + 0.25, 8 + 0.5 + 2 + 1.5 + 0.25)
    assert any(s < pause[0] and e > pause[1] for s, e, _ in generation(run, 0))


def test_ws_11_every_version_is_published_then_effective_then_requested() -> None:
    run = Scripted(scenario(run__num_rollout=5), prepare=1.0).run()
    published = {a.version: t for t, a in run.of(do.PrepareWeights)}
    effective = {e.version: t for t, e in run.of(said.EngineResumed)}
    first: dict[int, float] = {}
    for _, e in run.of(said.TurnFinished):
        first.setdefault(e.spans[0][0], e.started_t)
    assert list(published) == [1, 2, 3, 4, 5] == list(effective)
    assert all(published[v] < effective[v] <= first[v] for v in (1, 2, 3, 4))


def test_waves_partition_the_participants() -> None:
    weights = scenario(weights__participation={"type": "waves", "size": 2}).weights
    assert waves(weights, (0, 1, 2, 3, 4)) == [(0, 1), (2, 3), (4,)]
    assert waves(scenario().weights, (3, 4)) == [(3, 4)] and waves(scenario().weights, ()) == []


@pytest.mark.parametrize("kv", ["flush", "salt_by_version", "keep"])
def test_rk_08_kv_of_an_older_version_is_refused_unless_the_rule_says_keep(kv: str) -> None:
    config = scenario(
        algorithm=SINGLE, weights__transition={"pause_generation_mode": "retract", "kv": kv}, run__num_rollout=3
    )
    run = Scripted(config)
    run.run(until=17.5)  # the second turn, sent to v1
    start = run.of(do.StartTurn)[-1][1]
    assert run.version[start.engine] == 1

    def finished(kv_version: int) -> said.TurnFinished:
        return said.TurnFinished(
            20.0,
            start.trajectory,
            0,
            start.engine,
            100,
            50,
            ((1, 0, 50),),
            80,
            18.0,
            18.0,
            "stop",
            kv_version=kv_version,
        )

    if kv == "keep":
        run.core.handle(finished(0))
    else:
        with pytest.raises(RuntimeError, match="reused KV of version 0"):
            run.core.handle(finished(0))


# --- failures ---------------------------------------------------------------------------------------------------------

STAGES = {
    "prepare": do.PrepareWeights,
    "pause": do.PauseEngine,
    "copy": do.CopyWeights,
    "requantize": do.RequantizeWeights,
}


def failing(stage: str, *, version: int = 2, times: int = 1, engine: int = 1, **changes: Any) -> Scripted:
    """The update to `version` fails `times` times at one stage, on one engine where there is one."""
    config = scenario(**FP8, run__num_rollout=4, **changes)
    run = Scripted(config, pause=0.5, copy=lambda a: 1.0 + 2 * a.engine, requantize=1.0)
    left = [times]

    def fails(a: Any) -> bool:
        hit = (
            type(a) is STAGES[stage] and a.version == version and getattr(a, "engine", engine) == engine and left[0] > 0
        )
        left[0] -= hit
        return hit

    run.fails = fails
    return run


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("path", ["rendezvous", "each"])
def test_ws_14_a_failure_at_any_stage_leaves_the_old_version_serving_everywhere(
    stage: str, placement: str, path: str
) -> None:
    changes = dict(COLOCATED) if placement == "colocated" else {}
    mode = {"rendezvous": "broadcast", "each": "p2p"}[path]
    changes["weights__path"] = {
        "type": "fixed",
        "update_weight_transfer_mode": ("cuda_ipc" if path == "rendezvous" else "disk")
        if placement == "colocated"
        else mode,
    }
    run = failing(stage, **changes).run()
    failure = next(t for t, e in run.of(said.WeightUpdateFailed))
    resumed = [(t, e.engine, e.version) for t, e in run.of(said.EngineResumed)]
    retry = next((t for t, a in run.of(do.PrepareWeights) if t > failure), float("inf"))
    assert {v for t, _, v in resumed if failure < t < retry} <= {1}, "the old version serves"
    before_retry = [e for t, e in run.of(said.TurnFinished) if failure < t < retry]
    assert before_retry and {v for e in before_retry for v, _, _ in e.spans} == {1}
    watch = watched(run.scenario, run.records)
    assert watch.batches == 4 and run.core.context.progress.deployed == 3, "one publication of four is missing"


def test_ws_14_retry_copies_again_and_the_version_goes_out() -> None:
    run = failing("copy", times=2, weights__on_failure="retry").run()
    assert len([a for _, a in run.of(do.CopyWeights) if (a.engine, a.version) == (1, 2)]) == 3
    assert run.core.context.progress.deployed == 4
    watched(run.scenario, run.records)


def test_ws_14_retry_gives_up_after_three_more_copies() -> None:
    run = failing("copy", times=99, weights__on_failure="retry").run()
    copies = [a for _, a in run.of(do.CopyWeights) if (a.engine, a.version) == (1, 2)]
    first_try = [t for t, a in run.of(do.PrepareWeights) if a.version == 2]
    assert len(copies) % 4 == 0 and len(copies) // 4 == len(first_try) == 3
    assert run.core.context.progress.deployed == 1, "the update to 2 never goes out, the old version serves to the end"
    watched(run.scenario, run.records)


def test_ws_14_a_failing_engine_is_removed_and_the_others_go_on() -> None:
    run = failing("copy", weights__on_failure="remove_engine").run()
    assert [a.subject for _, a in run.of(do.Note) if a.state == "removed"] == ["engine:1"]
    removed = next(t for t, a in run.of(do.Note) if a.state == "removed")
    assert {a.engine for t, a in run.of(do.StartTurn) if t > removed} == {0}
    assert run.core.context.progress.deployed == 4
    watched(run.scenario, run.records)


@pytest.mark.parametrize("on_failure", ["keep_old_version", "remove_engine", "retry"])
@pytest.mark.parametrize("silent", [do.PauseEngine, do.CopyWeights, do.RequantizeWeights, do.ResumeEngine])
def test_ws_14_a_worker_that_never_answers_does_not_hold_the_barrier_for_ever(on_failure: str, silent: type) -> None:
    """After `timeout_s` the barrier does without it; it is never admitted half-ready."""
    config = scenario(**FP8, weights__on_failure=on_failure, weights__timeout_s=50.0, run__num_rollout=4)
    run = Scripted(config)
    run.drops = lambda a: type(a) is silent and (a.engine, a.version) == (1, 2)
    run.run()
    assert run.core.finished and watched(config, run.records).batches == 4
    paused = next(t for t, a in run.of(do.PauseEngine) if (a.engine, a.version) == (1, 2))
    assert any(t >= paused + 50 for t, _ in run.of(said.TimerFired))
    assert not any(a.state == "removed" and a.subject == "engine:0" for _, a in run.of(do.Note)), "it is not at fault"
    resumed = [(e.engine, e.version) for _, e in run.of(said.EngineResumed)]
    assert (1, 2) not in resumed


def test_ws_14_a_late_answer_of_an_update_that_was_given_up_changes_nothing() -> None:
    """The copy of engine 1 takes longer than the timeout and is reported when the old version has long been resumed."""
    config = scenario(weights__timeout_s=20.0, run__num_rollout=4)
    run = Scripted(config, copy=lambda a: 70.0 if (a.engine, a.version) == (1, 2) else 1.0)
    run.run()
    late = max(t for t, e in run.of(said.WeightsCopied) if (e.engine, e.version) == (1, 2))
    assert late > next(t for t, a in run.of(do.ResumeEngine) if (a.engine, a.version) == (1, 1)) + 20
    assert watched(config, run.records).batches == 4


def test_ws_14_a_failed_catch_up_is_tried_again_before_the_engine_serves() -> None:
    run = Scripted(scenario(run__num_rollout=6))
    run.lose(30.0, 1)
    run.join(40.0, 1, version=0)
    left = [2]

    def fails(a: Any) -> bool:
        hit = type(a) is do.CopyWeights and a.participants == (1,) and left[0] > 0
        left[0] -= hit
        return hit

    run.fails = fails
    run.run()
    assert left == [0]
    behind = [e for t, e in run.of(said.TurnFinished) if t > 40 and e.engine == 1 and e.spans[0][0] == 0]
    assert not behind and watched(run.scenario, run.records).batches == 6
    assert any(a.engine == 1 for t, a in run.of(do.StartTurn) if t > 40), "it serves again"
