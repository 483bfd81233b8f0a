"""AP-09: the space-time rule itself, on programs made by hand. Expectations are worked out in the comments."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.policies.programs import Program, SpaceTime
from testbed.scenario.programs import ThunderAgent


def program(id: int, tokens: int, state: str = "reasoning", since: float = 0.0, group: int = -1) -> Program:
    p = Program(id, id if group < 0 else group, 10, id)
    p.tokens, p.state, p.acting_since, p.place = tokens, state, since, 0
    return p


def rule(**options: Any) -> SpaceTime:
    return SpaceTime(ThunderAgent(**options))


FOUR = [
    program(0, 400),
    program(1, 100),
    program(2, 800, "acting", since=0.0),
    program(3, 200, "acting", since=8.0),
]
"""At t = 10 with a half life of 2 s: 400 + 100 + 800/2^5 + 200/2 = 625."""


def test_ap_09_contexts_of_acting_programs_decay_by_half_every_half_life() -> None:
    assert rule(acting_half_life_s=2.0).used(FOUR, 10.0, True) == 400 + 100 + 25 + 100
    assert rule(acting_half_life_s=None).used(FOUR, 10.0, True) == 1500
    assert rule(acting_half_life_s=2.0, acting_token_weight=0.5).used(FOUR, 10.0, True) == 400 + 100 + 12.5 + 50
    assert rule(acting_half_life_s=2.0, reserve_tokens=100).used(FOUR, 10.0, True) == 625 + 400


@pytest.mark.parametrize(
    "capacity, paused",
    [
        (625, []),  # it fits exactly
        (624, [3]),  # acting first, of these the shortest
        (500, [3, 2]),  # 625 - 100 = 525 is still too much, 500 is not
        (499, [3, 2, 1]),  # then the shortest that reasons
        (10, [3, 2, 1]),  # the last one stays: nothing else would use the room
    ],
)
def test_ap_09_acting_pause_first_and_the_shortest_first(capacity: int, paused: list[int]) -> None:
    assert [p.id for p in rule(acting_half_life_s=2.0).to_pause(FOUR, capacity, 10.0)] == paused


def test_ap_09_pausing_goes_down_to_the_lower_threshold_once_above_the_upper_one() -> None:
    r = rule(acting_half_life_s=None, pause_above=0.9, pause_to=0.5)
    assert r.to_pause(FOUR, 1700, 10.0) == []  # 1500 <= 1530
    assert [p.id for p in r.to_pause(FOUR, 1600, 10.0)] == [3, 2]  # 1500 > 1440, down to 800


def test_ap_09_without_decay_at_pausing_the_whole_context_counts() -> None:
    """`decay: restore`: 1500 > 700, so 3 and 2 go until 500 <= 700; with decay nothing would."""
    assert [p.id for p in rule(acting_half_life_s=2.0, decay="restore").to_pause(FOUR, 700, 10.0)] == [3, 2]
    assert rule(acting_half_life_s=2.0).to_pause(FOUR, 700, 10.0) == []


def test_what_is_marked_counts_as_gone() -> None:
    programs = [program(0, 400, "marked"), program(1, 300)]
    assert rule().to_pause(programs, 350, 0.0) == []


def test_ap_09_those_that_want_a_call_are_restored_first_and_the_shortest_of_them() -> None:
    waiting = [
        program(0, 50, "paused_acting"),
        program(1, 900, "paused"),
        program(2, 300, "paused"),
        program(3, 200, "new"),
    ]
    assert [p.id for p in rule().line(waiting)] == [3, 2, 1, 0]
    assert [p.id for p in rule(restore_order="best_fit").line(waiting)] == [1, 2, 3, 0]


def test_ap_09_a_restored_program_goes_to_any_engine_with_room() -> None:
    p = program(0, 300, "paused")
    assert rule().room_for(p, [350.0, 900.0, 200.0], 0.0) == 1, "most room"
    assert rule(restore_order="best_fit").room_for(p, [350.0, 900.0, 200.0], 0.0) == 0, "tightest room"
    assert rule().room_for(p, [299.0, 0.0], 0.0) == -1


def test_a_shared_prompt_counts_once() -> None:
    members = [program(i, 100, group=7) for i in range(3)]
    assert rule(count_shared_prompts_once=True).used(members, 0.0, True) == 300 - 2 * 10


def test_ap_09_shortest_first_computes_less_again() -> None:
    """What is paused is computed again at a cost that grows as c^2, and only the sum must fit: of four programs (100,
    200, 300, 600) with 600 tokens too much, the shortest three cost 100^2 + 200^2 + 300^2 = 140,000, the longest alone
    360,000."""
    programs = [program(0, 100), program(1, 200), program(2, 300), program(3, 600)]
    gone = rule().to_pause(programs, 600, 0.0)
    assert sum(p.tokens for p in gone) == 600 and sum(p.tokens**2 for p in gone) == 140_000


def test_forced_restore_is_for_what_was_paused_and_not_for_what_is_new() -> None:
    r = rule(forced_restore_s=1800)
    paused, new = program(0, 100, "paused"), program(1, 100, "new")
    assert r.overdue(paused, 1800.0) and not r.overdue(paused, 1799.0) and not r.overdue(new, 1e9)
