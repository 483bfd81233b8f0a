"""The transition tables are complete and true: every transition of a table happens in a run or is asked for here,
nothing else does."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core import pools, programs, publication, records
from testbed.core.core import Core
from testbed.core.errors import ProtocolError
from testbed.core.states import ENGINE, GROUP, MACHINES, POOL, PROGRAM, TRAJECTORY, IllegalTransition, step
from tests.support.random_runs import random_run, random_scenario
from tests.support.scenarios import COLOCATED, scenario
from tests.support.scripted import Scripted

ENDS = {
    "trajectory": {"trained", "dropped", "aborted", "failed"},
    "program": {"terminated"},
    "group": {"trained", "dropped", "aborted"},
    "engine": set(),
    "pool": set(),
}

NOT_BY_EVENTS = {
    ("trajectory", "preparing", "fail"): "an environment that cannot be prepared is told by the environment service",
    ("trajectory", "queued", "fail"): "lost turns end a trajectory while they are still generating",
    ("trajectory", "generated", "drop"): "lots are dropped when ready",
    ("trajectory", "generated", "fail"): "a verifier that gives up",
    ("program", "paused", "act"): "a call that ended before its abort came; `test_program_pausing` has it",
    ("group", "generated", "abort"): "rounds give up groups that still generate",
    ("group", "generated", "drop"): "groups are dropped when ready",
    ("group", "ready", "abort"): "rounds give up groups that still generate",
    ("engine", "copied", "restore"): "a copied engine becomes ready, or is requantised, within the same event",
    ("engine", "copied", "lose"): "likewise",
}
"""Transitions that the tables allow and no event of today's core leads to, with the reason why they are there."""


@pytest.mark.parametrize("machine", MACHINES)
def test_every_state_is_reachable_and_only_the_ends_have_no_way_out(machine: str) -> None:
    table = MACHINES[machine]
    reached = {next(iter(table)), *(s for moves in table.values() for s in moves.values())}
    starts = {
        "trajectory": {"preparing", "queued"},
        "program": {"new"},
        "group": {"drawing"},
        "engine": {"serving"},
        "pool": {"generate", "train"},
    }
    assert set(table) == reached | starts[machine]
    assert {s for s, moves in table.items() if not moves} == ENDS[machine]


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_not_in_the_table_raises(machine: str) -> None:
    table = MACHINES[machine]
    inputs = {given for moves in table.values() for given in moves}
    for state, moves in table.items():
        for given in inputs:
            if given in moves:
                assert step(machine, 7, state, given) == moves[given]
            else:
                with pytest.raises(IllegalTransition, match=f"{machine} 7: `{given}` in state `{state}`"):
                    step(machine, 7, state, given)
    with pytest.raises(IllegalTransition):
        step(machine, 7, "nowhere", "anything")


class Recording(dict):  # type: ignore[type-arg]
    """A table that remembers which of its transitions were taken."""

    def __init__(self, table: Any, taken: set[tuple[str, str]]) -> None:
        super().__init__({s: _Moves(s, moves, taken) for s, moves in table.items()})


class _Moves(dict):  # type: ignore[type-arg]
    def __init__(self, state: str, moves: Any, taken: set[tuple[str, str]]) -> None:
        super().__init__(moves)
        self._state, self._taken = state, taken

    def __getitem__(self, given: str) -> str:
        following: str = super().__getitem__(given)
        self._taken.add((self._state, given))
        return following


@pytest.fixture(scope="module")
def taken() -> dict[str, set[tuple[str, str]]]:
    """machine -> transitions that a thousand random runs took."""
    seen: dict[str, set[tuple[str, str]]] = defaultdict(set)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "TRAJECTORY", Recording(TRAJECTORY, seen["trajectory"]))
        programs_table = Recording(PROGRAM, seen["program"])
        patch.setattr(programs, "step", lambda machine, who, state, given: programs_table[state][given])
        patch.setattr(records, "GROUP", Recording(GROUP, seen["group"]))
        patch.setattr(publication, "ENGINE", Recording(ENGINE, seen["engine"]))
        table = Recording(POOL, seen["pool"])
        patch.setattr(pools, "step", lambda machine, who, state, given: table[state][given])
        for seed in range(1000):
            r = random.Random(seed)
            random_run(r, random_scenario(r)).run(max_events=20_000)
    return seen


@pytest.mark.parametrize("machine", MACHINES)
def test_every_transition_is_taken_or_documented(machine: str, taken: dict[str, set[tuple[str, str]]]) -> None:
    allowed = {(s, given) for s, moves in MACHINES[machine].items() for given in moves}
    documented = {(s, given) for m, s, given in NOT_BY_EVENTS if m == machine}
    assert documented <= allowed - taken[machine]
    assert taken[machine] <= allowed
    assert allowed - taken[machine] - documented == set()


# --- events that cannot be true ---------------------------------------------------------------------------------------


