"""Every file under scenarios/, every variant of it, shortened to a few small batches.

It runs, replays, repeats and adds up. What must hold is checked on the journal, by code of its own: nothing here asks
the core or the metrics whether they are right, except for the sums that the summary claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sim.run import simulate
from testbed.core import actions as do
from testbed.core import events as said
from testbed.journal import read_journal
from testbed.journal.replay import replay
from testbed.metrics.summary import RunSummary
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of
from testbed.scenario.load import load_scenario
from testbed.scenario.stages import is_stages
from testbed.scenario.study import is_study, load_study

ROOT = Path(__file__).resolve().parents[2] / "scenarios"
FILES = sorted(path for path in ROOT.rglob("*.yaml") if not is_stages(path))
SHORT = ("run.num_rollout=3", "run.warmup_steps=1", "algorithm.rollout_batch_size=4", "run.journal=full")


def read(path: Path, overrides: Sequence[str] = ()) -> list[tuple[str, Scenario, Path]]:
    """(name, scenario, folder that its file names are relative to) of each variant."""
    if is_study(path):
        study = load_study(path, overrides)
        return [(v.name, v.scenario, study.base_dir) for v in study.variants]
    loaded = load_scenario(path, overrides)
    return [(loaded.scenario.name, loaded.scenario, loaded.base_dir)]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_file_is_valid_as_written_and_asks_a_question(path: Path) -> None:
    for _, scenario, _ in read(path):
        assert is_study(path) or scenario.question.endswith("?")
    if is_study(path):
        study = load_study(path)
        assert study.question.endswith("?")
        assert study.name == path.stem
    else:
        assert read(path)[0][0] == path.stem


@pytest.mark.parametrize("path", FILES, ids=named)
def test_br_14_rp_06_file_runs_replays_repeats_and_adds_up(path: Path, tmp_path: Path) -> None:
    for i, (name, scenario, base_dir) in enumerate(read(path, SHORT)):
        first, again = tmp_path / f"{i}-first", tmp_path / f"{i}-again"
        done = simulate(scenario, base_dir, first, name=name)
        simulate(scenario, base_dir, again, name=name)
        journal = first / "journal.jsonl.zst"

        assert done.problem == "", name
        assert done.finish_reason == "completed", name
        assert journal.read_bytes() == (again / journal.name).read_bytes(), f"{name}: same seed, different journal"
        replayed = replay(journal)
        assert replayed.difference is None, f"{name}: {replayed.difference}"
        assert replayed.truncated == ""
        closes(done.summary, scenario, name)
        _, records = read_journal(journal)
        invariants([(r.event, r.actions) for r in records], scenario, name)


def closes(summary: RunSummary, scenario: Scenario, name: str) -> None:
    """GPU time by cause is the measured time of all GPUs, in each pool and in each step (design, invariant 8)."""
    assert sum(pool.gpus for pool in summary.pools) == layout_of(scenario).num_gpus == summary.num_gpus, name
    for pool in summary.pools:
        seconds = pool.gpu_seconds.values()
        assert min(seconds) >= -1e-9, (name, pool)
        assert sum(seconds) == pytest.approx(pool.gpus * summary.measured_s, rel=1e-6), (name, pool.name)
    for step in summary.steps:
        assert sum(step.gpu_seconds.values()) == pytest.approx(summary.num_gpus * (step.end_t - step.start_t), rel=1e-6)
    parts = summary.trajectory
    told = [getattr(parts, part) for part in parts.__struct_fields__ if part != "total"]
    assert sum(told) == pytest.approx(parts.total, rel=1e-6), name


def invariants(records: list[tuple[Any, Sequence[Any]]], scenario: Scenario, name: str) -> None:
    """The design's invariants that a journal can show."""
    layout = layout_of(scenario)
    phases = {pool.index: pool.phase for pool in layout.pools}
    pool_of = {engine.index: engine.pool for engine in layout.engines}
    serving = {engine.index: 0 for engine in layout.engines}
    in_engine: dict[int, int] = {}
    started: set[int] = set()
    retired: set[int] = set()
    copying: dict[tuple[int, int], set[int]] = {}
    arrived: set[tuple[int, int]] = set()
    sent_version: dict[int, int] = {}
    training = -1
    updates = 0
    last_t = 0.0
    for event, actions in records:
        assert event.t >= last_t
        last_t = event.t
        match event:
            case said.TurnFinished():
                assert in_engine.pop(event.trajectory) == event.engine
                ends = [0, *(end for _, _, end in event.spans)]
                assert [start for _, start, _ in event.spans] == ends[:-1] and ends[-1] == event.output_tokens, (
                    f"{name}: invariant 5: {event}"
                )
                if event.kv_version >= 0 and scenario.weights.transition.kv != "keep":
                    assert event.kv_version >= sent_version[event.trajectory], f"{name}: invariant 4: {event}"
                assert 0 <= event.cached_tokens <= event.prompt_tokens
            case said.TurnFailed():
                in_engine.pop(event.trajectory)
            case said.EngineReady() | said.WeightsCopied():
                if isinstance(event, said.EngineReady) or scenario.weights.requantize == "none":
                    arrived.add((event.engine, event.version))
            case said.EngineResumed():
                assert event.version >= serving[event.engine], f"{name}: invariant 2"
                serving[event.engine] = event.version
            case said.PoolSwitched():
                phases[event.pool] = event.phase
            case said.TrainStepFinished():
                updates += 1
                if event.update + 1 == scenario.algorithm.num_steps_per_rollout:
                    training = -1
        for action in actions:
            match action:
                case do.StartTurn():
                    assert action.trajectory not in in_engine, f"{name}: invariant 7: {action}"
                    assert action.trajectory not in retired, f"{name}: invariant 1"
                    assert phases[pool_of[action.engine]] == "generate", f"{name}: invariant 10"
                    in_engine[action.trajectory] = action.engine
                    sent_version[action.trajectory] = serving[action.engine]
                    started.add(action.trajectory)
                case do.HandOver():
                    assert in_engine[action.trajectory] == action.engine, f"{name}: {action}"
                    in_engine[action.trajectory] = action.to
                case do.Retire():
                    assert not retired & set(action.trajectories), f"{name}: invariant 1: {action}"
                    retired.update(action.trajectories)
                case do.CopyWeights():
                    copying.setdefault((action.engine, action.version), set()).update(action.participants)
                case do.ResumeEngine():
                    wave = copying.get((action.engine, action.version), set())
                    assert all((e, action.version) in arrived for e in wave), f"{name}: invariant 3: {action}"
                case do.SwitchPool():
                    assert not any(pool_of[e] == action.pool for e in in_engine.values()), f"{name}: invariant 10"
                    phases[action.pool] = f"to {action.phase}"
                case do.Train():
                    assert phases[action.pool] == "train" and training < 0, f"{name}: invariant 10"
                    training = action.batch
                    experienced(action, updates, name)
    assert started <= retired, f"{name}: invariant 1: {len(started - retired)} trajectories have no end"


def experienced(batch: do.Train, updates: int, name: str) -> None:
    """Invariant 6 and the versions of one batch."""
    for x in batch.experiences:
        times = (
            x.submitted_t,
            x.dispatched_t,
            x.first_token_t,
            x.generated_t,
            x.ready_t,
            x.group_ready_t,
            x.dequeued_t,
        )
        assert list(times) == sorted(times), f"{name}: invariant 6: {x}"
        assert x.dispatch_version <= x.oldest_version <= x.newest_version, (name, x)
        assert x.trainer_version == updates
        assert x.staleness >= 0, f"{name}: invariant 6: {x}"
