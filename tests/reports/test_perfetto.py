"""The trace: slices of a hand-made run, in Chrome's trace-event format."""

import gzip
import json

import pytest

from reports import write_trace
from reports.perfetto import CONTROL, ENGINES, POOLS, PUBLICATIONS, TRAINER
from testbed.core import actions as act
from testbed.core import events as ev
from testbed.scenario import Scenario


def scenario(placement):
    return Scenario.model_validate(
        {
            "cluster": {"nodes": 1, "gpus_per_node": 4},
            "model": {"type": "preset", "name": "qwen3-0.6b"},
            "workload": {"type": "lengths", "reply": {"type": "fixed", "tokens": 100}, "max_response_length": 100},
            "placement": placement,
            "rollout": ROLLOUT,
            "weights": {
                "path": {"type": "fixed", "update_weight_transfer_mode": "broadcast"},
                "transition": {"pause_generation_mode": "in_place", "kv": "keep"},
            },
        }
    )


ROLLOUT = {"admission": {"type": "sync"}}
SPLIT = {"mode": "disaggregated", "rollout_num_gpus": 2, "actor_num_gpus": 2}
SHARED = {"mode": "colocated", "num_gpus": 4, "rollout_num_gpus_per_engine": 4}


def start(trajectory, engine, attempt=0):
    return act.StartTurn(
        trajectory=trajectory, turn=0, engine=engine, group=0, task=0, member=trajectory, attempt=attempt, why="test"
    )


def finished(t, trajectory, engine):
    return ev.TurnFinished(
        t=t,
        trajectory=trajectory,
        turn=0,
        engine=engine,
        prompt_tokens=10,
        output_tokens=100,
        spans=((0, 0, 100),),
        cached_tokens=4,
        first_token_t=t - 0.5,
        started_t=t - 0.6,
        finish_reason="stop",
    )


def disaggregated():
    """Two engines, one batch of two trajectories, one publication of version 1 to both engines."""
    yield ev.RunStarted(t=0.0), [start(0, 0), start(1, 1), act.Note(subject="trainer", state="empty")]
    yield finished(2.0, 0, 0), []
    yield finished(3.0, 1, 1), [act.ComputeSignals(signal="reward", trajectories=(0, 1), pool=-1)]
    yield (
        ev.SignalReady(t=3.5, signal="reward", trajectories=(0, 1), values=(1.0, 0.0)),
        [
            act.Note(subject="trainer", state="busy"),
            act.Train(batch=0, pool=1, updates=2, experiences=(), why="fifo"),
            start(2, 0),
        ],
    )
    yield ev.TrainStepFinished(t=4.0, batch=0, update=0), []
    yield (
        ev.TrainStepFinished(t=5.0, batch=0, update=1),
        [
            act.PrepareWeights(
                version=1, trainer_version=2, path="broadcast", participants=(0, 1), pool=1, why="interval 1"
            )
        ],
    )
    yield (
        ev.WeightsPrepared(t=5.5, version=1, seconds=0.5, bytes=1000),
        [act.PauseEngine(engine=e, mode="in_place", version=1) for e in (0, 1)],
    )
    for e in (0, 1):
        yield (
            ev.EnginePaused(t=5.6, engine=e),
            [act.CopyWeights(engine=e, version=1, path="broadcast", participants=(0, 1))],
        )
    for e in (0, 1):
        yield (
            ev.WeightsCopied(t=6.0, engine=e, version=1),
            [act.RequantizeWeights(engine=e, version=1, quantization="none")],
        )
    yield ev.EngineReady(t=6.1, engine=0, version=1), []
    yield ev.EngineReady(t=6.3, engine=1, version=1), [act.ResumeEngine(engine=e, version=1, kv="keep") for e in (0, 1)]
    for e in (0, 1):
        yield ev.EngineResumed(t=6.4, engine=e, version=1), []


