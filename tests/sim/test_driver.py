"""The driver of the simulated backend: determinism, symmetry, conservation, faults, the watchdog, and runs that are cut
short."""

from __future__ import annotations

import copy
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sim.driver import SimulatedBackend
from sim.errors import StuckError
from sim.run import simulate
from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.core import Core
from testbed.core.rollouts import MAX_ATTEMPTS
from testbed.journal import read_journal
from testbed.journal.replay import replay
from testbed.metrics import read_summary
from testbed.scenario import Scenario
from testbed.workloads import workload
from tests.support.scenarios import COLOCATED, scenario, tree
from tests.support.simulated import HERE, LINEAR, QUICK, Run, fixed, linear_run, run, split

HYBRID = {"mode": "hybrid", "rollout_num_gpus": 2, "actor_num_gpus": 2, "rollout_num_gpus_per_engine": 1}
VARIED: dict[str, Any] = {
    **QUICK,
    "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 2},
    "workload__prompt": {"type": "uniform", "low": 20, "high": 200},
    "workload__reply": {"type": "lognormal", "mean": 150, "sigma": 0.8},
    "workload__turns": {"type": "geometric", "mean": 2.0},
    "workload__observation": {"type": "uniform", "low": 1, "high": 40},
    "workload__tool_time": {"type": "exponential", "mean_s": 1.0},
    "rollout__routing": {"type": "random"},
    "rollout__admission": {"type": "one_step_ahead"},
    "run__num_rollout": 4,
}
"""Every random stream is used: lengths, turns, tools, rewards, and the core's own generator."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_ahead": {"rollout__admission": {"type": "one_step_ahead"}},
    "fully_async": {"rollout__admission": {"type": "fully_async", "async_max_concurrent_groups": 4}},
    "over_sampling": {"rollout__admission": {"type": "over_sampling", "over_sampling_ratio": 1.5}},
    "bounded, drops": {
        "rollout__admission": {"type": "bounded", "max_head_offpolicyness": 2},
        "experience__staleness": {"bound": 0, "action": "drop"},
    },
    "colocated": {**COLOCATED, "rollout__admission": {"type": "sync"}},
    "hybrid": {"placement": HYBRID, "rollout__admission": {"type": "one_step_ahead"}},
    "critic": {"algorithm__advantage": "critic"},
    "disk_delta in waves": {
        "weights__path": {"type": "fixed", "update_weight_transfer_mode": "disk_delta"},
        "weights__participation": {"type": "waves", "size": 1},
    },
}


def system(name: str, **changes: Any) -> Scenario:
    return scenario(**{**copy.deepcopy(VARIED), **SYSTEMS[name], **changes})


# --- determinism ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_br_14_the_same_seed_gives_the_same_journal_byte_for_byte(name: str) -> None:
    assert run(system(name)).journal_lines() == run(system(name)).journal_lines()


def test_br_14_another_seed_gives_another_run() -> None:
    assert run(system("sync")).journal_lines() != run(system("sync", run__seed=1)).journal_lines()


def test_two_runs_in_one_process_do_not_see_each_other() -> None:
    """Interleaved step by step, each gives what it gives alone."""
    alone = [run(system("sync")).journal_lines(), run(system("hybrid")).journal_lines()]
    together = [Run(system("sync")), Run(system("hybrid"))]
    for r in together:
        r.backend.start()
    while not all(r.backend.core.finished for r in together):
        for r in together:
            if not r.backend.core.finished:
                r.backend.clock.step()
    assert [r.journal_lines() for r in together] == alone


@pytest.mark.parametrize("name", ["sync", "colocated", "hybrid", "fully_async", "over_sampling"])
def test_every_layout_sees_the_same_workload(name: str) -> None:
    """By task and member: what the source planned, whatever engine made it and when."""
    r = run(system(name))
    source = workload(r.scenario, HERE)
    plans: dict[int, Any] = {}
    seen = 0
    for _, e, sent in r.turns():
        while sent.task not in plans:
            task = source.draw()
            plans[task.index] = task.plans
        plan = plans[sent.task][sent.member]
        assert e.output_tokens == plan.output_tokens[e.turn]
        assert e.continues == (e.turn + 1 < len(plan.output_tokens))
        seen += 1
    for x in (x for batch in r.batches for x in batch.experiences):
        assert x.turns == len(plans[x.task][0].output_tokens) or x.turns > 0
        assert x.output_tokens in {sum(p.output_tokens) for p in plans[x.task]}
    assert seen >= 4 * 8
    assert r.backend.workload.fingerprint == source.fingerprint


# --- symmetry ---------------------------------------------------------------------------------------------------------


def doubled(factor: float) -> Scenario:
    """All durations times `factor`: engine coefficients, tools, rewards, training; weight paths of fixed overhead."""
    config = tree(**VARIED)
    config["simulation"]["engine_costs"] = {
        "type": "linear",
        "base_s": 0.01 * factor,
        "per_sequence_s": 1e-3 * factor,
        "per_context_token_s": 2e-6 * factor,
        "prefill_base_s": 0.02 * factor,
        "prefill_per_token_s": 1e-4 * factor,
    }
    config["workload"]["tool_time"] = {"type": "exponential", "mean_s": 1.0 * factor}
    config["workload"]["rewards"] = {"latency": {"type": "fixed", "seconds": 0.5 * factor}}
    config["training"] = {"cost": {"type": "rate", "samples_per_s": 2.0 / factor, "fixed_s": 0.25 * factor}}
    config["rollout"]["admission"] = {"type": "sync"}
    config["weights"]["update_weights_interval"] = (
        3  # one publication, after the last batch: weight paths have units of their own
    )
    config["run"]["num_rollout"] = 3
    return Scenario.model_validate(config)


def test_a_change_of_the_time_unit_changes_all_times_and_nothing_else() -> None:
    """Half of every duration is half of every time: exactly, for halving a float is exact."""
    whole, half = run(doubled(1.0)), run(doubled(0.5))
    trained = [len([x for x in r.log if isinstance(x[1], said.TrainStepFinished)]) for r in (whole, half)]
    assert trained == [3, 3]
    for (e, a), (f, b) in zip(whole.records, half.records, strict=False):
        assert type(e) is type(f)
        if isinstance(e, said.WeightsPrepared):
            break
        assert f.t == e.t / 2
        assert [type(x) for x in a] == [type(x) for x in b]
        if isinstance(e, said.TurnFinished):
            assert (f.started_t, f.first_token_t) == (e.started_t / 2, e.first_token_t / 2)
            assert (f.engine, f.spans) == (e.engine, e.spans)
    else:
        raise AssertionError("the publication is the end")


@pytest.mark.parametrize("order", [(1, 0), (2, 0, 1)])
def test_identical_engines_may_be_renumbered(order: tuple[int, ...]) -> None:
    """Rotating which engine stands first renames engines and changes no time: with round robin, and equal engines."""
    n = len(order)
    config = scenario(
        **{
            **VARIED,
            "rollout__routing": {"type": "round_robin"},
            "placement": split(n, 1),
            "algorithm__n_samples_per_prompt": n,
        }
    )
    plain = run(config)

    class Renumbered(Core):
        """The same core over engines that have other names outside."""

        def handle(self, event: Any) -> Any:
            if hasattr(event, "engine") and event.engine >= 0:
                event = type(event)(
                    **{**{f: getattr(event, f) for f in event.__struct_fields__}, "engine": inside[event.engine]}
                )
            actions = super().handle(event)
            return [renamed(a) for a in actions]

    inside = {outside: i for i, outside in enumerate(order)}

    def renamed(a: Any) -> Any:
        fields = {f: getattr(a, f) for f in a.__struct_fields__}
        if "engine" in fields and fields["engine"] >= 0:
            fields["engine"] = order[fields["engine"]]
        if "participants" in fields:
            fields["participants"] = tuple(order[i] for i in fields["participants"])
        return type(a)(**fields)

    other = Run(config)
    other.backend.core = core = Renumbered(config)
    other.backend._handle = core.handle
    other.go()
    times = [[(t, e.trajectory, e.turn, e.output_tokens) for t, e in r.of(said.TurnFinished)] for r in (plain, other)]
    assert sorted(times[0]) == sorted(times[1])
    engines = [{(e.trajectory, e.turn): e.engine for _, e in r.of(said.TurnFinished)} for r in (plain, other)]
    assert {k: order[v] for k, v in engines[0].items()} == engines[1]
    assert plain.steps == other.steps


# --- invariants and conservation --------------------------------------------------------------------------------------

RULES = [
    (mode, kv)
    for mode in ("finish", "retract", "in_place", "abort")
    for kv in ("flush", "salt_by_version", "keep")
    if (mode, kv) != ("in_place", "flush")
]


@pytest.mark.parametrize(("mode", "kv"), RULES)
@pytest.mark.parametrize("name", ["one_step_ahead", "hybrid", "disk_delta in waves"])
def test_every_invariant_holds_under_every_transition_rule(name: str, mode: str, kv: str) -> None:
    r = run(system(name, weights__transition={"pause_generation_mode": mode, "kv": kv}))
    r.checked()
    if kv != "keep":
        sent: dict[tuple[int, int], int] = {}
        version = [0] * len(r.backend.engines)
        for _, x in r.log:
            if isinstance(x, said.EngineResumed):
                version[x.engine] = x.version
            elif isinstance(x, do.StartTurn):
                sent[x.trajectory, x.turn] = version[x.engine]
            elif isinstance(x, said.TurnFinished) and x.kv_version >= 0:
                assert x.kv_version >= sent[x.trajectory, x.turn], "KV of an older version is never reused"


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_invariant_holds_in_every_system_and_the_core_repeats_its_decisions(name: str) -> None:
    r = run(system(name))
    r.checked()
    core = Core(r.scenario)
    for event, actions in r.records:
        assert core.handle(event) == actions


@pytest.mark.parametrize("name", SYSTEMS)
def test_br_14_groups_trajectories_and_tokens_are_conserved(name: str) -> None:
    """Whoever was submitted is retired once; whatever was generated is trained, or in a retired trajectory, or lost in
    a call."""
    r = run(system(name))
    started = {t for _, a in r.of(do.StartTurn) for t in (a.trajectory,)}
    retired = Counter(t for _, a in r.of(do.Retire) for t in a.trajectories)
    assert set(retired.values()) == {1} and started <= set(retired)
    trained = {x.trajectory for b in r.batches for x in b.experiences}
    outcomes = {t: a.outcome for _, a in r.of(do.Retire) for t in a.trajectories}
    assert {t for t, o in outcomes.items() if o == "trained"} == trained
    assert len(r.batches) == 4
    finished: Counter[int] = Counter()
    for _, e, _ in r.turns():
        finished[e.trajectory] += e.output_tokens
    trained_tokens = {x.trajectory: x.output_tokens for b in r.batches for x in b.experiences}
    assert all(finished[t] == n for t, n in trained_tokens.items())
    retired_tokens = sum(a.output_tokens for _, a in r.of(do.Retire))
    assert retired_tokens == sum(finished.values())


@pytest.mark.parametrize("name", ["sync", "one_step_ahead", "critic", "over_sampling"])
def test_nothing_is_left_behind_when_everything_was_trained(name: str) -> None:
    """The models hold no conversation, request, environment or tool call of a trajectory that is over."""
    r = run(
        system(
            name,
            workload__num_tasks=6,
            run__num_rollout=50,
            workload__tools={"environments": 4, "environment_prepare": {"type": "fixed", "seconds": 0.5}},
        )
    )
    backend = r.backend
    assert r.finish_reason == "tasks_exhausted"
    assert all(s.model.running + s.model.waiting == 0 and s.model.kv_used == 0 for s in backend.engines)
    assert not backend.core.context.trajectories and not backend.core.context.groups
    left = [t for t in backend.store._conversations if t not in {x for _, a in r.of(do.Retire) for x in a.trajectories}]
    assert not left
    assert backend.services.tools.busy == backend.services.verifiers.busy == 0
    assert len(r.of(do.PrepareEnvironment)) == len(r.of(do.ReleaseEnvironment)) > 0
    assert not backend.services.environments._environments, "none is held"


def test_a_task_is_there_for_its_long_round_although_other_members_were_trained() -> None:
    """Critic baseline: a stopped round keeps the finished members of a group and runs the task of the others again."""
    config = system("over_sampling", algorithm__advantage="critic", run__num_rollout=8)
    r = run(config)
    again = [a for _, a in r.of(do.DrawTask) if a.task >= 0]
    assert again and {a.why for a in again} == {"over_sampling:long"}
    r.checked()


# --- faults -----------------------------------------------------------------------------------------------------------

ON_FAILURE = ("keep_old_version", "remove_engine", "retry")


@pytest.mark.parametrize("name", ["sync", "one_step_ahead", "hybrid", "disk_delta in waves", "over_sampling"])
@pytest.mark.parametrize("seed", range(3))
def test_engines_that_are_lost_and_come_back_break_no_invariant(name: str, seed: int) -> None:
    r = random.Random(seed)
    faults: list[said.Event] = []
    t = 0.0
    for engine in (0, 1):  # one after the other: a run whose last engine is lost is over
        lost, back = t + r.uniform(0.5, 6.0), r.uniform(0.5, 6.0)
        t = lost + back
        faults += [said.EngineLost(lost, engine), said.EngineJoined(t, engine, 0)]
    faulty = run(system(name), faults)
    faulty.checked()
    assert len(faulty.steps) == 4
    assert len(faulty.of(said.EngineLost)) == len(faulty.of(said.EngineJoined)) == 2
    assert {e.engine for _, e, _ in faulty.turns()} >= {0, 1}, "both serve again"


def copies(config: Scenario) -> list[tuple[float, do.CopyWeights]]:
    """When the copies of an undisturbed run begin."""
    return run(config).of(do.CopyWeights)


@pytest.mark.parametrize("on_failure", ON_FAILURE)
@pytest.mark.parametrize("name", ["sync", "one_step_ahead", "disk_delta in waves"])
def test_ws_14_a_copy_that_fails_never_admits_a_half_ready_engine(name: str, on_failure: str) -> None:
    config = system(name, weights__on_failure=on_failure)
    t, a = copies(config)[0]
    faulty = run(config, [said.WeightUpdateFailed(t + 1e-6, a.engine, a.version, "copy", "as the test says")])
    faulty.checked()
    assert len(faulty.steps) == 4
    resumed = [e for _, e in faulty.of(said.EngineResumed) if e.version == a.version]
    notes = [n for _, n in faulty.of(do.Note) if n.state == "removed"]
    if on_failure == "keep_old_version":
        assert faulty.of(said.EngineResumed)[0][1].version == 0, "the old version goes on"
    elif on_failure == "remove_engine":
        assert [n.subject for n in notes] == [f"engine:{a.engine}"]
        assert a.engine not in {e.engine for e in resumed}
    else:
        again = [x for _, x in faulty.of(do.CopyWeights) if (x.engine, x.version) == (a.engine, a.version)]
        assert len(again) == 2 and a.engine in {e.engine for e in resumed}


@pytest.mark.parametrize("on_failure", ON_FAILURE)
def test_ws_14_an_engine_that_dies_in_the_transition_does_not_hold_the_barrier(on_failure: str) -> None:
    config = system("one_step_ahead", weights__on_failure=on_failure)
    t, a = copies(config)[0]
    faulty = run(config, [said.EngineLost(t + 1e-6, a.engine)])
    faulty.checked()
    others = {e.engine for _, e in faulty.of(said.EngineResumed) if e.version == a.version}
    assert others == {e.index for e in faulty.backend.core.layout.engines} - {a.engine}


def test_a_run_without_engines_ends_and_says_so() -> None:
    r = run(system("sync"), [said.EngineLost(0.2, 0), said.EngineLost(0.3, 1)])
    assert r.finish_reason == "no_engine_left"
    r.checked()


# --- the watchdog -----------------------------------------------------------------------------------------------------


def test_a_run_in_which_nothing_moves_is_ended_with_what_is_stuck() -> None:
    """The engine that holds the only turns is dead and nobody says so: a tool that never answers."""
    config = scenario(
        **{
            **VARIED,
            "workload__turns": fixed(2),
            "workload__tool_time": {"type": "fixed", "seconds": 1e7},
            "simulation__watchdog_s": 100.0,
        }
    )
    with pytest.raises(StuckError, match="nothing finished between") as stuck:
        SimulatedBackend(config, HERE).run()
    assert "'acting': " in str(stuck.value) and "trainer" in str(stuck.value)


def test_a_conversation_that_outgrows_the_engines_window_fails_and_the_run_goes_on() -> None:
    """Prompts of 20, 60 and 100 tokens (replies of 30, observations of 10) in a window of 96: SGLang refuses 90 and
    more, as it will every time. The trajectory fails with its third turn, after the attempts that a lost turn has."""
    outgrown = {
        "workload__prompt": fixed(20),
        "workload__reply": fixed(30),
        "workload__max_response_length": 40,
        "workload__turns": fixed(3),
        "workload__observation": fixed(10),
        "workload__num_tasks": 4,
        "rollout__engine": {"max_running_requests": 16, "context_length": 96},
    }
    for mode in ("skip", "iterate"):
        done = run(**{**QUICK, **outgrown, "simulation__mode": mode})
        events = [e for e, _ in done.records]
        failed = [e for e in events if isinstance(e, said.TurnFailed)]
        assert {(e.turn, e.reason) for e in failed} == {(2, "refused")}
        attempts = Counter(e.trajectory for e in failed)
        ended = [e for e in events if isinstance(e, said.TurnFinished)]
        assert attempts and set(attempts.values()) == {MAX_ATTEMPTS}
        assert Counter(e.turn for e in ended if e.trajectory in attempts) == {0: len(attempts), 1: len(attempts)}
        assert done.backend.finish_reason == "tasks_exhausted"


def test_the_watchdog_leaves_a_slow_run_alone() -> None:
    """Something finishes in every interval, if only just."""
    r = linear_run(
        workload__rewards={"latency": {"type": "fixed", "seconds": 70.0}},
        simulation__watchdog_s=100.0,
        run__num_rollout=3,
    )
    assert len(r.steps) == 3


def test_a_run_beyond_its_time_limit_is_stuck(tmp_path: Path) -> None:
    result = simulate(scenario(**QUICK, simulation__max_simulated_s=8.0), HERE, tmp_path / "run")
    assert result.finish_reason == "stuck"
    assert "max_simulated_s = 8.0" in result.problem and "batches trained" in result.problem
    assert replay(tmp_path / "run" / "journal.jsonl.zst").difference is None


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sync", "hybrid", "over_sampling", "bounded, drops"])
def test_a_written_journal_replays_without_a_difference(name: str, tmp_path: Path) -> None:
    result = simulate(system(name), HERE, tmp_path / "run")
    again = replay(tmp_path / "run" / "journal.jsonl.zst")
    assert again.difference is None and not again.truncated
    assert again.events == result.summary.events
    assert read_summary(tmp_path / "run" / "summary.json") == result.summary
    assert result.problem == "" and result.finish_reason == "completed"
    written = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert written == ["journal.jsonl.zst", "metrics.parquet", "scenario.yaml", "summary.json"]


def test_a_journal_with_faults_replays_too(tmp_path: Path) -> None:
    faults = [said.EngineLost(1.0, 0), said.EngineJoined(9.0, 0, 0)]
    simulate(system("one_step_ahead"), HERE, tmp_path / "run", faults=faults)
    assert replay(tmp_path / "run" / "journal.jsonl.zst").difference is None


def test_an_interrupted_run_leaves_a_folder_that_can_be_read(tmp_path: Path) -> None:
    """Ctrl-C arrives as KeyboardInterrupt, here from the progress call."""
    calls = 0

    def interrupt(now: float, batches: int, events: int) -> None:
        nonlocal calls
        calls += 1
        raise KeyboardInterrupt

    config = scenario(**{**QUICK, "run__num_rollout": 100_000, "simulation__mode": "iterate"})
    result = simulate(config, HERE, tmp_path / "run", progress=interrupt)
    assert (result.problem, result.finish_reason, calls) == ("interrupted", "interrupted", 1)
    header, records = read_journal(tmp_path / "run" / "journal.jsonl.zst")
    events = [r.event for r in records]
    assert header.backend == "simulated" and records.truncated is None
    assert len(events) == result.summary.events > 0
    assert read_summary(tmp_path / "run" / "summary.json").finish_reason == "interrupted"
    assert result.summary.steps and result.summary.wall_s == events[-1].t
    assert replay(tmp_path / "run" / "journal.jsonl.zst").difference is None


def test_no_folder_no_files(tmp_path: Path) -> None:
    assert simulate(scenario(**QUICK), tmp_path).folder is None
    assert not list(tmp_path.iterdir())


def test_engine_costs_of_zero_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    nothing = {**LINEAR, "base_s": 0.0}
    with pytest.raises(ValueError, match="must take time"):
        simulate(scenario(**{**QUICK, "simulation__engine_costs": nothing}), HERE, tmp_path / "run")
    assert not (tmp_path / "run").exists()
