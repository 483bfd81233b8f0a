"""Tail handling in the core: redundant members, partial rollout, and the order of turns, with constants for
durations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from testbed.core import actions as do
from testbed.core import events as said
from tests.support.invariants import replayed, watched
from tests.support.scenarios import COLOCATED, scenario
from tests.support.scripted import KEPT, Scripted

PARTIAL = {"type": "over_sampling", "over_sampling_ratio": 2.0, "long_rounds": False, "partial_rollout": True}


def checked(run: Scripted) -> Scripted:
    watched(run.scenario, run.records)
    replayed(run.scenario, run.records)
    return run


def test_redundant_members_are_given_up_when_enough_are_generated() -> None:
    """Members end at 10, 20, 30 and 40 s and two are wanted: the others are taken back at 20 s, and the group is ready
    with the scores of the first two, not with the longest."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 1},
        rollout__redundant_members=2,
        run__num_rollout=2,
    )
    run = checked(Scripted(config, turn=lambda a: 10.0 * (a.member + 1)).run())
    first = run.of(do.Train)[0][1]
    assert [x.trajectory for x in first.experiences] == [0, 1]
    assert {x.group_ready_t for x in first.experiences} == {21.0}
    given_up = [(t, a.trajectory) for t, a in run.of(do.AbortTurn)][:2]
    assert given_up == [(20.0, 2), (20.0, 3)]
    ends = Counter((a.outcome, a.reason) for _, a in run.of(do.Retire) for _ in a.trajectories)
    assert ends == {("trained", ""): 4, ("aborted", "redundant"): 4}


def test_redundant_members_let_a_member_fail() -> None:
    """A tool that fails costs a redundant member, and the group is whole."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 1}, rollout__redundant_members=1, run__num_rollout=1
    )
    run = Scripted(config, turns=2)
    run.tool_fails = lambda a: a.trajectory == 0
    checked(run.run())
    assert [x.trajectory for x in run.of(do.Train)[0][1].experiences] == [1, 2]


@pytest.mark.parametrize("placement", [{}, COLOCATED], ids=["apart", "colocated"])
def test_partial_rollout_keeps_what_was_generated_and_goes_on_in_the_next_round(placement: dict[str, Any]) -> None:
    """Two groups of one are wanted, four start (ratio 2) and take 10, 20, 50 and 50 s. At 20 s the round is over: the
    rest keeps `KEPT` tokens, waits for the training and goes on under the new version with the same request id."""
    config = scenario(
        **placement,
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 2},
        rollout__admission=PARTIAL,
        run__num_rollout=2,
    )
    run = checked(Scripted(config, turn=lambda a: {0: 10.0, 1: 20.0}.get(a.trajectory, 50.0)).run())
    stopped = [(t, a.trajectory, a.keep) for t, a in run.of(do.AbortTurn)]
    assert stopped[:2] == [(20.0, 2, True), (20.0, 3, True)]
    sent = [(t, a.turn, a.attempt) for t, a in run.of(do.StartTurn) if a.trajectory == 2]
    resumed = next(t for t, _ in run.of(said.EngineResumed))
    assert sent[0] == (0, 0, 0) and sent[1][1:] == (0, 1) and sent[1][0] >= resumed
    second = run.of(do.Train)[1][1].experiences
    assert {x.trajectory for x in second} == {2, 3}, "recycled groups come first"
    assert {x.output_tokens for x in second} == {KEPT + 50}, "the kept tokens are part of the output"
    assert {(x.oldest_version, x.newest_version) for x in second} == {(0, 1)}
    assert not [a for _, a in run.of(do.Retire) if a.outcome == "aborted" and a.reason != "run_ended"], "nobody is lost"


def test_partial_rollout_starts_fewer_new_groups_by_as_many_as_go_on() -> None:
    config = scenario(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 2},
        rollout__admission=PARTIAL,
        run__num_rollout=3,
    )
    run = checked(Scripted(config, turn=lambda a: 10.0 if a.trajectory % 2 else 35.0).run())
    drawn = Counter(t for t, _ in run.of(do.DrawTask))
    assert list(drawn.values()) == [4, 2, 2]


def test_a_tool_that_ends_between_two_rounds_waits_for_the_next() -> None:
    config = scenario(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 1},
        rollout__admission=PARTIAL,
        run__num_rollout=2,
    )
    run = Scripted(config, turns=2, turn=lambda a: 2.0 + 6 * a.trajectory, tool=3.0, train=40.0)
    checked(run.run())
    # trajectory 0 ends at 7 s; the call of 1 would have ended at 8 s
    sent = [t for t, a in run.of(do.StartTurn) if a.trajectory == 1]
    trained = next(t for t, e in run.of(said.TrainStepFinished))
    assert sent[0] == 0 and all(t >= trained for t in sent[1:])


def test_the_longest_group_is_hurried() -> None:
    """One slot. First members (10 s for the even group, 40 s for the odd) run ahead; then the rest of the long group,
    though it came later."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 3, "rollout_batch_size": 2},
        placement={"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1},
        rollout__concurrency={"type": "per_engine", "max_concurrent_per_engine": 1},
        rollout__turn_order={"type": "group_length"},
        run__num_rollout=1,
    )
    run = Scripted(config)
    run._turn = lambda a: 40.0 if a.group else 10.0
    tokens = {0: 10, 1: 40}
    tell = run.tell

    def with_lengths(event: said.Event) -> list[do.Action]:
        if isinstance(event, said.TurnFinished):
            n = tokens[event.trajectory // 3]
            event = msgspec.structs.replace(event, output_tokens=n, spans=((0, 0, n),))
        return tell(event)

    run.tell = with_lengths  # type: ignore[method-assign]
    checked(run.run())
    assert [a.trajectory for _, a in run.of(do.StartTurn)] == [0, 3, 4, 5, 1, 2]
