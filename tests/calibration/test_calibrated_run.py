"""A simulation with a profile takes the times that the profile says, and their journal gives the profile back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.costs.errors import CostModelError
from sim.driver import SimulatedBackend
from sim.engine import EngineModel, Request
from sim.serving.traffic import beyond_steps, in_traffic
from testbed.calibration.design import Traffic, TrafficPoint
from testbed.calibration.phases import Phases
from testbed.calibration.profile import (
    ArrivalFit,
    ControlTimes,
    DecodeFit,
    PrefillFit,
    Profile,
    SwitchTimes,
    TrainerFit,
    UpdateTimes,
    other,
    write_profile,
)
from testbed.core import actions as do
from testbed.core import events as said
from tests.support.scenarios import COLOCATED, scenario

UPDATE = UpdateTimes(prepare_s=0.5, pause_s=0.03, copy_s=0.25, requantize_s=0.0, resume_s=0.0625)
PROFILE = Profile(
    format=1,
    decode=DecodeFit(0.01),
    prefill=PrefillFit(0.1, 0.0),
    arrival=ArrivalFit(0.002, 0.004),
    trainer=TrainerFit(1.0, 0.125, 0.0005),
    updates={"broadcast": UPDATE, "cuda_ipc": UPDATE},
    switch=SwitchTimes(0.75, 0.375),
    machine={"cpu": "one"},
    versions={"sglang": "0.5.23"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(tmp_path / "p.json", PROFILE)
    return tmp_path


def run(folder: Path, **changes: Any) -> list[tuple[said.Event, list[do.Action]]]:
    config = scenario(
        simulation__engine_costs={"type": "calibrated", "profile": "p.json"},
        training__cost={"type": "calibrated", "profile": "p.json"},
        **changes,
    )
    records: list[tuple[said.Event, list[do.Action]]] = []
    SimulatedBackend(config, folder, [lambda e, a: records.append((e, list(a)))]).run()
    return records


def phases(records: list[tuple[said.Event, list[do.Action]]]) -> Phases:
    found = Phases(16384, 2)
    for event, actions in records:
        found.observe(event, actions)
    return found


def test_a_profile_is_read_back_as_it_was_written(folder: Path) -> None:
    assert msgspec.json.decode((folder / "p.json").read_bytes(), type=Profile) == PROFILE


def test_updates_and_training_take_what_the_profile_says(folder: Path) -> None:
    """4 trajectories of 100 + 50 tokens on two ranks, a row each: 1 + 0.125 + 300 x 0.0005 s."""
    found = phases(run(folder))
    parts = found.updates["broadcast"]
    for part, expected in (("prepare_s", 0.5), ("pause_s", 0.03), ("copy_s", 0.25), ("resume_s", 0.0625)):
        seconds = [s for _, s in parts[part]]
        assert seconds and seconds == pytest.approx([expected] * len(seconds))
    assert [p.rows for p in found.train] == [(300,)] * 3
    assert [p.seconds for p in found.train] == pytest.approx([1.275] * 3)


def test_a_shared_pool_switches_as_the_profile_says(folder: Path) -> None:
    found = phases(run(folder, **COLOCATED))
    assert found.switches["train"] == pytest.approx([0.75] * len(found.switches["train"]))
    assert found.switches["generate"] == pytest.approx([0.375] * len(found.switches["generate"]))


def test_requests_of_one_engine_arrive_one_after_another(folder: Path) -> None:
    """Two of four requests go to each engine at t = 0: there after 2 + 4 and 2 + 8 ms. The first batch takes the
    first alone; the second waits for its prefill of 100 ms."""
    turns = [e for e, _ in run(folder) if isinstance(e, said.TurnFinished)][:4]
    for engine in (0, 1):
        started = sorted(e.started_t for e in turns if e.engine == engine)
        assert started == pytest.approx([0.006, 0.106])


def test_a_cpu_engine_forms_its_next_batch_when_the_forward_has_ended(folder: Path) -> None:
    """Its forward is synchronous: what arrives meanwhile is taken in before the results are handled, so a sibling of
    the first request finds no KV of their prompt. On a GPU the launch returns at once, and it does."""
    one_engine = {
        "placement": {"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1},
        "model": {"type": "preset", "name": "tiny-qwen3"},
        "rollout__engine": {"weight_precision": "fp32", "max_total_num_tokens": 4096},
    }
    cached = {}
    for gpu in ("CPU", "H100"):
        turns = [e for e, _ in run(folder, cluster__gpu=gpu, **one_engine) if isinstance(e, said.TurnFinished)][:4]
        cached[gpu] = [e.cached_tokens for e in sorted(turns, key=lambda e: e.trajectory)][:2]
    assert cached == {"CPU": [0, 0], "H100": [0, 99]}


def test_a_request_on_its_way_can_be_aborted(folder: Path) -> None:
    """Over-sampling gives up the rest of a round; what is on its way then never reaches an engine, and ends once."""
    slow = msgspec.structs.replace(PROFILE, arrival=ArrivalFit(0.0, 30.0))
    write_profile(folder / "p.json", slow)
    admission = {"type": "over_sampling", "over_sampling_ratio": 2.0, "long_rounds": False}
    records = run(folder, rollout__admission=admission)
    failed = [e for e, _ in records if isinstance(e, said.TurnFailed)]
    started = [(a.trajectory, a.turn) for _, actions in records for a in actions if isinstance(a, do.StartTurn)]
    ended = [(e.trajectory, e.turn) for e, _ in records if isinstance(e, (said.TurnFinished, said.TurnFailed))]
    assert failed and all(e.output_tokens == 0 for e in failed)
    assert len(ended) == len(set(ended)) and set(ended) <= set(started)


def test_a_path_that_was_not_measured_is_refused(folder: Path) -> None:
    path = {"type": "fixed", "update_weight_transfer_mode": "p2p"}
    with pytest.raises(CostModelError, match=r"p\.json has no times of p2p, only of broadcast, cuda_ipc"):
        run(folder, weights__path=path)


def test_a_profile_without_a_trainer_is_refused(folder: Path) -> None:
    write_profile(folder / "p.json", msgspec.structs.replace(PROFILE, trainer=None))
    with pytest.raises(CostModelError, match=r"p\.json has no trainer"):
        run(folder)


def test_differences_of_version_and_machine_are_named() -> None:
    assert other(PROFILE, {"sglang": "0.5.23", "torch": "2"}) == []
    assert other(PROFILE, {"sglang": "0.6"}, {"cpu": "two"}) == ["sglang 0.5.23, here 0.6", "cpu one, here two"]


def test_a_version_of_another_size_takes_longer_by_its_bytes(folder: Path) -> None:
    """Qwen3-8B in BF16 against a profile of 10 GB: what is beyond takes 1 ns a byte; a rule's own pause is taken."""
    sized = msgspec.structs.replace(UPDATE, bytes=10**10, copy_per_byte_s=1e-9)
    pauses = {"retract": ControlTimes(0.5, 0.5, 8, 0.0, 0.0)}
    write_profile(folder / "p.json", msgspec.structs.replace(PROFILE, updates={"broadcast": sized}, controls=pauses))
    parts = phases(run(folder)).updates["broadcast"]
    size = parts["copy_s"][0][0]
    assert 15e9 < size < 17e9  # 8.2 billion parameters of 2 bytes
    assert [s for _, s in parts["copy_s"]] == pytest.approx([0.25 + (size - 10**10) * 1e-9] * len(parts["copy_s"]))
    assert [s for _, s in parts["pause_s"]] == pytest.approx([0.5] * len(parts["pause_s"]))


