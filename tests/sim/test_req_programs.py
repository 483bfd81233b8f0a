"""Agent programs (AP), as far as the simulated tool server and environments show them: reasoning and acting in
turns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from tests.support.simulated import Run, fixed, linear_run, split, turn_seconds

TOOL_S = 3.0
AGENT: dict[str, Any] = {
    "algorithm": {"n_samples_per_prompt": 1, "rollout_batch_size": 4},
    "cluster__gpus_per_node": 8,
    "placement": split(4, 1),
    "workload__turns": fixed(4),
    "workload__observation": fixed(25),
    "workload__tool_time": {"type": "fixed", "seconds": TOOL_S},
    "rollout__routing": {"type": "session_affinity"},
    "run__num_rollout": 1,
}
"""Four programs on an engine each: four calls, a tool of 3 s after each but the last."""


def completion(r: Run) -> dict[int, float]:
    return {e.trajectory: t for t, e in r.of(said.TurnFinished) if not e.continues}


def test_ap_01_a_program_alternates_reasoning_and_acting_and_acting_holds_no_slot() -> None:
    """With one slot an engine, two programs on it interleave: one reasons while the other acts."""
    r = linear_run(
        **{**AGENT, "placement": split(1, 1), "algorithm": {"n_samples_per_prompt": 1, "rollout_batch_size": 2}},
        rollout__engine={"max_running_requests": 1},
    )
    kinds: dict[int, list[str]] = {0: [], 1: []}
    for _, x in r.log:
        if isinstance(x, do.StartTurn | do.RunTool):
            kinds[x.trajectory].append("reason" if isinstance(x, do.StartTurn) else "act")
    assert kinds[0] == kinds[1] == ["reason", "act"] * 3 + ["reason"]
    assert max(completion(r).values()) < 2 * (4 * turn_seconds(50) + 3 * TOOL_S), "not one program after the other"


def test_ap_02_kv_and_environment_outlive_the_calls() -> None:
    r = linear_run(**AGENT, workload__tools={"environment_prepare": {"type": "fixed", "seconds": 1.0}})
    for _, e, _ in r.turns():
        assert e.cached_tokens == (100 + e.turn * 50 + (e.turn - 1) * 25 if e.turn else 0), "all of the history"
    made = Counter(a.trajectory for _, a in r.of(do.PrepareEnvironment))
    gone = {a.trajectory: t for t, a in r.of(do.ReleaseEnvironment)}
    assert set(made.values()) == {1} and gone == completion(r)


@pytest.mark.parametrize("admission", [{"type": "sync"}, {"type": "over_sampling", "over_sampling_ratio": 2.0}])
def test_ap_03_everything_is_reclaimed_at_the_end_however_it_ends(admission: dict[str, Any]) -> None:
    """Success, and abort by an early stop: every environment goes, and no engine holds KV of a program that is over."""
    r = linear_run(
        **{
            **AGENT,
            "workload__reply": {"type": "uniform", "low": 20, "high": 200},
            "workload__tools": {"environments": 5, "environment_prepare": {"type": "fixed", "seconds": 1.0}},
            "run__num_rollout": 3,
        },
        rollout__admission=admission,
    )
    r.checked()
    made = [a.trajectory for _, a in r.of(do.PrepareEnvironment)]
    assert sorted(made) == sorted(a.trajectory for _, a in r.of(do.ReleaseEnvironment))
    outcomes = {a.outcome for _, a in r.of(do.Retire)}
    assert ("aborted" in outcomes) == (admission["type"] == "over_sampling")
    assert not r.backend.services.environments._environments
    assert all(slot.model.running == 0 for slot in r.backend.engines) or admission["type"] == "over_sampling"


def test_ap_05_the_task_goes_on_after_a_call_and_its_time_includes_tools() -> None:
    r = linear_run(**AGENT, workload__tools={"environment_prepare": {"type": "fixed", "seconds": 2.0}})
    assert completion(r) == pytest.approx({i: 2.0 + 4 * turn_seconds(50) + 3 * TOOL_S for i in range(4)})
    t = r.summary.trajectory
    assert (t.environment, t.tool, t.decode + t.prefill) == pytest.approx((2.0, 3 * TOOL_S, 4 * turn_seconds(50)))


def test_ap_06_tool_slots_limit_the_task_and_doubling_them_shortens_it() -> None:
    """Twelve calls of 3 s on c slots: no earlier than 12 x 3 / c after the first; unlimited, programs do not meet."""
    makespan = {}
    for slots in (1, 2, 4, 0):
        r = linear_run(**AGENT, workload__tools={"slots": slots})
        makespan[slots] = max(completion(r).values())
        assert makespan[slots] >= turn_seconds(50) + (12 * TOOL_S / slots if slots else 3 * TOOL_S)
    assert makespan[1] > makespan[2] > makespan[4] == makespan[0]
    assert makespan[1] == pytest.approx(turn_seconds(50) + 12 * TOOL_S + turn_seconds(50)), "the server never rests"


def test_ap_06_late_reclamation_shrinks_the_supply_of_environments() -> None:
    """One environment: each program waits for the one before to be prepared, used and reclaimed."""
    life = 1.0 + 4 * turn_seconds(50) + 3 * TOOL_S
    for release in (0.0, 5.0):
        r = linear_run(
            **AGENT,
            workload__tools={
                "environments": 1,
                "environment_prepare": {"type": "fixed", "seconds": 1.0},
                "environment_release": {"type": "fixed", "seconds": release},
            },
        )
        assert sorted(completion(r).values()) == pytest.approx([(i + 1) * life + i * release for i in range(4)])


def test_ap_07_tasks_are_reported_beside_tokens() -> None:
    """Slower tools leave every call as fast and every task slower: only the task's figures see it."""
    quick, slow = (
        linear_run(**{**AGENT, "workload__tool_time": {"type": "fixed", "seconds": s}, "run__num_rollout": 3}).summary
        for s in (1.0, 10.0)
    )
    assert quick.trajectory.decode == pytest.approx(slow.trajectory.decode)
    assert quick.trajectories_per_s > slow.trajectories_per_s
    assert slow.trajectory.tool == pytest.approx(10 * quick.trajectory.tool)
    assert slow.trajectories_per_s == pytest.approx(12 / slow.measured_s)


