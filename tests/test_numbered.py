"""Things by number: whatever is put, found and removed, it says what a dictionary says."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from testbed import numbered
from testbed.numbered import Numbered

STEPS = st.lists(st.tuples(st.sampled_from(["set", "pop", "del", "get"]), st.integers(0, 30)), max_size=80)


def removed(mapping: Any, number: int) -> bool:
    try:
        del mapping[number]
    except KeyError:
        return False
    return True


def check(things: Numbered[str], expected: dict[int, str], number: int) -> None:
    assert things.get(number) == expected.get(number)
    assert (number in things) == (number in expected)
    assert len(things) == len(expected) and bool(things) == bool(expected)
    assert list(things) == sorted(expected)
    assert list(things.values()) == [expected[n] for n in sorted(expected)]


@given(STEPS)
def test_it_is_a_dictionary_in_the_order_of_numbers(steps: list[tuple[str, int]]) -> None:
    things, expected = Numbered[str](), {}
    for i, (step, number) in enumerate(steps):
        if step == "set":
            things[number] = expected[number] = f"{number} of step {i}"
        elif step == "pop":
            assert things.pop(number) == expected.pop(number, None)
        elif step == "del":
            assert removed(things, number) == removed(expected, number)
        check(things, expected, number)


def test_memory_follows_what_lives_even_if_one_thing_stays() -> None:
    things, width = Numbered[int](), 100
    for number in range(20 * numbered._SPARE):
        things[number] = number
        if number > width and number != 2 * width:
            del things[number - width]
        assert len(things._places) + len(things._old) <= numbered._SPARE + 5 * (width + 4)
    assert 0 in things and width in things
    assert [*things.values()] == [*things] and len([*things]) == len(things)