def test_a_padded_attention_computes_the_square_of_the_whole_context(folder: Path) -> None:
    """Prompts of 100 tokens, 1 us a pair, nothing else: 2 requests of 100 x 100 pairs, or 100 x 50 without padding."""
    took = {}
    for padded in (False, True):
        profile = msgspec.structs.replace(
            PROFILE, prefill=PrefillFit(0.0, 0.0, 1e-6, padded=padded), arrival=None, decode=DecodeFit(1e-9)
        )
        write_profile(folder / "p.json", profile)
        turns = [e for e, _ in run(folder) if isinstance(e, said.TurnFinished)][:4]
        took[padded] = {round(e.first_token_t - e.started_t, 4) for e in turns}
    assert took == {False: {0.01}, True: {0.02}}


def test_forced_lengths_leave_the_last_tokens_kv_uncomputed(folder: Path) -> None:
    """SGLang, overlap on: the turn after 100 + 50 tokens and 10 of a tool finds 149 cached if the request asked for 50
    tokens, and 150 if a stop token ended it (it is seen one step late, and that step has computed its KV)."""
    cached = {}
    for forced in (False, True):
        records = run(
            folder,
            simulation__forced_lengths=forced,
            workload__turns={"type": "fixed", "tokens": 2},
            workload__observation={"type": "fixed", "tokens": 10},
            rollout__routing={"type": "session_affinity"},
        )
        turns = [e for e, _ in records if isinstance(e, said.TurnFinished)]
        cached[forced] = {e.cached_tokens for e in turns if e.turn == 1}
        assert {e.finish_reason for e in turns} == {"tool_calls", "stop"}
    assert cached == {False: {150}, True: {149}}


