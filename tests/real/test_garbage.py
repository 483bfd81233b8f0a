"""What is there when a deployment is up is no longer looked at by the garbage collector, and garbage is not kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from real.garbage import settle


class Thing:
    other: Thing


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def pair() -> Thing:
    one, other = Thing(), Thing()
    one.other, other.other = other, one
    return one


@pytest.mark.usefixtures("thawed")
def test_garbage_goes_before_what_stays_is_set_apart() -> None:
    gone, stays = weakref.ref(pair()), pair()
    settle()
    assert gone() is None
    frozen = gc.get_freeze_count()
    assert frozen > 10_000 and len(gc.get_objects()) < frozen / 10, "little is left to look at"
    later = weakref.ref(pair())
    gc.collect()
    assert later() is None, "new garbage is collected as before"
    assert gc.get_freeze_count() <= frozen and stays.other.other is stays
