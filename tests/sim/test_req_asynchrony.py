"""Synchronous and asynchronous execution, and staleness (AS), shown by whole simulated runs.

Versions are read twice: once from what the core reports, once from the log alone (which engine served which version
when).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.workloads import workload
from tests.support.simulated import HERE, STEP, Run, fixed, linear_run, split, turn_seconds
from tests.support.timeline import overlap, pauses, training

UNIFORM = {"type": "uniform", "low": 10, "high": 300}
ASYNC: dict[str, Any] = {
    "rollout__admission": {"type": "fully_async", "async_max_concurrent_groups": 4},
    "placement": split(2, 1),
    "algorithm": {"n_samples_per_prompt": 2, "rollout_batch_size": 2},
    "workload__reply": {"type": "lognormal", "mean": 200, "sigma": 1.0},
    "workload__rewards": {"latency": {"type": "fixed", "seconds": 0.2}},
    "training__cost": {"type": "rate", "samples_per_s": 4.0},
    "run__num_rollout": 20,
}
"""Four groups in flight, batches of two: replies live through several updates."""
GO_ON = {"weights__transition": {"pause_generation_mode": "in_place", "kv": "keep"}}


class Versions:
    """The deployed version over time, from the log: that of a complete publication, from its last engine's barrier
    on."""

    def __init__(self, r: Run) -> None:
        asked: dict[int, float] = {}
        for t, a in r.of(do.ResumeEngine):
            asked.setdefault(a.version, t)
        self.since = [0.0, *(t for v, t in sorted(asked.items()) if v > 0)]

    def at(self, t: float) -> int:
        return bisect_right(self.since, t) - 1


def spans_of(r: Run) -> dict[int, list[said.Span]]:
    """Every span of every turn of a trajectory."""
    found: dict[int, list[said.Span]] = {}
    for _, e, _ in r.turns():
        found.setdefault(e.trajectory, []).extend(e.spans)
    return found


def updates(r: Run) -> list[tuple[float, float]]:
    """From `PrepareWeights` to the last engine that serves the version."""
    ends: dict[int, float] = {e.version: t for t, e in r.of(said.EngineResumed)}
    return [(t, ends[a.version]) for t, a in r.of(do.PrepareWeights) if a.version in ends]


def effective_samples(r: Run) -> float:
    s = r.summary
    return s.waste.trained_trajectories / s.measured_s


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", [{"type": "sync"}, {"type": "bounded", "max_head_offpolicyness": 0}])
def test_as_01_generate_train_publish_generate(admission: dict[str, Any]) -> None:
    """G1 generate -> G1 train -> publish -> G2 generate, each after the last of the one before."""
    r = linear_run(rollout__admission=admission, workload__reply=UNIFORM, run__num_rollout=5)
    turns: dict[int, list[tuple[float, float]]] = {}
    for sent, e, a in r.turns():
        turns.setdefault(a.group // 2, []).append((sent, e.t))
    trained, published = training(r), updates(r)
    for k in range(4):
        assert max(end for _, end in turns[k]) <= trained[k][0]
        assert trained[k][1] <= published[k][0]
        assert published[k][1] <= min(start for start, _ in turns[k + 1])
    assert {x.staleness for b in r.batches for x in b.experiences} == {0}


def test_as_13_eta_zero_is_the_synchronous_run_action_for_action() -> None:
    changes = {"workload__reply": UNIFORM, "run__num_rollout": 4}
    sync = linear_run(rollout__admission={"type": "sync"}, **changes)
    eta0 = linear_run(rollout__admission={"type": "bounded", "max_head_offpolicyness": 0}, **changes)
    said_of = [[e for e, _ in r.records] for r in (sync, eta0)]
    assert said_of[0] == said_of[1]
    assert sync.batches == eta0.batches


@pytest.mark.parametrize("eta", [0, 1, 2, 3])
def test_as_13_consumed_in_the_order_of_submission_nothing_is_older_than_eta(eta: int) -> None:
    r = linear_run(
        **{
            **ASYNC,
            "rollout__admission": {"type": "bounded", "max_head_offpolicyness": eta},
            "experience__selection": {"order": {"type": "oldest_first"}},
            "run__num_rollout": 15,
        },
        **GO_ON,
    )
    readings = [x.staleness for b in r.batches for x in b.experiences]
    assert max(readings) == eta, "the bound is kept, and it is used"
    order = [x.submitted_index for b in r.batches for x in b.experiences]
    assert order == sorted(order)


@pytest.mark.parametrize(("mode", "kv"), [("in_place", "keep"), ("retract", "flush")])
def test_as_02_generation_overlaps_training_with_a_brief_pause_and_goes_on(mode: str, kv: str) -> None:
    r = linear_run(
        rollout__admission={"type": "one_step_ahead"},
        weights__transition={"pause_generation_mode": mode, "kv": kv},
        workload__reply=fixed(900),
        training__cost={"type": "rate", "samples_per_s": 0.7},
        run__num_rollout=5,
    )
    generating = [(sent, e.t) for sent, e, _ in r.turns()]
    assert overlap(training(r), generating) > 0
    stops = pauses(r, 0)
    assert stops and max(b - a for a, b in stops) < 0.2 * turn_seconds(900)
    across = [e for sent, e, _ in r.turns() if any(sent < a and b < e.t for a, b in stops)]
    assert across and all(len(e.spans) >= 2 for e in across), "the same turn goes on with the new weights"
    r.checked()


def test_as_03_v10_makes_four_responses_and_the_next_request_may_use_v11() -> None:
    r = linear_run(
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 1}, workload__reply=UNIFORM, run__num_rollout=12
    )
    batch = r.batches[10]
    assert len({x.group for x in batch.experiences}) == 1 and len(batch.experiences) == 4
    spans = spans_of(r)
    assert [{v for v, _, _ in spans[x.trajectory]} for x in batch.experiences] == [{10}] * 4
    steps = [(t, e) for t, e in r.of(said.TrainStepFinished) if e.batch == 10]
    assert len(steps) == 1 and batch.updates == 1
    after = [e for sent, e, _ in r.turns() if sent >= steps[0][0]]
    assert {v for e in after for v, _, _ in e.spans} == {11}
    served = [e.version for t, e in r.of(said.EngineResumed) if t > steps[0][0]]
    assert set(served) == {11, 12} or set(served) == {11}


# --- three version numbers --------------------------------------------------------------------------------------------


def test_as_04_three_optimizer_steps_and_one_publication_raise_the_deployed_version_by_one() -> None:
    r = linear_run(
        algorithm={"n_samples_per_prompt": 3, "rollout_batch_size": 1, "num_steps_per_rollout": 3}, run__num_rollout=4
    )
    assert [b.experiences[0].trainer_version for b in r.batches] == [0, 3, 6, 9]
    assert [b.experiences[0].dequeue_deployed for b in r.batches] == [0, 1, 2, 3]
    assert len(r.of(said.TrainStepFinished)) == 12
    assert [(a.trainer_version, a.version) for _, a in r.of(do.PrepareWeights)][:3] == [(3, 1), (6, 2), (9, 3)]


def test_as_05_staleness_does_not_depend_on_optimizer_steps_per_publication() -> None:
    """One, two or four updates made of the same batch in the same time: the same run, the same staleness."""
    readings, steps = [], []
    for k in (1, 2, 4):
        r = linear_run(**{**ASYNC, "algorithm": {**ASYNC["algorithm"], "num_steps_per_rollout": k}})
        readings.append([x.staleness for b in r.batches for x in b.experiences])
        steps.append(r.summary.staleness["trainer_steps"].dequeue.mean)
    assert readings[0] == readings[1] == readings[2] and max(readings[0]) >= 2
    assert steps[0] < steps[1] < steps[2], "another measure counts optimizer steps, under its own name"


# --- two readings -----------------------------------------------------------------------------------------------------


def test_as_06_both_readings_of_every_trajectory_follow_from_the_log() -> None:
    """deployed - oldest, at completion and at dequeue, with the oldest version taken from the spans of the turns."""
    r = linear_run(**ASYNC, **GO_ON)
    versions, spans = Versions(r), spans_of(r)
    seen = set()
    for t, b in r.of(do.Train):
        for x in b.experiences:
            oldest = min(v for v, _, _ in spans[x.trajectory])
            newest = max(v for v, _, _ in spans[x.trajectory])
            assert (x.oldest_version, x.newest_version) == (oldest, newest)
            assert x.completion_deployed == max(versions.at(x.generated_t), newest)
            assert x.dequeue_deployed == max(versions.at(t), x.completion_deployed)
            assert x.staleness == x.dequeue_deployed - oldest
            seen.add((x.completion_deployed - oldest, x.dequeue_deployed - oldest))
    assert (1, 2) in seen, "begun under v, completed under v + 1, used under v + 2"
    assert (0, 0) in seen and (0, 1) in seen


def test_as_06_the_decision_uses_the_dequeue_reading() -> None:
    """v3, v4, v5: fresh enough when it was completed (1), too old when the batch wanted it (2)."""
    r = linear_run(**ASYNC, **GO_ON, experience__staleness={"bound": 1, "action": "drop"})
    versions, spans = Versions(r), spans_of(r)
    ends = {e.trajectory: t for t, e in r.of(said.TurnFinished)}
    members: dict[int, list[int]] = {}
    for _, a in r.of(do.StartTurn):
        if a.trajectory not in members.setdefault(a.group, []):
            members[a.group].append(a.trajectory)
    aged_in_the_buffer = 0
    for _, a in r.of(do.Retire):
        if a.reason != "stale":
            continue
        oldest = min(v for i in members[a.group] for v, _, _ in spans[i])
        at_completion = max(versions.at(ends[i]) for i in members[a.group]) - oldest
        assert a.staleness >= 2
        aged_in_the_buffer += at_completion <= 1
    assert aged_in_the_buffer > 0
    assert max(x.staleness for b in r.batches for x in b.experiences) <= 1


def test_as_07_what_arose_while_generating_and_what_in_the_buffer_add_up() -> None:
    s = linear_run(**ASYNC, **GO_ON).summary
    reading = s.staleness["oldest_token"]
    assert 0 < reading.completion.mean < reading.dequeue.mean
    assert s.staleness_in_generation + s.staleness_in_buffer == pytest.approx(1.0)
    assert s.staleness_in_generation == pytest.approx(reading.completion.mean / reading.dequeue.mean)
    synchronous = linear_run(run__num_rollout=4).summary
    assert synchronous.staleness["oldest_token"].dequeue.max == 0


def test_as_08_a_group_is_as_old_as_the_oldest_turn_of_any_member() -> None:
    """Several turns, several members: the reading that drops a group is that of its oldest token anywhere."""
    r = linear_run(
        **ASYNC,
        **GO_ON,
        workload__turns=fixed(3),
        workload__observation=fixed(10),
        experience__staleness={"bound": 2, "action": "drop"},
    )
    spans = spans_of(r)
    oldest_of: dict[int, int] = {}
    for _, a in r.of(do.StartTurn):
        if a.trajectory in spans:
            version = min(v for v, _, _ in spans[a.trajectory])
            oldest_of[a.group] = min(oldest_of.get(a.group, version), version)
    versions = Versions(r)
    stale = [(t, a) for t, a in r.of(do.Retire) if a.reason == "stale"]
    assert stale
    for t, a in stale:
        assert a.staleness == versions.at(t) - oldest_of[a.group]
    for _, b in r.of(do.Train):
        for x in b.experiences:
            assert x.dequeue_deployed - oldest_of[x.group] <= 2, "no member of a stale group is trained"


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "finish"])
def test_as_09_what_happens_to_a_reply_under_way_is_a_setting(mode: str) -> None:
    """Go on with the old KV, go on after computing it again, start again, or end on the old version first."""
    r = linear_run(
        rollout__admission={"type": "one_step_ahead"},
        weights__transition={"pause_generation_mode": mode, "kv": "keep" if mode == "in_place" else "flush"},
        workload__reply=fixed(900),
        training__cost={"type": "rate", "samples_per_s": 0.7},
        run__num_rollout=5,
    )
    turns = [e for _, e, _ in r.turns()]
    across = [e for e in turns if len(e.spans) > 1]
    for e in turns:
        edges = [0, *(end for _, _, end in e.spans)]
        assert [s for _, s, _ in e.spans] == edges[:-1] and edges[-1] == e.output_tokens
    recomputed, failed = sum(e.recomputed_tokens for e in across), r.of(said.TurnFailed)
    if mode == "in_place":
        assert across and recomputed == 0 and not failed
    elif mode == "retract":
        assert across and recomputed > 0 and not failed
        assert all(e.retractions >= 1 for e in across)
    elif mode == "abort":
        assert not across and failed and all(e.output_tokens > 0 for _, e in failed)
        assert {a.attempt for _, a in r.of(do.StartTurn)} == {0, 1}, "the same request id, sent again"
    else:
        assert not across and not failed
        assert r.summary.weight_update.drain_s > 0


# --- what it buys and what it costs -----------------------------------------------------------------------------------


def test_as_10_throughput_is_reported_beside_what_it_costs() -> None:
    """Less waiting against older and discarded data: one summary has all of them."""
    runs = {
        "sync": linear_run(**{**ASYNC, "rollout__admission": {"type": "sync"}}, **GO_ON),
        "async": linear_run(**ASYNC, **GO_ON),
        "async, bound 1": linear_run(**ASYNC, **GO_ON, experience__staleness={"bound": 1, "action": "drop"}),
    }
    s = {name: r.summary for name, r in runs.items()}
    assert s["async"].trained_tokens_per_s_per_gpu > s["sync"].trained_tokens_per_s_per_gpu
    assert s["async"].staleness["oldest_token"].dequeue.mean > s["sync"].staleness["oldest_token"].dequeue.mean == 0
    assert s["async, bound 1"].waste.share > 0 == s["sync"].waste.share
    assert s["async, bound 1"].generated_tokens_per_s_per_gpu > s["async, bound 1"].trained_tokens_per_s_per_gpu
    for name, r in runs.items():
        assert effective_samples(r) == pytest.approx(s[name].trajectories_per_s)


def test_as_11_idle_time_on_each_side() -> None:
    """Synchronous and split: per step the trainer waits for generation and scores, the engines for training and
    publishing."""
    r = linear_run(run__num_rollout=5, run__warmup_steps=1)
    s = r.summary
    lanes = {p.lane: p.gpu_seconds for p in s.pools}
    n, update = s.measured_steps, s.weight_update.total_s
    assert lanes["trainer"]["idle_data"] + lanes["trainer"]["weight_update"] == pytest.approx(
        2 * n * (turn_seconds(50) + 1.0 + update)
    )
    assert lanes["trainer"]["train"] == pytest.approx(2 * n * 4.0)
    busy = lanes["engines"]["generate"] + lanes["engines"]["generate_tail"]
    assert busy == pytest.approx(2 * n * (turn_seconds(50)))
    idle = sum(v for c, v in lanes["engines"].items() if c.startswith("idle"))
    assert idle + lanes["engines"]["weight_update"] == pytest.approx(2 * n * (4.0 + 1.0 + update))


def test_as_12_every_trained_token_has_a_version_and_every_version_its_times() -> None:
    r = linear_run(**ASYNC, **GO_ON)
    spans = spans_of(r)
    asked = {a.version: t for t, a in r.of(do.PrepareWeights)}
    effective: dict[int, float] = {e.version: t for t, e in r.of(said.EngineResumed)}
    for b in r.batches:
        for x in b.experiences:
            assert sum(end - start for _, start, end in spans[x.trajectory]) == x.output_tokens
            for v, _, _ in spans[x.trajectory]:
                assert v == 0 or asked[v] < effective[v]
    assert sorted(asked) == list(range(1, len(asked) + 1))


def test_as_15_usable_at_the_next_step_and_not_at_the_one_after() -> None:
    """Max age 1: made under v10 it may be used under v10 and v11, and is dropped under v12 (window over dispatch
    versions)."""
    r = linear_run(**ASYNC, **GO_ON, experience__selection={"order": {"type": "windowed_fifo", "window": 1}})
    ages = {x.dequeue_deployed - x.dispatch_version for b in r.batches for x in b.experiences}
    assert ages == {0, 1}
    first_sent: dict[int, int] = {}
    version = [0] * 2
    for _, x in r.log:
        if isinstance(x, said.EngineResumed):
            version[x.engine] = x.version
        elif isinstance(x, do.StartTurn):
            first_sent.setdefault(x.group, version[x.engine])
    versions = Versions(r)
    dropped = [(t, a) for t, a in r.of(do.Retire) if a.reason == "outside_window"]
    assert dropped
    assert min(versions.at(t) - first_sent[a.group] for t, a in dropped) == 2


def test_as_16_the_longest_reply_sets_the_synchronous_step() -> None:
    """Every step: prefill and decode of its longest reply, score, training, update. Asynchronously the mean counts."""
    r = linear_run(workload__reply=UNIFORM, placement=split(2, 2), run__num_rollout=8)
    source = workload(r.scenario, HERE)
    longest = []
    for _ in range(8):
        tasks = [source.draw(), source.draw()]
        longest.append(max(p.output_tokens[0] for task in tasks if task for p in task.plans))
    update = updates(r)[0][1] - updates(r)[0][0]
    assert r.cycles == pytest.approx([turn_seconds(n) + 1.0 + 4.0 + update for n in longest[1:]])


def test_as_16_a_longer_tail_moves_the_synchronous_step_and_hardly_the_asynchronous_one() -> None:
    """Equal means; the tail of the second distribution is twice as long."""
    seconds: dict[tuple[str, str], float] = {}
    replies = {
        "short": {"type": "uniform", "low": 190, "high": 210},
        "long": {"type": "uniform", "low": 1, "high": 399},
    }
    for tail, reply in replies.items():
        for name, admission in (
            ("sync", {"type": "sync"}),
            ("async", {"type": "fully_async", "async_max_concurrent_groups": 8}),
        ):
            r = linear_run(
                **{
                    **ASYNC,
                    **GO_ON,
                    "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 4},
                    "workload__reply": reply,
                    "rollout__admission": admission,
                    "training__cost": {"type": "rate", "samples_per_s": 1000.0},
                    "rollout__engine": {"max_running_requests": 8},
                    "run__num_rollout": 25,
                    "run__warmup_steps": 5,
                }
            )
            seconds[tail, name] = r.summary.step_time_mean_s
    sync = seconds["long", "sync"] - seconds["short", "sync"]
    assert sync == pytest.approx((399 - 210) * STEP, rel=0.25)
    assert abs(seconds["long", "async"] - seconds["short", "async"]) < 0.25 * sync
