"""Weight updates (WS), shown by whole simulated runs: what travels, by which path, who waits for whom, and what happens
meanwhile.

Bytes follow from the parameters of Qwen3-8B as published; times of single paths are tested where the paths are
modelled.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sim.coefficients import coefficients
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from testbed.scenario.rules import check
from tests.support.scenarios import COLOCATED, scenario, tree
from tests.support.simulated import HERE, Run, fixed, linear_run, run, split
from tests.support.timeline import overlap, pauses

PARAMS = 8_190_735_360
PATHS = ("broadcast", "p2p", "disk", "disk_delta")


def by(path: str) -> dict[str, Any]:
    return {"weights__path": {"type": "fixed", "update_weight_transfer_mode": path}}


QUANTIZED: dict[str, Any] = {
    **by("p2p"),
    "rollout__engine__weight_precision": "fp8",
    "weights__requantize": "fp8",
    "cluster__nodes": 2,
    "placement": split(4, 2),
}
"""Engines that take one copy after the other and convert it to FP8."""
AHEAD: dict[str, Any] = {
    "rollout__admission": {"type": "one_step_ahead"},
    "workload__reply": fixed(900),
    "training__cost": {"type": "rate", "samples_per_s": 0.7},
    "run__num_rollout": 5,
}
"""Replies live through updates."""


def times(r: Run, kind: type, version: int) -> dict[int, float]:
    """Engine -> when it reported this step of the update to `version`."""
    return {e.engine: t for t, e in r.of(kind) if e.version == version}


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_ws_01_weights_travel_and_no_optimizer_state(path: str) -> None:
    """2 bytes a parameter (BF16), or a delta of the changed 2 % at 1.2 bytes each: never the 12 bytes of optimizer
    state."""
    r = linear_run(**by(path))
    sent = {e.bytes for _, e in r.of(said.WeightsPrepared)}
    assert sent == {int(PARAMS * 0.02 * 1.2) if path == "disk_delta" else 2 * PARAMS}
    assert r.summary.weight_update.bytes == pytest.approx(sent.pop())


def test_ws_01_engines_of_eight_bits_get_eight_bits_unless_they_convert_themselves() -> None:
    """FP8 engines: 1 byte for all but embeddings and head, or 2 bytes that are converted after the copy."""
    wide = 2 * 151_936 * 4096
    trained = {"training__precision": "fp8", "rollout__engine__weight_precision": "fp8"}
    ready = linear_run(**trained, **by("p2p")).of(said.WeightsPrepared)[0][1]
    converted = linear_run(**QUANTIZED).of(said.WeightsPrepared)[0][1]
    assert ready.bytes == PARAMS - wide + 2 * wide
    assert converted.bytes == 2 * PARAMS


def test_ws_02_another_split_or_format_is_converted_and_that_takes_time() -> None:
    """Trainer and engine of one GPU each, unsharded: nothing to convert. Sharded over two GPUs: gathered first."""
    same = linear_run(**by("broadcast"), placement=split(1, 1), training__sharding="zero1")
    sharded = linear_run(**by("broadcast"), placement=split(1, 2))
    seconds = [[e.seconds for _, e in r.of(said.WeightsPrepared)] for r in (same, sharded)]
    assert set(seconds[0]) == {0.0} and min(seconds[1]) > 0
    half = 2 * PARAMS / 2 / (0.82 * 450e9)  # the other GPU's half over NVLink at measured ring efficiency
    assert seconds[1] == pytest.approx([half] * len(seconds[1]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("participation", [{"type": "all"}, {"type": "waves", "size": 1}])
def test_ws_03_every_path_is_one_interface(path: str, participation: dict[str, Any]) -> None:
    r = linear_run(**by(path), **AHEAD, weights__participation=participation)
    r.checked()
    assert len(r.steps) == 5
    assert r.summary.weight_update.path == path and r.summary.weight_update.count >= 3


# --- by which path ----------------------------------------------------------------------------------------------------


def test_ws_04_the_path_is_chosen_by_its_total_and_the_fastest_transfer_may_lose() -> None:
    """The delta moves 197 MB and the broadcast 16.4 GB; but the delta has to be built."""
    r = run(scenario(weights__path={"type": "cheapest"}))
    costs = {c.path: c for c in r.of(said.RunStarted)[0][1].path_costs}
    assert set(costs) == {"broadcast", "p2p", "disk_delta"}
    for c in costs.values():
        assert c.total_s == pytest.approx(c.prepare_s + c.transfer_s + c.apply_s + c.requantize_s)
    fastest = min(costs.values(), key=lambda c: c.transfer_s)
    cheapest = min(costs.values(), key=lambda c: c.total_s)
    assert fastest.path == "disk_delta" != cheapest.path
    chosen = [a for _, a in r.of(do.PrepareWeights)]
    assert {a.path for a in chosen} == {cheapest.path}
    assert all(a.why.startswith("cheapest: ") and "disk_delta" in a.why for a in chosen)


def test_ws_04_the_total_decides_between_runs_too() -> None:
    """The chosen path gives the shortest synchronous cycle of the three."""
    cycles = {p: linear_run(**by(p), run__num_rollout=3).cycles[0] for p in ("broadcast", "p2p", "disk_delta")}
    chosen = linear_run(weights__path={"type": "cheapest"}, run__num_rollout=3)
    assert chosen.cycles[0] == pytest.approx(min(cycles.values()))
    assert chosen.batches and chosen.of(do.PrepareWeights)[0][1].path == min(cycles, key=lambda p: cycles[p])


# --- copied, ready, resumed -------------------------------------------------------------------------------------------


def test_ws_05_ws_06_v21_reaches_a_before_b_and_serves_when_both_are_ready() -> None:
    """Copied is not ready: the conversion remains. Ready is not resumed: the barrier remains."""
    r = linear_run(**QUANTIZED, run__num_rollout=22)
    copied, ready = times(r, said.WeightsCopied, 21), times(r, said.EngineReady, 21)
    resumed = times(r, said.EngineResumed, 21)
    assert set(copied) == set(ready) == set(resumed) == {0, 1, 2, 3}
    assert all(copied[e] < ready[e] < resumed[e] for e in copied)
    assert ready[0] < ready[1] < ready[2] < ready[3], "one copy after the other"
    asked = [t for t, a in r.of(do.ResumeEngine) if a.version == 21]
    assert set(asked) == {max(ready.values())}
    served = [sent for sent, e, _ in r.turns() if any(v == 21 for v, _, _ in e.spans)]
    assert min(served) >= max(ready.values())
    assert not [sent for sent, _, _ in r.turns() if min(copied.values()) <= sent < max(ready.values())]
    assert r.summary.weight_update.barrier_s == pytest.approx(max(ready.values()) - min(ready.values()), rel=1e-6)
    assert r.summary.weight_update.requantize_s == pytest.approx(ready[0] - copied[0], rel=1e-6)


def test_ws_06_an_engine_that_takes_no_part_holds_nobody() -> None:
    """One of four is lost before the update begins: the barrier is that of the other three."""
    plain = linear_run(**QUANTIZED, run__num_rollout=2)
    begin = plain.of(do.PrepareWeights)[0][0]
    config = scenario(
        **{
            **QUANTIZED,
            "simulation__engine_costs": {"type": "linear"},
            "training__cost": {"type": "rate", "samples_per_s": 1.0},
        }
    )
    r = run(config, [said.EngineLost(begin - 0.5, 3)])
    first = r.of(do.PrepareWeights)[0][1]
    assert first.participants == (0, 1, 2)
    ready = times(r, said.EngineReady, 1)
    assert {t for t, a in r.of(do.ResumeEngine) if a.version == 1} == {max(ready.values())}
    assert set(ready) == {0, 1, 2}


def test_ws_06_each_wave_has_its_own_barrier_and_the_others_go_on_serving() -> None:
    r = linear_run(
        **AHEAD, **by("disk_delta"), weights__participation={"type": "waves", "size": 1}, placement=split(3, 1)
    )
    stops = [pauses(r, e) for e in range(3)]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert overlap(stops[a], stops[b]) == 0.0
    turns = [(sent, e.t) for sent, e, a in r.turns() if a.engine != 0]
    assert overlap(stops[0], turns) > 0


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_ws_07_conversion_only_for_models_that_need_it(quantization: str) -> None:
    changes = (
        QUANTIZED
        if quantization == "fp8"
        else {k: v for k, v in QUANTIZED.items() if k != "rollout__engine__weight_precision"}
    )
    r = linear_run(**{**changes, "weights__requantize": quantization})
    needed = quantization == "fp8"
    assert bool(r.of(do.RequantizeWeights)) == bool(r.of(said.EngineReady)) == needed
    assert (r.summary.weight_update.requantize_s > 0) == needed
    if not needed:
        copied = times(r, said.WeightsCopied, 1)
        assert {t for t, a in r.of(do.ResumeEngine) if a.version == 1} == {max(copied.values())}, "copied is ready then"


# --- rules ------------------------------------------------------------------------------------------------------------


def test_ws_08_an_update_without_a_declared_rule_is_refused() -> None:
    config = tree()
    del config["weights"]["transition"]
    with pytest.raises(ValidationError, match="transition"):
        Scenario.model_validate(config)
    for part in ("pause_generation_mode", "kv"):
        config = tree()
        del config["weights"]["transition"][part]
        with pytest.raises(ValidationError, match=part):
            Scenario.model_validate(config)


def test_ws_08_a_rule_that_contradicts_itself_is_refused() -> None:
    faults = check(scenario(weights__transition={"pause_generation_mode": "in_place", "kv": "flush"}), HERE)
    assert [f.key for f in faults] == ["weights.transition.kv"]


@pytest.mark.parametrize("mode", ["finish", "retract", "in_place", "abort"])
def test_ws_08_the_rule_holds_for_every_request_of_every_transition(mode: str) -> None:
    """What happens to turns that are in an engine when it is asked to pause."""
    r = linear_run(**AHEAD, weights__transition={"pause_generation_mode": mode, "kv": "salt_by_version"})
    live: dict[int, set[int]] = {0: set(), 1: set()}
    fates: set[str] = set()
    closed: dict[int, set[int]] = {}
    for _, x in r.log:
        if isinstance(x, do.StartTurn):
            assert x.engine not in closed, "no turn for an engine in transition"
            live[x.engine].add(x.trajectory)
        elif isinstance(x, do.PauseEngine):
            assert x.mode == ("retract" if mode == "finish" else mode)
            assert not live[x.engine] or mode != "finish"
            closed[x.engine] = set(live[x.engine])
        elif isinstance(x, said.EngineResumed):
            closed.pop(x.engine)
        elif isinstance(x, said.TurnFailed):
            live[x.engine].discard(x.trajectory)
            assert mode == "abort" and x.engine in closed and x.reason == "aborted"
            fates.add("thrown away")
        elif isinstance(x, said.TurnFinished):
            live[x.engine].discard(x.trajectory)
            fates.add("went on" if len(x.spans) > 1 else "one version")
    expected = {
        "finish": {"one version"},
        "abort": {"one version", "thrown away"},
        "retract": {"one version", "went on"},
        "in_place": {"one version", "went on"},
    }
    assert fates == expected[mode]


@pytest.mark.parametrize("participation", ["all", "waves"])
def test_ws_09_no_mixture_of_versions_among_participants_unless_the_rule_says_so(participation: str) -> None:
    """With one barrier, all engines that take turns serve the same version at any time; in waves they do not."""
    rule = {"type": "all"} if participation == "all" else {"type": "waves", "size": 1}
    r = linear_run(**AHEAD, **by("disk_delta"), weights__participation=rule, placement=split(3, 1))
    version, open_ = [0] * 3, [True] * 3
    mixed = 0
    for _, x in r.log:
        if isinstance(x, do.PauseEngine):
            open_[x.engine] = False
        elif isinstance(x, said.EngineResumed):
            version[x.engine], open_[x.engine] = x.version, True
        elif isinstance(x, do.StartTurn):
            mixed += len({v for v, o in zip(version, open_, strict=True) if o}) > 1
    assert (mixed == 0) or participation == "waves"
    if participation == "all":
        for _, b in r.of(do.Train):
            assert all(x.dispatch_version <= x.oldest_version <= x.newest_version for x in b.experiences)


# --- times ------------------------------------------------------------------------------------------------------------


def test_ws_10_the_pause_is_not_the_update() -> None:
    """A delta is built, written and fetched while engines generate: they stand still for the application alone."""
    r = linear_run(**AHEAD, **by("disk_delta"))
    w = r.summary.weight_update
    stops = pauses(r, 0)
    assert 0 < w.pause_s < 0.5 * w.total_s
    assert w.total_s == pytest.approx(w.prepare_s + w.drain_s + w.copy_s + w.barrier_s + 0.05, rel=0.02)
    reload = 2 * PARAMS / coefficients().reload_bytes_per_s + 0.05
    # engines share the storage's reads: each waits its turn before it applies
    assert max(b - a for a, b in stops) >= reload
    generating = [(sent, e.t) for sent, e, a in r.turns() if a.engine == 0]
    preparing = [
        (t, next(u for u, e in r.of(said.WeightsPrepared) if e.version == a.version))
        for t, a in r.of(do.PrepareWeights)
    ]
    assert overlap(preparing, generating) > 0


def test_ws_10_a_collective_pauses_all_for_its_whole_length() -> None:
    r = linear_run(**AHEAD, **by("broadcast"))
    w = r.summary.weight_update
    assert w.pause_s == pytest.approx(w.copy_s + 0.05, rel=0.05)
    assert stops_together(r)


def stops_together(r: Run) -> bool:
    """Whether both engines are back at the same instant, every time."""
    back = [[t for t, e in r.of(said.EngineResumed) if e.engine == i] for i in (0, 1)]
    return back[0] == back[1]


@pytest.mark.parametrize("admission", ["sync", "one_step_ahead"])
def test_ws_11_published_effective_first_request(admission: str) -> None:
    """Each version: trained, asked for, prepared, copied, resumed, used by a first request, in a batch: in this
    order."""
    r = linear_run(rollout__admission={"type": admission}, workload__reply=fixed(300), run__num_rollout=6)
    asked = {a.version: (t, a.trainer_version) for t, a in r.of(do.PrepareWeights)}
    prepared = {e.version: t for t, e in r.of(said.WeightsPrepared)}
    trained = [t for t, _ in r.of(said.TrainStepFinished)]
    for version in list(asked)[:-2]:
        t_asked, updates = asked[version]
        copied = max(times(r, said.WeightsCopied, version).values())
        effective = max(times(r, said.EngineResumed, version).values())
        first = min(e.started_t for _, e, _ in r.turns() if e.spans[0][0] == version)
        used = min(t for t, b in r.of(do.Train) if any(x.newest_version == version for x in b.experiences))
        chain = [trained[updates - 1], t_asked, prepared[version], copied, effective, first, used]
        assert chain == sorted(chain)
        if admission == "sync":
            assert first == effective, "everybody has been waiting for it"
    assert r.summary.weight_update.effective_to_first_request_s >= 0.0


# --- failures ---------------------------------------------------------------------------------------------------------


def test_ws_14_an_engine_that_hangs_is_treated_after_the_timeout_and_the_others_go_on() -> None:
    """The first engine is lost in the middle of its copy: the barrier waits for those that are left, and for nobody
    else."""
    plain = linear_run(**QUANTIZED, run__num_rollout=3)
    t, a = plain.of(do.CopyWeights)[0]
    config = plain.scenario
    r = run(config, [said.EngineLost(t + 1e-3, a.engine)])
    r.checked()
    resumed = times(r, said.EngineResumed, 1)
    assert set(resumed) == {0, 1, 2, 3} - {a.engine}


def test_ws_14_a_failed_preparation_leaves_the_old_version_serving_everywhere() -> None:
    plain = linear_run(**AHEAD, **by("disk_delta"))
    t, a = plain.of(do.PrepareWeights)[0]
    r = run(plain.scenario, [said.WeightUpdateFailed(t + 1e-3, -1, a.version, "prepare", "no space left")])
    r.checked()
    assert r.summary.weight_update.failed == 1
    second = r.of(do.PrepareWeights)[1][1]
    assert second.version == 1, "the number was never served, so it is used again"


def test_a_shared_pool_updates_its_engines_after_the_switch() -> None:
    r = linear_run(**COLOCATED, run__num_rollout=3)
    back = [t for t, e in r.of(said.PoolSwitched) if e.phase == "generate"]
    asked = sorted({t for t, _ in r.of(do.PauseEngine)})
    assert asked == back[: len(asked)]
