"""Programs on real engines: paused and restored under a small KV pool, and with tools that run away, write without end,
never answer, or print too much."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from real.driver import RealBackend
from real.environments.base import RealTask, ToolCall
from real.environments.workspace import SOLUTION, Workspace
from testbed.core import actions as do
from testbed.core import events as said
from testbed.metrics.run import RunMetrics
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of
from tests.contract.test_contract import every
from tests.support.invariants import Record, replayed, watched
from tests.support.real_runs import carried_out
from tests.support.scenarios import scenario

STICKY = {"rollout__routing": {"type": "session_affinity"}}
THUNDER = {"type": "thunder_agent", "tick_s": 0.5, "acting_half_life_s": None}
PROGRAMS, TURNS, PROMPT = 48, 4, 1000
"""At their last call 48 x 1,366 tokens, twice what both engines hold."""
TOOL_S = PREPARE_S = 0.3


def pressed(programs: dict[str, Any]) -> Scenario:
    from tests.support.real_rig import for_real

    config = for_real(
        scenario(
            **STICKY,
            algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": PROGRAMS},
            workload__turns={"type": "fixed", "tokens": TURNS},
            rollout__programs=programs,
            run__num_rollout=1,
        )
    )
    tree = config.model_dump(mode="json")
    for name, n in {"prompt": PROMPT, "reply": 24, "observation": 90}.items():
        tree["workload"][name] = {"type": "fixed", "tokens": n}
    tree["workload"] |= {"max_response_length": 64, "tool_time": {"type": "fixed", "seconds": TOOL_S}}
    tree["workload"]["tools"]["environment_prepare"] = {"type": "fixed", "seconds": PREPARE_S}
    return Scenario.model_validate(tree)


def recomputed_share(records: list[Record]) -> float:
    """Of the tokens that a program had computed before, those that were computed again."""
    later = [e for _, e in every(records, said.TurnFinished) if e.turn]
    return float(sum(e.recomputed_tokens for e in later) / sum(e.prompt_tokens for e in later))


@pytest.fixture(scope="module")
def under_pressure(rig: Any) -> dict[str, list[Record]]:
    configs = {"requests": pressed({"type": "none"}), "programs": pressed(THUNDER)}
    return {name: carried_out(rig, config, trains=False).records for name, config in configs.items()}


Runs = dict[str, list[Record]]


def test_ap_09_and_ap_10_programs_keep_their_kv_where_requests_lose_it(under_pressure: Runs) -> None:
    shares = {name: recomputed_share(records) for name, records in under_pressure.items()}
    assert every(under_pressure["programs"], do.PauseProgram), "there was pressure"
    assert shares["requests"] > 0.4 and shares["programs"] < 0.7 * shares["requests"]


def test_ap_11_environments_are_prepared_while_their_programs_wait(under_pressure: Runs) -> None:
    """Requests start with their environment; of the programs that wait for memory, some have theirs before."""
    at_once = {}
    for name, records in under_pressure.items():
        first: dict[int, bool] = {}
        for event, actions in records:
            for a in actions:
                if isinstance(a, do.StartTurn):
                    mine = isinstance(event, said.EnvironmentReady) and event.trajectory == a.trajectory
                    first.setdefault(a.trajectory, mine)
        asked = {a.trajectory: t for t, a in every(records, do.PrepareEnvironment)}
        ready = {e.trajectory: t for t, e in every(records, said.EnvironmentReady)}
        assert all(ready[i] - asked[i] >= PREPARE_S for i in first) and len(first) == PROGRAMS
        at_once[name] = sum(first.values())
    assert at_once["requests"] == PROGRAMS > at_once["programs"]


CODES = {
    0: SOLUTION,
    1: "while True: pass",
    2: "f = open('big', 'wb')\nwhile True: f.write(bytes(2**20))",
    3: "import time; time.sleep(1000)",
    4: "while True: print('more')",
    5: "import os; os.kill(os.getppid(), 9); import time; time.sleep(1000)",
}
FAULTS = {0: "", 1: "time", 2: "space", 3: "time", 4: "output", 5: "died"}
"""Member -> what its call does, and what is said of it."""


LIMIT_S = 1.0
"""Of a tool call."""


@pytest.fixture(scope="module")
def run(rig: Any) -> tuple[Workspace, Scenario, list[Record], int]:
    """Every member calls its code after its first turn, whatever the policy wrote; then it answers."""
    from tests.support.real_rig import for_real

    d = rig.deployment
    config = for_real(
        scenario(
            **STICKY,
            algorithm={"n_samples_per_prompt": len(CODES), "rollout_batch_size": 2},
            workload__environment={
                "type": "workspace",
                "tool_time_limit_s": LIMIT_S,
                "workspace_mb": 8,
                "max_turns": 2,
            },
            workload__tools={"slots": 4, "environments": 12},
            workload__max_response_length=160,
            rollout__programs=THUNDER | {"pause_above": 0.02, "pause_to": 0.02},
            run__num_rollout=1,
        )
    )
    records: list[Record] = []

    def call(task: RealTask, member: int, turn: int, output_ids: list[int]) -> ToolCall | None:
        return ToolCall(turn, CODES[member]) if turn == 0 else None

    async def go() -> tuple[Workspace, int]:
        await d.reset(config)
        environment = d.environment
        environment.after_turn = call
        backend = RealBackend(config, d, [lambda e, a: records.append((e, list(a)))])
        await backend.run()
        return environment, len(environment.folders())

    environment, left = rig.wait(go())
    watched(config, records)
    replayed(config, records)
    return environment, config, records, left


def test_ap_06_tools_that_misbehave_are_bounded_and_named(run: Any) -> None:
    environment, _, records, _ = run
    member = {a.trajectory: a.member for _, a in every(records, do.StartTurn)}
    told = {e.trajectory: e.fault for _, e in every(records, said.ToolFinished)}
    assert len(told) == 12 and all(told[i] == FAULTS[member[i]] for i in told)
    assert environment.faults == Counter(time=4, space=2, output=2, died=2)


def test_ap_03_nothing_of_them_is_left(run: Any) -> None:
    _, _, records, left = run
    prepared = Counter(a.trajectory for _, a in every(records, do.PrepareEnvironment))
    assert prepared == Counter(a.trajectory for _, a in every(records, do.ReleaseEnvironment))
    assert left == 0, "workspaces are removed with their programs"


def test_ap_02_and_ap_12_a_program_goes_on_where_it_was(run: Any) -> None:
    """Paused or not, the second call's prompt is the first one's, its output and what the tool said."""
    _, _, records, _ = run
    first = {e.trajectory: e for _, e in every(records, said.TurnFinished) if e.turn == 0}
    said_by_tool = {e.trajectory: e.observation_tokens for _, e in every(records, said.ToolFinished)}
    made: Counter[int] = Counter()
    for _, e in every(records, said.TurnFinished):
        if e.turn == 0:
            made[e.trajectory] += e.output_tokens
    prompt = {i: e.prompt_tokens for i, e in first.items()}
    for _, e in every(records, said.TurnFinished):
        if e.turn == 1 and e.finish_reason != "abort":
            least = prompt[e.trajectory] + said_by_tool[e.trajectory]
            assert e.prompt_tokens >= least


def test_ap_07_tasks_are_reported_beside_tokens(run: Any) -> None:
    """Tasks a second, and what a task's time goes into, tools among it, against a count by hand."""
    _, config, records, _ = run
    metrics = RunMetrics(config, layout_of(config))
    for event, actions in records:
        metrics.observe(event, actions)
    figures = metrics.summary()
    begun = {a.trajectory: t for t, a in every(records, do.RunTool)}
    tools = {e.trajectory: t - begun[e.trajectory] for t, e in every(records, said.ToolFinished)}
    assert len(tools) == 2 * len(CODES) and sum(tools.values()) > LIMIT_S * list(FAULTS.values()).count("time") * 2
    assert figures.trajectories_per_s == pytest.approx(len(tools) / figures.measured_s)
    assert figures.trajectory.tool == pytest.approx(sum(tools.values()) / len(tools))
    tokens = sum(e.output_tokens for _, e in every(records, said.TurnFinished, said.TurnFailed))
    assert figures.generated_tokens_per_s_per_gpu * figures.num_gpus * figures.measured_s == pytest.approx(tokens)
