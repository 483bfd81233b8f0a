"""Which turn goes first: Seer's order, on trajectories made by hand, and that it loses nobody."""

from __future__ import annotations

import random

import pytest

from testbed.core.records import Group, Trajectory
from testbed.policies.turn_order import ByGroupLength


def members(group: int, n: int = 3) -> list[Trajectory]:
    g = Group(group, 0.0, "test")
    return [Trajectory(10 * group + i, g, i, 0.0, 0) for i in range(n)]


def order(q: ByGroupLength) -> list[int]:
    return [q.popleft().id for _ in range(len(q))]


def test_first_members_run_ahead_and_then_the_group_that_is_expected_to_be_longest() -> None:
    """Groups 1 and 2 have a finished member of 500 and 90 tokens; of group 3 nothing is known: as long as the cap."""
    q = ByGroupLength(1000)
    one, two, three = members(1), members(2), members(3)
    for t in (*two[1:], *one[1:], *three):
        q.append(t)
    one[0].group.longest, two[0].group.longest = 500, 90
    q.learned(one[0].group)
    q.learned(two[0].group)
    assert q[0] is three[0] and order(q) == [30, 31, 32, 11, 12, 21, 22]


def test_what_was_lost_goes_before_everything() -> None:
    q = ByGroupLength(1000)
    one, two = members(1), members(2)
    for t in (*one, two[0]):
        q.append(t)
    q.appendleft(two[2])
    assert order(q) == [22, 10, 20, 11, 12]


def test_nobody_is_lost_or_served_twice() -> None:
    """Against a list: any mix of arrivals, losses, removals and news."""
    r = random.Random(0)
    groups = [members(g, 4) for g in range(6)]
    for _ in range(300):
        q, inside = ByGroupLength(100), set[int]()
        outside = [t for g in groups for t in g]
        r.shuffle(outside)
        for t in outside:
            t.group.longest = 0
        waiting: list[Trajectory] = []
        for _ in range(60):
            move = r.random()
            if move < 0.5 and outside:
                t = outside.pop()
                (q.append if r.random() < 0.8 else q.appendleft)(t)
                waiting.append(t)
                inside.add(t.id)
            elif move < 0.7 and waiting:
                assert q[0].id in inside
                t = q.popleft()
                waiting.remove(t)
                inside.remove(t.id)
                outside.append(t)
            elif move < 0.8 and waiting:
                t = r.choice(waiting)
                q.remove(t)
                waiting.remove(t)
                inside.remove(t.id)
                outside.append(t)
            else:
                group = r.choice(groups)[0].group
                group.longest = max(group.longest, r.randint(1, 200))
                q.learned(group)
            assert len(q) == len(inside) and {t.id for t in q} == inside
        assert set(order(q)) == inside
        with pytest.raises(IndexError):
            q.popleft()
