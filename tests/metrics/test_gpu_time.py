"""GPU time by cause: journals written by hand, and the partition against a naive reckoning of every GPU at every
event."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.gpu_time import GpuTime
from testbed.metrics.lanes import split_generate, tail_slots
from testbed.metrics.summary import CAUSES
from testbed.scenario import Scenario
from testbed.scenario.layout import Layout, layout_of
from tests.metrics.builders import experience, finished, nonzero, start
from tests.support.scenarios import COLOCATED, scenario
from tests.support.scripted import Scripted

HYBRID: dict[str, Any] = {
    "placement": {
        "mode": "hybrid",
        "rollout_num_gpus": 2,
        "actor_num_gpus": 2,
        "rollout_num_gpus_per_engine": 1,
    },
}


def run(s: Scenario, *steps: tuple[float, said.Event | do.Action]) -> GpuTime:
    gpu = GpuTime(s, layout_of(s))
    for t, what in steps:
        if type(what) in gpu.handlers:
            gpu.handlers[type(what)](t, what)
    gpu.settle(steps[-1][0])
    return gpu


def lane(gpu: GpuTime, name: str) -> dict[str, float]:
    found = next(x for x in gpu.lanes if x.name == name)
    return nonzero(dict(zip(CAUSES, found.seconds, strict=False)))


def train(batch: int = 0, updates: int = 1, pool: int = 1) -> do.Train:
    return do.Train(batch, pool, updates, (experience(),), "fifo")


def test_rp_06_an_engine_that_is_done_waits_for_the_longest_then_for_the_trainer() -> None:
    gpu = run(
        scenario(),
        (0, start(0, 0)),
        (0, start(1, 1)),
        (0, do.Note("admission", "barrier")),
        (10, finished(10, 0, 0, 0)),
        (30, finished(30, 1, 1, 0)),
        (35, train()),
        (50, said.TrainStepFinished(50, 0, 0)),
    )
    assert lane(gpu, "rollout") == {"generate": 10 + 30, "idle_longest": 20, "idle_trainer": 2 * 20}
    assert lane(gpu, "trainer") == {"idle_data": 2 * 35, "train": 2 * 15}


def test_training_lasts_until_the_last_update_of_the_batch() -> None:
    gpu = run(
        scenario(),
        (5, train(updates=3)),
        (10, said.TrainStepFinished(10, 0, 0)),
        (15, said.TrainStepFinished(15, 0, 1)),
        (22, said.TrainStepFinished(22, 0, 2)),
        (30, do.Note("trainer", "empty")),
    )
    assert lane(gpu, "trainer") == {"idle_data": 2 * (5 + 8), "train": 2 * 17}


def test_fewer_than_a_quarter_of_the_slots_is_the_tail() -> None:
    """32 trajectories a batch over 2 engines: 16 slots, so with 3 turns or fewer an engine is in its tail."""
    s = scenario(algorithm={"n_samples_per_prompt": 8, "rollout_batch_size": 4})
    assert tail_slots(s, layout_of(s)) == 16
    starts = [(0, start(i, 0)) for i in range(5)]
    ends = [(10.0 * (i + 1), finished(10.0 * (i + 1), i, 0, 0)) for i in range(5)]
    gpu = run(s, *starts, *ends)
    # 5 and 4 turns until 20 s; 3, 2, 1 until 50 s; engine 1 waits for them
    assert lane(gpu, "rollout") == {"generate": 20, "generate_tail": 30, "idle_longest": 50}


def test_the_slots_of_an_engine_cap_its_part_of_a_batch() -> None:
    s = scenario(
        algorithm={"n_samples_per_prompt": 8, "rollout_batch_size": 100},
        rollout={"admission": {"type": "sync"}, "engine": {"max_running_requests": 64}},
    )
    assert tail_slots(s, layout_of(s)) == 64


@pytest.mark.parametrize(
    ("note", "busy_elsewhere", "cause"),
    [
        ("buffer_full", True, "idle_buffer_full"),
        ("buffer_full", False, "idle_buffer_full"),
        ("no_task", True, "idle_no_work"),
        ("no_task", False, "idle_no_work"),
        ("staleness_bound", True, "idle_longest"),
        ("staleness_bound", False, "idle_trainer"),
        ("barrier", False, "idle_trainer"),
    ],
)
def test_rp_06_why_an_engine_is_idle(note: str, busy_elsewhere: bool, cause: str) -> None:
    first = [(0.0, start(0, 0))] if busy_elsewhere else []
    gpu = run(scenario(), *first, (0, do.Note("admission", note)), (10, do.Note("trainer", "empty")))
    idle = 10 if busy_elsewhere else 20
    assert lane(gpu, "rollout")[cause] == idle


def test_the_cause_of_idleness_changes_while_engines_stay_idle() -> None:
    gpu = run(
        scenario(),
        (0, start(0, 0)),
        (4, do.Note("admission", "buffer_full")),
        (10, do.Note("admission", "capacity")),
        (15, finished(15, 0, 0, 0)),
        (20, do.Note("trainer", "empty")),
    )
    # engine 1: longest 0-4, full 4-10, longest 10-15; both: trainer 15-20
    assert lane(gpu, "rollout") == {"generate": 15, "idle_longest": 4 + 5, "idle_buffer_full": 6, "idle_trainer": 10}


def test_no_task_and_nothing_in_flight_while_the_trainer_works_is_waiting_for_the_trainer() -> None:
    gpu = run(scenario(), (0, do.Note("admission", "no_task")), (5, train()), (15, said.TrainStepFinished(15, 0, 0)))
    assert lane(gpu, "rollout") == {"idle_no_work": 2 * 5, "idle_trainer": 2 * 10}


def test_tools_that_hold_every_trajectory_leave_engines_without_work() -> None:
    gpu = run(
        scenario(),
        (0, start(0, 0)),
        (10, finished(10, 0, 0, 0, finish_reason="tool_calls", continues=True)),
        (10, do.RunTool(0, 0)),
        (16, said.ToolFinished(16, 0, 5)),
        (16, start(0, 0, turn=1)),
        (20, finished(20, 0, 0, 16)),
    )
    assert lane(gpu, "rollout") == {"generate": 14, "idle_longest": 14, "idle_no_work": 2 * 6}


def test_a_trajectory_that_is_given_up_while_its_tool_runs_holds_nothing() -> None:
    gpu = run(
        scenario(),
        (0, do.RunTool(0, 0)),
        (6, do.Retire((0,), 0, "aborted", "over_sampled", 0)),
        (10, do.Note("trainer", "empty")),
    )
    assert lane(gpu, "rollout") == {"idle_no_work": 2 * 6, "idle_trainer": 2 * 4}


def test_ws_10_an_engine_is_in_a_weight_update_only_while_paused_and_the_trainer_until_released() -> None:
    gpu = run(
        scenario(),
        (0, start(0, 0)),
        (0, start(1, 1)),
        (10, do.PrepareWeights(1, 1, "broadcast", (0, 1), 1, "interval")),
        (14, said.WeightsPrepared(14, 1)),
        (15, said.EnginePaused(15, 0)),
        (16, said.EnginePaused(16, 1)),
        (18, said.TrainerReleased(18, 1)),
        (20, said.EngineResumed(20, 0, 1)),
        (20, said.EngineResumed(20, 1, 1)),
        (30, do.Note("trainer", "empty")),
    )
    assert lane(gpu, "rollout") == {"generate": 60 - 9, "weight_update": 5 + 4}
    assert lane(gpu, "trainer") == {"idle_data": 2 * 22, "weight_update": 2 * 8}


def test_as_02_overlap_and_hidden_generation() -> None:
    gpu = run(
        scenario(),
        (0, start(0, 0)),
        (0, start(1, 1)),
        (10, train()),
        (14, finished(14, 0, 0, 0)),
        (20, finished(20, 1, 1, 0)),
        (25, said.TrainStepFinished(25, 0, 0)),
    )
    assert gpu.overlap_s == 10
    assert gpu.generation_s == 14 + 20
    assert gpu.hidden_generation_s == 4 + 10


def test_signals_of_the_training_pool_are_work_of_the_trainer_and_those_of_a_service_are_not() -> None:
    gpu = run(
        scenario(),
        (2, do.ComputeSignals("old_log_probs", (0, 1), 1)),
        (2, do.ComputeSignals("reward", (2,), -1)),
        (5, said.SignalReady(5, "old_log_probs", (0,))),
        (9, said.SignalReady(9, "old_log_probs", (1,))),
        (12, said.SignalReady(12, "reward", (2,), (1.0,))),
        (20, do.Note("trainer", "empty")),
    )
    assert lane(gpu, "trainer") == {"signals": 2 * 7, "idle_data": 2 * 13}


def test_a_lost_engine_has_no_work_and_its_turns_are_gone() -> None:
    gpu = run(
        scenario(),
        (0, start(0, 0)),
        (0, start(1, 0)),
        (10, said.EngineLost(10, 0)),
        (11, said.TurnFailed(11, 0, 0, 0, "engine_lost")),
        (30, said.EngineJoined(30, 0, 0)),
        (34, start(0, 0, attempt=1)),
        (40, finished(40, 0, 0, 34)),
    )
    # engine 0: 10 + 6 generating, 20 lost, 4 idle; engine 1: idle throughout, for the longest while engine 0 generates
    assert lane(gpu, "rollout") == {
        "generate": 16,
        "idle_no_work": 20,
        "idle_trainer": 4 + 24,
        "idle_longest": 16,
    }


def test_pl_01_a_shared_pool_switches_trains_updates_and_generates() -> None:
    s = scenario(**COLOCATED)
    gpu = run(
        s,
        *[(0, start(i, i)) for i in range(4)],
        *[(10.0 * (i + 1), finished(10.0 * (i + 1), i, i, 0)) for i in range(4)],
        (41, do.SwitchPool(0, "train", "a batch can be trained")),
        (43, said.PoolSwitched(43, 0, "train")),
        (45, do.ComputeSignals("old_log_probs", (0, 1, 2, 3), 0)),
        (49, said.SignalReady(49, "old_log_probs", (0, 1, 2, 3))),
        (49, train(pool=0)),
        (60, said.TrainStepFinished(60, 0, 0)),
        (60, do.PrepareWeights(1, 1, "cuda_ipc", (0, 1, 2, 3), 0, "interval")),
        (61, said.WeightsPrepared(61, 1)),
        (61, do.SwitchPool(0, "generate", "weights")),
        (64, said.PoolSwitched(64, 0, "generate")),
        (65, said.TrainerReleased(65, 1)),
        *[(66, said.EnginePaused(66, e)) for e in range(4)],
        *[(69, said.EngineResumed(69, e, 1)) for e in range(4)],
        (69, start(4, 0)),
        (70, do.Note("trainer", "empty")),
    )
    assert lane(gpu, "shared") == {
        "generate": 10 + 20 + 30 + 40 + 1,
        "idle_longest": 30 + 20 + 10 + 3,
        "idle_trainer": 4 * 1,
        "phase_switch": 4 * 2 + 4 * 3,
        "idle_data": 4 * 2,
        "signals": 4 * 4,
        "train": 4 * 11,
        # prepared in the training phase, then from the switch until every engine has resumed
        "weight_update": 4 * 1 + 4 * 5,
    }
    assert gpu.overlap_s == 0


def test_a_failed_preparation_gives_the_trainer_back() -> None:
    gpu = run(
        scenario(),
        (0, do.PrepareWeights(1, 1, "disk", (0, 1), 1, "interval")),
        (5, said.WeightUpdateFailed(5, -1, 1, "prepare", "disk full")),
        (10, do.Note("trainer", "empty")),
    )
    assert lane(gpu, "trainer") == {"weight_update": 2 * 5, "idle_data": 2 * 5}


def test_recomputation_and_drops_move_out_of_generation_and_the_sum_stays() -> None:
    seconds = {**dict.fromkeys(CAUSES, 0.0), "generate": 100.0, "generate_tail": 10.0, "train": 40.0}
    assert split_generate(seconds, recompute_s=20.0, dropped_share=0.25) == 0
    assert nonzero(seconds) == {
        "recompute_kv": 20,
        "generate": 60,
        "generate_dropped": 20,
        "generate_tail": 10,
        "train": 40,
    }


def test_more_recomputation_than_generation_is_given_back() -> None:
    seconds = {**dict.fromkeys(CAUSES, 0.0), "generate": 5.0, "generate_tail": 3.0}
    assert split_generate(seconds, recompute_s=10.0, dropped_share=0.5) == 2
    assert nonzero(seconds) == {"recompute_kv": 8}


def test_reported_recomputation_is_a_difference_of_cumulative_seconds_times_gpus() -> None:
    gpu = run(
        scenario(
            placement={
                "mode": "disaggregated",
                "rollout_num_gpus": 2,
                "actor_num_gpus": 2,
                "rollout_num_gpus_per_engine": 2,
            }
        ),
        (10, said.LoadReported(10, 0, 0, 0, 0, 0, 0, 5.0, 1.5, 3.0)),
        (20, said.LoadReported(20, 0, 0, 0, 0, 0, 0, 9.0, 4.0, 3.0)),
    )
    assert gpu.lanes[0].recompute == 2 * 4.0


# --- the partition against a naive reckoning ---


class Naive:
    """The state of every GPU, worked out anew from plain facts before every step of time. As slow as it looks."""

    def __init__(self, s: Scenario, layout: Layout) -> None:
        self.layout = layout
        self.slots = tail_slots(s, layout)
        self.phase = {p.index: p.phase for p in layout.pools}
        self.turns: dict[int, int] = defaultdict(int)
        self.paused: set[int] = set()
        self.lost: set[int] = set()
        self.tools: set[int] = set()
        self.training = self.owed = 0
        self.releasing = False
        self.taking_part: set[int] = set()
        self.admission = "open"
        self.t = 0.0
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.overlap = 0.0

    def publishing(self) -> bool:
        shared = self.layout.pools[self.layout.train_pool].shared
        return bool(self.taking_part) if shared else self.releasing

    def idle(self) -> str:
        in_flight = sum(self.turns.values())
        works = self.training or self.owed or self.publishing()
        if self.admission == "buffer_full":
            return "idle_buffer_full"
        if self.admission == "no_task":
            return "idle_trainer" if works and not in_flight else "idle_no_work"
        if in_flight:
            return "idle_longest"
        return "idle_no_work" if self.tools else "idle_trainer"

    def engine(self, index: int) -> str:
        shared = self.layout.pools[self.layout.engines[index].pool].shared
        if index in self.lost:
            return "idle_no_work"
        if index in self.paused:
            return "weight_update"
        if self.turns[index]:
            return "generate_tail" if self.turns[index] < self.slots / 4 else "generate"
        return "weight_update" if shared and self.publishing() else self.idle()

    def trainer(self) -> str:
        if self.training:
            return "train"
        if self.owed:
            return "signals"
        return "weight_update" if self.publishing() else "idle_data"

    def pass_time(self, t: float) -> None:
        states: list[str] = []
        for pool in self.layout.pools:
            phase = self.phase[pool.index]
            if phase == "generate":
                for e in pool.engines:
                    self.seconds[pool.name, self.engine(e)] += (t - self.t) * self.layout.engines[e].gpus
                    states.append(self.engine(e))
            else:
                state = self.trainer() if phase == "train" else "phase_switch"
                self.seconds[pool.name, state] += (t - self.t) * pool.gpus
                states.append(state)
        if "train" in states and any(x.startswith("generate") for x in states):
            self.overlap += t - self.t
        self.t = t


def random_run(s: Scenario, seed: int, length: int = 120) -> tuple[GpuTime, Naive]:
    """Facts happen at random, in any order that a backend and a core could produce."""
    layout = layout_of(s)
    gpu, naive, rng = GpuTime(s, layout), Naive(s, layout), random.Random(seed)
    t, batch, trajectory, version = 0.0, 0, 0, 0
    live: list[tuple[int, int]] = []
    shared = [p.index for p in layout.pools if p.shared]

    def tell(what: said.Event | do.Action) -> None:
        gpu.handlers[type(what)](t, what)

    for _ in range(length):
        t += rng.choice([0.0, 0.25, 1.0, 7.5])
        naive.pass_time(t)
        match rng.randrange(12):
            case 0 | 1 | 2:
                engine = rng.randrange(len(layout.engines))
                if engine not in naive.lost:
                    live.append((trajectory, engine))
                    naive.turns[engine] += 1
                    tell(start(trajectory, engine))
                    trajectory += 1
            case 3 | 4 if live:
                who, engine = live.pop(rng.randrange(len(live)))
                naive.turns[engine] -= 1
                tell(
                    finished(t, who, engine, t) if rng.random() < 0.7 else said.TurnFailed(t, who, 0, engine, "aborted")
                )
            case 5:
                naive.admission = rng.choice(["open", "barrier", "buffer_full", "no_task", "staleness_bound"])
                tell(do.Note("admission", naive.admission))
            case 6:
                who = rng.randrange(3)
                (naive.tools.discard if who in naive.tools else naive.tools.add)(who)
                tell(do.RunTool(who, 0) if who in naive.tools else said.ToolFinished(t, who, 1))
            case 7:
                if naive.training:
                    tell(said.TrainStepFinished(t, batch, 0))
                    naive.training, batch = 0, batch + 1
                else:
                    tell(train(batch, pool=layout.train_pool))
                    naive.training = 1
            case 8:
                if naive.owed:
                    tell(said.SignalReady(t, "critic", (1, 2)))
                else:
                    tell(do.ComputeSignals("critic", (1, 2), layout.train_pool))
                naive.owed = 0 if naive.owed else 2
            case 9:
                if not naive.taking_part and not naive.releasing and not naive.paused:
                    version += 1
                    naive.releasing = True
                    naive.taking_part = set(range(len(layout.engines))) - naive.lost
                    tell(
                        do.PrepareWeights(
                            version, version, "broadcast", tuple(naive.taking_part), layout.train_pool, ""
                        )
                    )
                    if not naive.taking_part:
                        naive.releasing = False
                        tell(said.TrainerReleased(t, version))
                elif naive.releasing and rng.random() < 0.5:
                    naive.releasing = False
                    tell(said.TrainerReleased(t, version))
                else:
                    for engine in sorted(naive.taking_part):
                        if engine in naive.paused:
                            naive.paused.discard(engine)
                            naive.taking_part.discard(engine)
                            if not naive.taking_part:
                                naive.releasing = False
                            tell(said.EngineResumed(t, engine, version))
                        else:
                            naive.paused.add(engine)
                            tell(said.EnginePaused(t, engine))
                        if rng.random() < 0.5:
                            break
            case 10:
                engine = rng.randrange(len(layout.engines))
                if engine in naive.lost:
                    naive.lost.discard(engine)
                    tell(said.EngineJoined(t, engine, version))
                elif rng.random() < 0.3:
                    naive.lost.add(engine)
                    naive.paused.discard(engine)
                    if engine in naive.taking_part:
                        naive.taking_part.discard(engine)
                        naive.releasing = naive.releasing and bool(naive.taking_part)
                    naive.turns[engine] = 0
                    live = [x for x in live if x[1] != engine]
                    tell(said.EngineLost(t, engine))
            case 11 if shared:
                pool = shared[0]
                was = naive.phase[pool]
                if was in ("generate", "train"):
                    naive.phase[pool] = "train?" if was == "generate" else "generate?"
                    tell(do.SwitchPool(pool, naive.phase[pool][:-1], ""))
                else:
                    naive.phase[pool] = was[:-1]
                    tell(said.PoolSwitched(t, pool, was[:-1]))
    gpu.settle(t)
    return gpu, naive


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), changes=st.sampled_from([{}, COLOCATED, HYBRID]), per_batch=st.sampled_from([2, 16]))
def test_rp_06_the_partition_agrees_with_a_naive_reckoning_and_closes(
    seed: int, changes: dict[str, Any], per_batch: int
) -> None:
    s = scenario(**changes, algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": per_batch})
    gpu, naive = random_run(s, seed)
    for a_lane in gpu.lanes:
        mine = dict(zip(CAUSES, a_lane.seconds, strict=False))
        assert sum(a_lane.seconds) == pytest.approx(a_lane.gpus * naive.t, rel=1e-9, abs=1e-9)
        for cause in CAUSES:
            assert mine[cause] == pytest.approx(naive.seconds[a_lane.name, cause], abs=1e-6), cause
    assert gpu.overlap_s == pytest.approx(naive.overlap, abs=1e-6)


def test_rp_06_an_engine_that_the_core_removed_counts_as_lost() -> None:
    """A participant that never answers is given up; from then on its GPUs have no work, and all accounts close."""
    path = {"type": "fixed", "update_weight_transfer_mode": "p2p"}
    config = scenario(weights__on_failure="remove_engine", weights__timeout_s=20.0, weights__path=path)
    never = 1e6
    backend = Scripted(config, copy=lambda a: never if a.engine == 1 and a.version == 1 else 1.0).run()
    removed = next(t for t, a in backend.of(do.Note) if a == do.Note("engine:1", "removed"))
    gpu = run(config, *((t, what) for t, what in backend.log))
    end = backend.log[-1][0]
    assert sum(sum(lane.seconds) for lane in gpu.lanes) == pytest.approx(4 * end, rel=1e-9)
    assert gpu.lanes[0].seconds[CAUSES.index("idle_no_work")] >= end - removed - 1e-9
