"""Engine and trainer on one machine slow each other down: the machine alone, the engine whose step times change, and
whole runs, against times worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.clock import ARRIVE, Clock
from sim.driver import SimulatedBackend
from sim.engine import EngineModel
from sim.shared_machine import SharedMachine
from testbed.calibration.phases import Phases
from testbed.calibration.profile import (
    BesideFit,
    CrowdFit,
    DecodeFit,
    PrefillFit,
    Profile,
    TrainerFit,
    UpdateTimes,
    write_profile,
)
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from tests.sim.test_exactness_system import close
from tests.support.engine_play import ask, engine, play
from tests.support.engine_workloads import Driver, LinearCosts, random_workload, same
from tests.support.scenarios import COLOCATED, scenario

ALONE, BESIDE = LinearCosts(1.0, 0.0, 0.0), LinearCosts(2.0, 0.0, 0.0)


def machine(slow_down: float, engines: int = 1) -> tuple[Clock, SharedMachine, list[Any]]:
    clock, switched = Clock(), []
    shared = SharedMachine(
        clock,
        lambda trainer, others: BESIDE if trainer else ALONE,
        slow_down,
        engines,
        lambda index, costs: switched.append((clock.now, index, costs)),
    )
    return clock, shared, switched


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=0, max_size=9),
    st.floats(0.5, 30),
    st.floats(1.0, 3.0),
)
def test_a_job_ends_when_its_speed_over_time_has_done_it(gaps: list[float], seconds: float, slow_down: float) -> None:
    """An engine works in every second gap. The end by adding up intervals, by hand."""
    clock, shared, _ = machine(slow_down)
    ended: list[float] = []
    shared.work(seconds, lambda _: ended.append(clock.now), None)
    t, works, changes = 0.0, False, []
    for gap in gaps:
        t, works = t + gap, not works
        changes.append((t, works))
        clock.at(t, ARRIVE, lambda w: shared.engine_works(0, w), works)
    clock.run_events(1000)
    left, since, speed = seconds, 0.0, 1.0
    for at, works in changes:
        if left <= (at - since) * speed:
            break
        left -= (at - since) * speed
        since, speed = at, (1 / slow_down if works else 1.0)
    assert ended == [pytest.approx(since + left / speed)]


def test_engines_are_slow_from_the_first_job_to_the_last() -> None:
    clock, shared, switched = machine(2.0)
    shared.work(3.0, lambda _: shared.work(2.0, lambda _: None, None), None)  # the next one follows at once
    clock.at(10.0, ARRIVE, lambda _: shared.work(1.0, lambda _: None, None))
    clock.run_events(100)
    assert switched == [(0.0, 0, BESIDE), (5.0, 0, ALONE), (10.0, 0, BESIDE), (11.0, 0, ALONE)]


def test_engines_hear_of_the_part_of_the_others_that_works() -> None:
    """Three engines. One that works knows of two others, one that does not of three."""
    heard: dict[int, float] = {}
    costs = {part: LinearCosts(1.0 + part, 0.0, 0.0) for part in (0.0, 0.5, 1.0)}
    parts = {id(c): part for part, c in costs.items()}
    shared = SharedMachine(
        Clock(), lambda trainer, others: costs[others], 1.0, 3, lambda i, c: heard.update({i: parts[id(c)]})
    )
    assert heard == {0: 0.0, 1: 0.0, 2: 0.0}
    shared.engine_works(1, True)
    shared.engine_works(1, True)
    assert heard == {0: 0.5, 1: 0.0, 2: 0.5}
    shared.engine_works(2, True)
    assert heard == {0: 1.0, 1: 0.5, 2: 0.5}
    assert shared.joins(0) is costs[1.0]
    shared.engine_works(1, False)
    assert heard == {0: 0.5, 1: 0.5, 2: 0.0}


def test_each_engine_adds_its_part_of_the_extra_time() -> None:
    """Two of two: three times as long; one of two: twice."""
    clock, shared, _ = machine(3.0, engines=2)
    ended: list[float] = []
    shared.engine_works(0, True)
    shared.engine_works(1, True)
    shared.work(4.0, lambda _: ended.append(clock.now), None)
    clock.at(3.0, ARRIVE, lambda _: shared.engine_works(0, False))
    clock.at(5.0, ARRIVE, lambda _: shared.engine_works(1, False))
    clock.run_events(100)
    assert ended == [pytest.approx(7.0)]  # 3 s at a third, 2 s at half speed, and 2 s


@pytest.mark.parametrize("mode", ["iterate", "skip"])
def test_a_step_under_way_keeps_its_pace(mode: str) -> None:
    """Host, no overlap: prefill 0-10, then steps of 1 s. From 12.5 on a step takes 2 s: the third ends at 13, the
    fourth at 15. From 18.1 on 1 s again: the sixth ends at 19, the seventh at 20."""
    prefill = {"p": 10.0, "q": 0.0, "pairs": 0.0}
    e = engine(mode, LinearCosts(1.0, 0.0, 0.0, **prefill), forward="host", disable_overlap_schedule=True)
    slow, quick = LinearCosts(2.0, 0.0, 0.0, **prefill), LinearCosts(1.0, 0.0, 0.0, **prefill)
    changes = [(12.5, lambda t: e.use_costs(t, slow)), (18.1, lambda t: e.use_costs(t, quick))]
    [done] = play(e, [(0.0, lambda t: e.submit(t, ask(1, 5, 8))), *changes])
    assert done.t == pytest.approx(20.0)
    assert e.decode_s == pytest.approx(10.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_skip_equals_iterate_while_step_times_change(seed: int) -> None:
    said = []
    for mode in ("iterate", "skip"):
        work = random_workload(seed)
        e = EngineModel(work.options, work.costs, mode)
        driver = Driver(work, e)
        paces = [LinearCosts(f * work.costs.a, work.costs.b, work.costs.c, f * work.costs.p) for f in (1.31, 1.0)]
        for k in range(60):
            driver.at(0.0917 * (k + 1), 1, lambda t, c, e=e: e.use_costs(t, c), paces[k % 2])
        said.append(driver.run().said)
    assert len(said[0]) == len(said[1])
    assert all(same(a, b, 1e-11) for a, b in zip(*said, strict=True))


UPDATE = UpdateTimes(prepare_s=0.05, pause_s=0.01, copy_s=0.02, requantize_s=0.0, resume_s=0.01)
PROFILE = Profile(
    format=1,
    decode=DecodeFit(0.01),
    prefill=PrefillFit(0.1, 0.0),
    updates={"broadcast": UPDATE, "cuda_ipc": UPDATE},
)
ASYNC = {
    "rollout__admission": {"type": "fully_async", "async_max_concurrent_groups": 8},
    "experience__staleness": {"bound": 8, "action": "drop"},
    "weights__transition": {"pause_generation_mode": "in_place", "kv": "keep"},
    "workload__reply": {"type": "uniform", "low": 40, "high": 400},
    "workload__max_response_length": 400,
}


def run(
    folder: Path, beside: BesideFit | None, update_s: float = 1.0, profile: Profile = PROFILE, **changes: Any
) -> list[tuple[said.Event, list[do.Action]]]:
    made = msgspec.structs.replace(profile, trainer=TrainerFit(update_s), beside=beside)
    write_profile(folder / "p.json", made)
    config: Scenario = scenario(
        simulation__engine_costs={"type": "calibrated", "profile": "p.json"},
        training__cost={"type": "calibrated", "profile": "p.json"},
        **changes,
    )
    records: list[tuple[said.Event, list[do.Action]]] = []
    SimulatedBackend(config, folder, [lambda e, a: records.append((e, list(a)))]).run()
    return records


def updates(records: list[tuple[said.Event, list[do.Action]]]) -> list[float]:
    found = Phases(16384, 2)
    for event, actions in records:
        found.observe(event, actions)
    return [p.seconds for p in found.train]


def test_a_trainer_beside_engines_that_always_work_takes_what_was_measured(tmp_path: Path) -> None:
    assert updates(run(tmp_path, None, **ASYNC)) == pytest.approx([1.0] * 3)
    # the trainer begins 10 ms before the engines have resumed, and does in them what would else take 15
    assert updates(run(tmp_path, BesideFit(1.0, 1.0, 1.5), **ASYNC)) == pytest.approx([1.5, 1.495, 1.495])


def test_engines_beside_a_trainer_take_what_was_measured(tmp_path: Path) -> None:
    """Seconds a token of turns that began and ended within an optimizer update: 10 ms a step, or 30."""
    pace = {}
    for name, beside in (("alone", BesideFit(1.0, 1.0, 1.0)), ("beside", BesideFit(3.0, 1.0, 1.0))):
        records = run(tmp_path, beside, update_s=30.0, **ASYNC)
        spans, since = [], None
        for event, actions in records:
            if isinstance(event, said.TrainStepFinished):
                spans.append((since, event.t))
            if any(isinstance(a, do.Train) for a in actions):
                since = event.t
        turns = [e for e, _ in records if isinstance(e, said.TurnFinished) and e.output_tokens > 1]
        inside = [e for e in turns if any(a <= e.first_token_t and e.t <= b for a, b in spans)]
        # other requests' prefills come between: the quickest turn had none
        pace[name] = min((e.t - e.first_token_t) / (e.output_tokens - 1) for e in inside)
    assert pace["alone"] == pytest.approx(0.01, rel=0.02)
    assert pace["beside"] == pytest.approx(0.03, rel=0.02)


def test_an_engine_is_quicker_while_the_others_have_nothing_to_do(tmp_path: Path) -> None:
    """Two engines with one turn each, at once: a prefill of 0.12 s, steps of 12 ms while both work, and what the longer
    one has left in steps of 10 ms."""
    profile = msgspec.structs.replace(PROFILE, decode=DecodeFit(0.012), prefill=PrefillFit(0.12, 0.0))
    two = {
        "placement": {"mode": "disaggregated", "rollout_num_gpus": 2, "actor_num_gpus": 1},
        "rollout__routing": {"type": "round_robin"},
        "algorithm": {"n_samples_per_prompt": 2, "rollout_batch_size": 1},
        "workload__reply": {"type": "uniform", "low": 50, "high": 400},
        "workload__max_response_length": 400,
        "run__num_rollout": 1,
        "run__warmup_steps": 0,
    }
    for crowd, step_alone in ((None, 0.012), (CrowdFit(0.002, 0.0, 1.0), 0.01)):
        records = run(tmp_path, None, profile=msgspec.structs.replace(profile, crowd=crowd), **two)
        first, last = sorted((e for e, _ in records if isinstance(e, said.TurnFinished)), key=lambda e: e.t)
        assert {first.engine, last.engine} == {0, 1} and first.started_t == last.started_t
        both, alone = first.output_tokens - 1, last.output_tokens - first.output_tokens
        assert first.t - first.started_t == pytest.approx(0.12 + 0.012 * both)
        assert last.t - first.t == pytest.approx(step_alone * alone, abs=0.0021)  # a step under way keeps its pace


def test_where_engines_and_trainer_take_turns_nothing_changes(tmp_path: Path) -> None:
    slow = BesideFit(2.0, 2.0, 2.0)
    for changes in ({}, COLOCATED):  # synchronous: the engines have ended when the trainer begins
        alone, beside = (run(tmp_path, b, **changes) for b in (None, slow))
        assert [e.t for e, _ in alone] == pytest.approx([e.t for e, _ in beside])


def test_whole_runs_are_the_same_in_both_modes(tmp_path: Path) -> None:
    """Steps depend on batch and context, so that engines do not run in lock step."""
    beside = BesideFit(1.07, 1.11, 1.09)
    varied = msgspec.structs.replace(
        PROFILE, decode=DecodeFit(0.01, 3e-4, 1e-6), prefill=PrefillFit(0.02, 1e-4), crowd=CrowdFit(1e-3, 5e-5, 1.1)
    )
    plain = []
    for mode in ("skip", "iterate"):
        records = run(tmp_path, beside, profile=varied, **ASYNC, simulation__mode=mode, run__num_rollout=10)
        plain.append(msgspec.to_builtins([r for r in records if not isinstance(r[0], said.LoadReported)]))
    for a, b in zip(*plain, strict=True):
        assert close(a, b), f"skip {a}\niterate {b}"
