"""The contract between core and backend, in terms of events and actions only; the same questions to every backend.

No test here knows durations: orders, counts, conservation, barriers. What a backend alone can show is tested beside
that backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of
from tests.contract.backends import Backend
from tests.support.invariants import Record, Watch, replayed, watched
from tests.support.scenarios import COLOCATED, scenario

HYBRID = {"placement": {"mode": "hybrid", "rollout_num_gpus": 2, "actor_num_gpus": 2}}
BOUNDED = {"rollout__admission": {"type": "bounded", "max_head_offpolicyness": 1}}
FP8 = {"rollout__engine": {"weight_precision": "fp8"}, "weights__requantize": "fp8"}
VARIED = {
    "workload__reply": {"type": "uniform", "low": 20, "high": 400},
    "workload__rewards": {"latency": {"type": "exponential", "mean_s": 1.0}},
}
TOOLS = {
    "workload__turns": {"type": "fixed", "tokens": 3},
    "workload__observation": {"type": "fixed", "tokens": 20},
    "workload__tool_time": {"type": "exponential", "mean_s": 2.0},
}

SYSTEMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "colocated": dict(COLOCATED),
    "hybrid": HYBRID,
    "one step ahead": {"rollout__admission": {"type": "one_step_ahead"}},
    "bounded": BOUNDED,
    "fully async": {
        "rollout__admission": {"type": "fully_async", "async_max_concurrent_groups": 4},
        "experience__staleness": {"bound": 1, "action": "retry"},
    },
    "over-sampling": {"rollout__admission": {"type": "over_sampling", "over_sampling_ratio": 1.5}},
    "partial rollout": {
        "rollout__admission": {
            "type": "over_sampling",
            "over_sampling_ratio": 2.0,
            "long_rounds": False,
            "partial_rollout": True,
        }
    },
    "redundant members": {"rollout__redundant_members": 1},
    "slots, reuse": BOUNDED
    | {"experience__buffer": {"type": "store_then_ready"}, "experience__selection": {"use_count": 2}},
    "critic": {
        "algorithm": {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "advantage": "critic", "kl_coef": 0.1}
    },
    "teacher": {
        "algorithm": {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "advantage": "group_with_distillation"}
    },
    "recomputed, far ahead": {
        "algorithm": {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "recompute_old_log_probs": True},
        "rollout__admission": {"type": "bounded", "max_head_offpolicyness": 3},
        "experience": {"buffer": {"type": "store_then_ready", "max_buffered_groups": 8}},
    },
    "waves, requantised": BOUNDED | FP8 | {"weights__participation": {"type": "waves", "size": 1}},
    "in place": BOUNDED | {"weights__transition": {"pause_generation_mode": "in_place", "kv": "salt_by_version"}},
    "finish": BOUNDED | {"weights__transition": {"pause_generation_mode": "finish", "kv": "flush"}},
    "abort": {"rollout__admission": {"type": "one_step_ahead"}}
    | {"weights__transition": {"pause_generation_mode": "abort", "kv": "flush"}},
    "disk delta": BOUNDED | {"weights__path": {"type": "fixed", "update_weight_transfer_mode": "disk_delta"}},
    "tools": TOOLS | BOUNDED,
    "programs": TOOLS
    | BOUNDED
    | {
        "rollout__engine": {"max_total_num_tokens": 1024},
        "rollout__routing": {"type": "session_affinity"},
        "rollout__programs": {"type": "thunder_agent", "tick_s": 0.5},
    },
}


def system(backend: Backend, name: str, **changes: Any) -> Scenario:
    if name in backend.lacks:
        pytest.skip(f"the {backend.name} backend has no {name} system yet")
    return backend.adapted(scenario(**(VARIED | SYSTEMS[name] | {"run__num_rollout": 4} | changes)))


def every(records: Sequence[Record], *kinds: type) -> list[tuple[float, Any]]:
    """(time, what) of events and actions of these kinds, in order."""
    found: list[tuple[float, Any]] = []
    for event, actions in records:
        found.extend((event.t, x) for x in (event, *actions) if isinstance(x, kinds))
    return found


@pytest.fixture(params=SYSTEMS)
def run(request: pytest.FixtureRequest, backend: Backend) -> tuple[Scenario, list[Record]]:
    config = system(backend, request.param)
    return config, backend.run(config, ())


def test_invariants_hold_and_every_trajectory_is_retired_once(run: tuple[Scenario, list[Record]]) -> None:
    config, records = run
    watch = watched(config, records)
    assert watch.finished == "completed" and watch.batches == 4
    assert isinstance(records[0][0], said.RunStarted) and isinstance(records[-1][1][-1], do.Finish)


def test_a_replay_takes_the_same_actions(run: tuple[Scenario, list[Record]]) -> None:
    assert replayed(*run) > 0


@pytest.mark.parametrize("order", ["fifo", "oldest_first"])
def test_qm_13_old_log_probs_are_of_the_weights_that_their_batch_starts_from(backend: Backend, order: str) -> None:
    """The proximal policy is the trainer's just before the batch, also where generation runs far ahead of it: what lies
    in the buffer meanwhile is not scored in advance."""
    chosen = {"experience__selection": {"order": {"type": order}}}
    records = backend.run(system(backend, "recomputed, far ahead", **chosen), ())
    updates, scored_at, trained = 0, dict[int, int](), 0
    for _, x in every(records, do.ComputeSignals, do.Train, said.TrainStepFinished):
        if isinstance(x, said.TrainStepFinished):
            updates += 1
        elif isinstance(x, do.Train):
            assert {scored_at[e.trajectory] for e in x.experiences} == {updates}
            trained += len(x.experiences)
        elif x.signal == "old_log_probs":
            scored_at |= dict.fromkeys(x.trajectories, updates)
    assert trained == 16


@pytest.mark.parametrize("name", ["sync", "hybrid", "waves, requantised"])
def test_losses_and_returns_of_engines_keep_the_invariants(backend: Backend, name: str) -> None:
    if not backend.faults:
        return
    config = system(backend, name, run__num_rollout=5)
    quiet = backend.run(config, ())
    end = quiet[-1][0].t
    watch: Watch = watched(
        config, backend.run(config, (said.EngineLost(end * 0.3, 1), said.EngineJoined(end * 0.6, 1, 0)))
    )
    assert watch.batches == 5


def test_br_14_the_same_seed_gives_the_same_trace(backend: Backend) -> None:
    if backend.deterministic:
        config = system(backend, "fully async")
        assert backend.run(config, ()) == backend.run(config, ())


# --- orders -----------------------------------------------------------------------------------------------------------


def test_as_01_sync_generation_training_publication_in_turn(backend: Backend) -> None:
    phases: list[str] = []
    for _, x in every(backend.run(system(backend, "sync"), ()), do.StartTurn, do.Train, said.EngineResumed):
        kind = {do.StartTurn: "generate", do.Train: "train", said.EngineResumed: "publish"}[type(x)]
        if not phases or phases[-1] != kind:
            phases.append(kind)
    assert phases == ["generate", "train", "publish"] * 4


def test_as_02_async_generates_while_it_trains(backend: Backend) -> None:
    training, overlapped = False, 0
    for _, x in every(backend.run(system(backend, "bounded"), ()), do.Train, said.TrainStepFinished, said.TurnFinished):
        training = isinstance(x, do.Train) or (training and not isinstance(x, said.TrainStepFinished))
        overlapped += training and isinstance(x, said.TurnFinished)
    assert overlapped > 0


def test_as_03_versions_of_a_sync_run_are_those_of_the_batch(backend: Backend) -> None:
    records = backend.run(system(backend, "sync"), ())
    for _, train in every(records, do.Train):
        assert (
            {x.oldest_version for x in train.experiences}
            == {x.newest_version for x in train.experiences}
            == {train.batch}
        )


def test_as_04_deployed_versions_count_publications_and_not_updates(backend: Backend) -> None:
    algorithm = {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "num_steps_per_rollout": 2}
    config = system(backend, "bounded", algorithm=algorithm, weights__update_weights_interval=2)
    records = backend.run(config, ())
    assert len(every(records, said.TrainStepFinished)) == 8
    assert [(a.version, a.trainer_version) for _, a in every(records, do.PrepareWeights)] == [(1, 4), (2, 8)]


def test_as_12_every_trained_token_has_a_version_that_was_published_and_served(backend: Backend) -> None:
    records = backend.run(system(backend, "in place"), ())
    tokens: Counter[int] = Counter()
    versions: set[int] = set()
    for _, e in every(records, said.TurnFinished):
        tokens[e.trajectory] += sum(end - start for _, start, end in e.spans)
        versions |= {v for v, _, _ in e.spans}
    trained = [x for _, a in every(records, do.Train) for x in a.experiences]
    assert all(tokens[x.trajectory] == x.output_tokens for x in trained)
    assert versions - {0} <= {e.version for _, e in every(records, said.EngineResumed)}


@pytest.mark.parametrize("name", ["colocated", "sync"])
def test_pl_01_and_pl_03_shared_pools_switch_and_separate_ones_never(backend: Backend, name: str) -> None:
    phases = [a.phase for _, a in every(backend.run(system(backend, name), ()), do.SwitchPool)]
    assert phases == (["train", "generate"] * 4 if name == "colocated" else [])


def test_pl_05_separate_pools_with_a_barrier_do_not_overlap(backend: Backend) -> None:
    generating = training = 0
    for _, x in every(
        backend.run(system(backend, "sync"), ()), do.StartTurn, said.TurnFinished, do.Train, said.TrainStepFinished
    ):
        generating += {do.StartTurn: 1, said.TurnFinished: -1}.get(type(x), 0)
        training += {do.Train: 1, said.TrainStepFinished: -1}.get(type(x), 0)
        assert not (generating and training)


def test_pl_06_shared_gpus_serve_a_new_version_only_after_a_copy(backend: Backend) -> None:
    copied: set[tuple[int, int]] = set()
    for _, x in every(backend.run(system(backend, "colocated"), ()), said.WeightsCopied, said.TurnFinished):
        if isinstance(x, said.WeightsCopied):
            copied.add((x.engine, x.version))
        else:
            assert all(v == 0 or (x.engine, v) in copied for v, _, _ in x.spans)


@pytest.mark.parametrize("name", ["sync", "critic", "teacher"])
def test_pl_09_job_kinds_are_those_of_the_roles(backend: Backend, name: str) -> None:
    config = system(backend, name)
    kinds = {a.signal for _, a in every(backend.run(config, ()), do.ComputeSignals)}
    assert kinds == set(config.algorithm.signals)


def test_br_02_a_freed_slot_is_used_before_the_group_is_ready(backend: Backend) -> None:
    config = system(
        backend,
        "fully async",
        rollout__concurrency={"type": "per_engine", "max_concurrent_per_engine": 2},
        workload__rewards={"latency": {"type": "fixed", "seconds": 5.0}},
    )
    ready: dict[int, float] = {}
    records = backend.run(config, ())
    for _, a in every(records, do.Train):
        ready.update({x.trajectory: x.group_ready_t for x in a.experiences})
    ended = {e.trajectory: (t, e.engine) for t, e in every(records, said.TurnFinished)}
    reused = [
        t
        for t, (at, engine) in ended.items()
        if any(at <= s < ready.get(t, -1.0) and a.engine == engine for s, a in every(records, do.StartTurn))
    ]
    assert reused


def test_experience_carries_its_group_task_turns_and_reward(backend: Backend) -> None:
    records = backend.run(system(backend, "tools"), ())
    for _, train in every(records, do.Train):
        groups = Counter(x.group for x in train.experiences)
        assert set(groups.values()) == {2} and len(groups) == 2
        for x in train.experiences:
            assert x.turns >= 1 and x.output_tokens > 0 and x.reward in (0.0, 1.0)


# --- weight updates ---------------------------------------------------------------------------------------------------

CHAIN = (
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
)


@pytest.mark.parametrize(
    "name", ["sync", "bounded", "waves, requantised", "in place", "finish", "disk delta", "colocated"]
)
def test_ws_05_the_steps_of_an_update_come_in_this_order_on_every_engine(backend: Backend, name: str) -> None:
    config = system(backend, name)
    records = backend.run(config, ())
    kinds = tuple(getattr(do, n, None) or getattr(said, n) for n in CHAIN)
    wanted = [
        n
        for n in CHAIN
        if (n != "FlushCache" or config.weights.transition.kv == "flush")
        and (n not in ("RequantizeWeights", "EngineReady") or config.weights.requantize != "none")
    ]
    for engine in range(2):
        seen: list[str] = []
        for _, x in every(records, *kinds):
            if getattr(x, "engine", engine) == engine:
                seen.append(type(x).__name__)
        assert seen == wanted * 4


@pytest.mark.parametrize("name", ["bounded", "waves, requantised"])
def test_ws_06_nobody_resumes_before_the_last_of_its_wave_is_ready(backend: Backend, name: str) -> None:
    config = system(backend, name, placement={"mode": "disaggregated", "rollout_num_gpus": 3, "actor_num_gpus": 1})
    last = said.EngineReady if config.weights.requantize != "none" else said.WeightsCopied
    ready: Counter[tuple[int, int]] = Counter()
    waves: dict[tuple[int, int], tuple[int, ...]] = {}
    for _, x in every(backend.run(config, ()), last, do.CopyWeights, do.ResumeEngine):
        if isinstance(x, do.CopyWeights):
            waves[x.engine, x.version] = x.participants
        elif isinstance(x, do.ResumeEngine):
            assert all(ready[e, x.version] for e in waves[x.engine, x.version])
        else:
            ready[x.engine, x.version] += 1
    everyone = len(layout_of(config).engines)
    assert everyone > 1 and {len(w) for w in waves.values()} == ({1} if "waves" in name else {everyone})


def test_ws_09_no_request_of_a_new_version_before_all_participants_serve_it(backend: Backend) -> None:
    """Barrier over all: between two publications every engine starts turns at the same version."""
    serving = {0: 0, 1: 0}
    for _, x in every(backend.run(system(backend, "bounded"), ()), said.EngineResumed, said.TurnFinished):
        if isinstance(x, said.EngineResumed):
            serving[x.engine] = x.version
        else:
            assert x.spans[-1][0] <= serving[x.engine] and max(serving.values()) - min(serving.values()) <= 1


def test_ws_11_published_effective_requested(backend: Backend) -> None:
    first: dict[tuple[str, int], float] = {}
    for t, x in every(
        backend.run(system(backend, "sync"), ()), do.PrepareWeights, said.EngineResumed, said.TurnFinished
    ):
        if isinstance(x, said.TurnFinished):
            first.setdefault(("requested", x.spans[0][0]), x.started_t)
        else:
            first.setdefault(("published" if isinstance(x, do.PrepareWeights) else "effective", x.version), t)
    for v in (1, 2, 3):
        assert first["published", v] <= first["effective", v] <= first["requested", v]


def test_ap_03_environments_are_prepared_once_and_reclaimed(backend: Backend) -> None:
    config = system(backend, "tools")
    records = backend.run(config, ())
    prepared = Counter(a.trajectory for _, a in every(records, do.PrepareEnvironment))
    released = Counter(a.trajectory for _, a in every(records, do.ReleaseEnvironment))
    assert prepared == released and set(prepared.values()) <= {1}


@pytest.mark.parametrize("reasoning", ["at_once", "next_tool"])
def test_ap_04_and_ap_09_paused_programs_get_no_call_until_they_are_restored(backend: Backend, reasoning: str) -> None:
    """Pause and restore take turns, what is paused is sent nothing, and a restored program's next call goes to the
    engine that it was restored to."""
    config = system(backend, "programs", rollout__programs__pause_reasoning=reasoning)
    out: dict[int, bool] = {}
    place: dict[int, int] = {}
    pauses = sent = 0
    for _, x in every(
        backend.run(config, ()), do.PauseProgram, do.RestoreProgram, do.StartTurn, said.EnginePaused, do.Retire
    ):
        if isinstance(x, do.PauseProgram):
            assert not out.get(x.trajectory), "paused once"
            out[x.trajectory] = True
            place.pop(x.trajectory, None)
            pauses += 1
        elif isinstance(x, do.RestoreProgram):
            assert out.pop(x.trajectory)
            place[x.trajectory] = x.engine
        elif isinstance(x, do.StartTurn):
            assert not out.get(x.trajectory), "what is paused gets no call"
            sent += place.pop(x.trajectory, x.engine) == x.engine
        elif isinstance(x, said.EnginePaused):
            place.clear()  # a closed engine's calls go elsewhere
    assert pauses > 0 and sent > 0


@pytest.mark.parametrize("name", ["sync", "tools"])
def test_ap_01_and_ap_05_and_ap_08_one_call_or_calls_and_tools_in_turn(backend: Backend, name: str) -> None:
    """Reasoning and acting alternate, and what acts is in no engine; a task of one call is a loop without tools. The
    task ends after its last call, whatever came before."""
    steps: dict[int, list[str]] = {}
    in_engines: set[int] = set()
    for _, x in every(
        backend.run(system(backend, name), ()),
        do.StartTurn,
        said.TurnFinished,
        said.TurnFailed,
        do.RunTool,
        said.ToolFinished,
        do.ComputeSignals,
    ):
        ids = x.trajectories if isinstance(x, do.ComputeSignals) else (x.trajectory,)
        if isinstance(x, do.StartTurn):
            in_engines.add(x.trajectory)
        elif isinstance(x, said.TurnFinished | said.TurnFailed):
            in_engines.discard(x.trajectory)
        else:
            assert in_engines.isdisjoint(ids), "acting and scoring hold no slot"
        for i in ids:
            if not isinstance(x, do.StartTurn | said.TurnFailed):
                steps.setdefault(i, []).append(type(x).__name__)
    whole = [s for s in steps.values() if s[-1] == "ComputeSignals"]
    assert whole
    calls = Counter(s.count("TurnFinished") for s in whole)
    assert set(calls) == {1} if name == "sync" else max(calls) > 1
    for s in whole:
        turns = s.count("TurnFinished")
        assert s == ["TurnFinished", "RunTool", "ToolFinished"] * (turns - 1) + ["TurnFinished", "ComputeSignals"]