def started(**changes: Any) -> Core:
    """Two groups of two generate; it is 5 s."""
    run = Scripted(scenario(**changes))
    run.run(until=5)
    run.core.handle(said.LoadReported(5.0, 0, 2, 0, 10, 100, 0, 0.0, 0.0, 0.0))
    return run.core


def turn(t: float, trajectory: int = 0, turn: int = 0, engine: int = 0, **changes: Any) -> said.TurnFinished:
    fields: dict[str, Any] = {
        "prompt_tokens": 100,
        "output_tokens": 50,
        "spans": ((0, 0, 50),),
        "cached_tokens": 0,
        "first_token_t": 1.0,
        "started_t": 0.0,
        "finish_reason": "stop",
    }
    return said.TurnFinished(t, trajectory, turn, engine, **(fields | changes))


IMPOSSIBLE: dict[str, said.Event] = {
    "time goes back": said.TimerFired(4.0, 1),
    "an unknown trajectory": turn(6.0, trajectory=99),
    "another turn": turn(6.0, turn=1),
    "another engine": turn(6.0, engine=1),
    "spans with a gap": turn(6.0, spans=((0, 0, 20), (0, 30, 50))),
    "spans that are too short": turn(6.0, spans=((0, 0, 20),)),
    "a version that falls": turn(6.0, spans=((1, 0, 20), (0, 20, 50))),
    "a first token before the start": turn(6.0, started_t=3.0, first_token_t=2.0),
    "a first token after the end": turn(6.0, first_token_t=7.0),
    "a failure of an unknown turn": said.TurnFailed(6.0, 0, 3, 0, "refused"),
    "a task that nobody asked for": said.TaskArrived(6.0, 77, 0, 100),
    "a second task": said.TaskArrived(6.0, 0, 0, 100),
    "a tool that did not run": said.ToolFinished(6.0, 0, 10),
    "an environment that was not prepared": said.EnvironmentReady(6.0, 0),
    "a signal that nobody needs": said.SignalReady(6.0, "critic", (0,)),
    "a score of what still generates": said.SignalReady(6.0, "reward", (0,), (1.0,)),
    "a training step without a batch": said.TrainStepFinished(6.0, 0, 0),
    "prepared weights that nobody asked for": said.WeightsPrepared(6.0, 1),
    "a paused engine without an update": said.EnginePaused(6.0, 0),
    "a copy without an update": said.WeightsCopied(6.0, 0, 1),
    "a ready engine without an update": said.EngineReady(6.0, 0, 1),
    "a resumed engine without an update": said.EngineResumed(6.0, 0, 1),
    "a failure without an update": said.WeightUpdateFailed(6.0, 0, 1, "copy", ""),
    "an engine that joins and was there": said.EngineJoined(6.0, 0, 0),
    "a phase that nobody asked for": said.PoolSwitched(6.0, 1, "generate"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_event_that_cannot_be_true_raises(name: str) -> None:
    with pytest.raises((ProtocolError, IllegalTransition)):
        started().handle(IMPOSSIBLE[name])


def test_copies_of_another_version_and_early_resumes_raise() -> None:
    """In the update to v1 at 16 s, engine 0 is copying."""
    for event, message in (
        (said.WeightsCopied(16.5, 0, 9), "takes no part"),
        (said.EngineResumed(16.5, 0, 1), "`resumed` in state `copying`"),
        (said.EngineReady(16.5, 0, 1), "`agree` in state `copying`"),
        (said.TrainStepFinished(16.5, 0, 1), "not being trained"),
    ):
        run = Scripted(scenario())
        run.run(until=16.2)
        assert run.core.context.engines[0].state == "copying"
        with pytest.raises((ProtocolError, IllegalTransition), match=message):
            run.core.handle(event)


def test_a_signal_that_arrives_twice_raises() -> None:
    run = Scripted(scenario(), reward=100.0)
    run.run(until=11)
    run.core.handle(said.SignalReady(12.0, "reward", (0,), (1.0,)))
    with pytest.raises(ProtocolError, match="twice"):
        run.core.handle(said.SignalReady(13.0, "reward", (0,), (1.0,)))


def test_a_pool_that_switches_to_another_phase_than_asked_raises() -> None:
    run = Scripted(scenario(**COLOCATED))
    run.run(until=11.5)
    assert run.core.pool.phase == "to_train"
    with pytest.raises(ProtocolError, match="the core asked for train"):
        run.core.handle(said.PoolSwitched(12.0, 0, "generate"))


def test_after_finish_every_event_is_ignored() -> None:
    run = Scripted(scenario(run__num_rollout=1)).run()
    assert run.of(do.Finish) and run.core.finished
    assert run.core.handle(said.TimerFired(0.0, 1)) == []


def test_explain_says_where_everything_stands() -> None:
    text = started().explain()
    assert "trajectories {'generating': 4}" in text and "turns in engines 4" in text and "job none" in text