@pytest.fixture
def trace(tmp_path):
    n = write_trace(disaggregated(), scenario(SPLIT), tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert len(data["traceEvents"]) == n
    return data["traceEvents"]


def slices(trace, pid):
    return [(e["name"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X" and e["pid"] == pid]


def test_every_turn_is_one_async_slice_on_its_engine(trace):
    begins = {e["id"]: e for e in trace if e["ph"] == "b"}
    ends = {e["id"]: e for e in trace if e["ph"] == "e"}
    assert begins.keys() == ends.keys() == {"0-0.0", "1-0.0", "2-0.0"}
    assert (begins["0-0.0"]["ts"], ends["0-0.0"]["ts"], ends["0-0.0"]["pid"]) == (0.0, 2e6, ENGINES)
    assert ends["1-0.0"]["args"]["output_tokens"] == 100 and ends["1-0.0"]["pid"] == ENGINES + 1
    assert ends["2-0.0"]["args"] == {"open": True} and ends["2-0.0"]["ts"] == pytest.approx(6.4e6)


def test_requests_in_flight_are_a_counter(trace):
    counts = [
        (e["ts"], e["args"]["turns"])
        for e in trace
        if e["ph"] == "C" and e["pid"] == ENGINES and e["name"] == "in flight"
    ]
    assert counts == [(0.0, 1), (2e6, 0), (3.5e6, 1)]


def test_a_batch_is_one_slice_until_its_last_update(trace):
    trainer = slices(trace, TRAINER)
    assert ("train batch 0", 3.5e6, 1.5e6) in trainer
    assert ("empty", 0.0, 3.5e6) in trainer  # why the trainer waited


def test_rp_10_a_publication_shows_prepare_copy_barrier_and_pause(trace):
    updates = dict((n, (ts, dur)) for n, ts, dur in slices(trace, PUBLICATIONS))
    assert updates["prepare"] == pytest.approx((5e6, 0.5e6))
    assert updates["v1 by broadcast"] == pytest.approx((5e6, 1.4e6))
    engine = dict((n, (ts, dur)) for n, ts, dur in slices(trace, ENGINES))
    assert engine["drain (in_place)"] == pytest.approx((5.5e6, 0.1e6))
    assert engine["paused"] == pytest.approx((5.6e6, 0.8e6))
    assert engine["copy v1 by broadcast"] == pytest.approx((5.6e6, 0.4e6))
    assert engine["requantise, agree (none)"] == pytest.approx((6.0e6, 0.1e6))
    assert engine["waits for the barrier"] == pytest.approx((6.1e6, 0.3e6))


def test_a_slice_stands_before_those_inside_it(trace):
    """A viewer nests by order: time first, and of slices that begin together the longer one."""
    keys = [(e["ts"], -e.get("dur", 0.0)) for e in trace if "ts" in e]
    assert keys == sorted(keys)
    names = [n for n, _, _ in slices(trace, PUBLICATIONS)]
    assert names.index("v1 by broadcast") < names.index("prepare")


def test_tracks_have_names(trace):
    names = {e["pid"]: e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "process_name"}
    assert names[TRAINER] == "trainer (2 GPUs)" and names[ENGINES + 1].startswith("engine 1 (1 GPUs, pool rollout)")
    assert names.keys() >= {TRAINER, PUBLICATIONS, POOLS, CONTROL}


def test_pl_02_phases_and_switches_of_a_shared_pool(tmp_path):
    def records():
        yield ev.RunStarted(t=0.0), [start(0, 0)]
        yield finished(4.0, 0, 0), [act.SwitchPool(pool=0, phase="train", why="batch ready")]
        yield ev.PoolSwitched(t=5.5, pool=0, phase="train"), [act.Finish(reason="done")]

    write_trace(records(), scenario(SHARED), tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert slices(trace, POOLS) == [("generate", 0.0, 4e6), ("switch to train", 4e6, 1.5e6), ("train", 5.5e6, 0.0)]


def test_gzip_by_suffix_holds_the_same(tmp_path):
    for name in ("t.json", "t.json.gz"):
        write_trace(disaggregated(), scenario(SPLIT), tmp_path / name)
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == (tmp_path / "t.json").read_bytes()


def test_a_turn_that_is_sent_again_ends_its_first_slice(tmp_path):
    def records():
        yield ev.RunStarted(t=0.0), [start(0, 0)]
        yield ev.EngineLost(t=1.0, engine=0), [start(0, 1, attempt=1)]
        yield finished(3.0, 0, 1), []

    write_trace(records(), scenario(SPLIT), tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [(e["id"], e["ts"]) for e in trace if e["ph"] == "e"] == [("0-0.0", 1e6), ("0-0.1", 3e6)]
    assert [e["args"]["turns"] for e in trace if e["ph"] == "C"] == [1, 0, 1, 0]