@pytest.mark.parametrize("turns", [1, 5])
def test_ap_08_one_call_and_a_loop_of_calls_are_the_same_interface(turns: int) -> None:
    r = linear_run(**{**AGENT, "workload__turns": fixed(turns)})
    assert Counter(e.trajectory for _, e, _ in r.turns()) == dict.fromkeys(range(4), turns)
    assert {x.turns for b in r.batches for x in b.experiences} == {turns}
    assert {x.observation_tokens for b in r.batches for x in b.experiences} == {25 * (turns - 1)}
    assert {x.output_tokens for b in r.batches for x in b.experiences} == {50 * turns}
    r.checked()


@pytest.mark.parametrize("kv", ["flush", "salt_by_version", "keep"])
def test_ap_13_a_version_that_changes_while_a_program_acts_meets_it_at_its_next_call(kv: str) -> None:
    """On return the call is made by the new version; the history's KV is the rule's business."""
    r = linear_run(
        **{**AGENT, "workload__tool_time": {"type": "fixed", "seconds": 6.0}, "run__num_rollout": 4},
        rollout__admission={"type": "one_step_ahead"},
        weights__transition={"pause_generation_mode": "retract", "kv": kv},
    )
    version = [0] * 4
    made: dict[int, set[int]] = {}
    returned = 0
    for _, x in r.log:
        if isinstance(x, said.EngineResumed):
            version[x.engine] = x.version
        elif isinstance(x, said.TurnFinished):
            assert x.spans[-1][0] == version[x.engine]
            before = made.setdefault(x.trajectory, set())
            newer = bool(before) and max(before) < x.spans[0][0]
            returned += newer
            if newer:
                assert (x.cached_tokens > 0) == (kv == "keep")
            before.update(v for v, _, _ in x.spans)
    assert returned > 0
    r.checked()