def test_forced_lengths_are_asked_for_as_a_real_run_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End-of-text is ignored, and SGLang admits such requests by when they end."""
    asked: list[bool] = []
    submit = EngineModel.submit

    def noted(self: EngineModel, now: float, request: Request) -> None:
        asked.append(request.ignore_eos)
        submit(self, now, request)

    monkeypatch.setattr(EngineModel, "submit", noted)
    for forced in (False, True):
        run(folder, simulation__forced_lengths=forced)
        assert set(asked) == {forced}
        asked.clear()


def test_each_request_of_a_prefill_costs_its_traffic(folder: Path) -> None:
    """Two requests come at once: a prefill of 0.1 s and twice 20 ms, then 49 steps of 10 ms."""
    quiet = msgspec.structs.replace(PROFILE, arrival=None)
    for traffic_s in (0.0, 0.02):
        write_profile(folder / "p.json", msgspec.structs.replace(quiet, traffic_s=traffic_s))
        records = run(folder)
        first = next(e for e, _ in records if isinstance(e, said.TurnFinished))
        together = sum(
            isinstance(e, said.TurnFinished) and e.started_t == first.started_t and e.engine == first.engine
            for e, _ in records
        )
        assert first.t - first.started_t == pytest.approx(0.1 + together * traffic_s + 49 * 0.01)


def test_traffic_is_what_a_closed_loop_takes_beyond_its_simulation() -> None:
    """One client, three requests of one prompt token each with 1, 3 and 2 outputs: 3 ways of 6 ms, 3 prefills of 0.1 s
    and 3 decode steps of 10 ms more than the first tokens; an overlapping CPU engine gives a first token with the step
    that follows, so each of those that go on ends with its last step."""
    one = scenario(
        cluster__gpu="CPU",
        placement={"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1},
        model={"type": "preset", "name": "tiny-qwen3"},
        rollout__engine={"weight_precision": "fp32", "max_total_num_tokens": 4096},
    )
    loop = Traffic(1, ((1, 1), (1, 3), (1, 2)))
    alone = 2 * 0.006 + 3 * 0.1 + 3 * 0.01
    points = [TrafficPoint(loop, 1.25 * alone), TrafficPoint(loop, 1.35 * alone)]
    assert in_traffic(PROFILE, one, Path(), points) == pytest.approx(1.3, rel=0.05)
    assert in_traffic(PROFILE, one, Path(), []) == 1.0
    beyond = beyond_steps(PROFILE, one, Path(), points)
    assert beyond == pytest.approx(0.3 * alone / 3, rel=0.2)  # a half of 0.25 and 0.35, three requests
    with_traffic = msgspec.structs.replace(PROFILE, traffic_s=beyond)
    assert in_traffic(with_traffic, one, Path(), points) == pytest.approx(1.0, rel=0.01)
    assert beyond_steps(PROFILE, one, Path(), []) == 0.0
