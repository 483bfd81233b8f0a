"""The prefix tree on runs against a tree on tokens, and its arithmetic."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.radix_cache import RadixCache, cut, normalised
from tests.support import reference_scheduler as reference

RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 9)), max_size=6).map(tuple)


def tokens(runs) -> list[tuple[int, int]]:
    return [(c, s + i) for c, s, n in runs for i in range(n)]


@given(RUNS)
def test_normalised_runs_are_the_same_tokens_in_the_fewest_runs(runs) -> None:
    short = normalised(runs)
    assert tokens(short) == tokens(runs)
    assert all(n for _, _, n in short)
    assert not any(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in pairwise(short))


@given(RUNS, st.data())
def test_cut_takes_the_tokens_between(runs, data) -> None:
    runs = normalised(runs)
    total = len(tokens(runs))
    lo = data.draw(st.integers(0, total))
    hi = data.draw(st.integers(lo, total))
    if lo < hi:
        assert tokens(cut(runs, lo, hi)) == tokens(runs)[lo:hi]


class Slots:
    """What the reference tree calls an engine: a counter of free slots."""

    avail = 0


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.lists(st.tuples(st.sampled_from("mipe"), RUNS, st.integers(0, 40)), max_size=25))
def test_equals_a_tree_of_tokens(page: int, operations) -> None:
    """Match, insert, lock and evict in any order: same hits, same sizes, same victims in the same order."""
    tree, cache, slots = reference.Tree(page), RadixCache(page, 0), Slots()
    slots.avail = 0
    locks = []
    for what, runs, number in operations:
        runs = normalised(runs)
        ids = tuple(tokens(runs))
        n = len(ids) // page * page
        root = cache.root(0)
        if what == "m":
            want, _ = tree.match(ids)
            _, got = cache.match(root, runs, len(ids))
            assert got == want
        elif what == "i":
            have, _ = tree.insert(ids)
            if n:
                cache.touch(root)
                assert cache.extend(root, runs, n, 0, False)[1] == have
        elif what == "p":
            _, node = tree.match(ids)
            mine, _ = cache.match(root, runs, len(ids))
            tree.pin(node, 1)
            cache.pin(mine)
            locks.append((node, mine))
            if number % 2:
                node, mine = locks.pop(number % len(locks))
                tree.pin(node, -1)
                cache.unpin(mine)
        else:
            tree.evict(slots, slots.avail + number)
            cache.evict(cache.free + number)
        assert cache.evictable == tree.evictable
        assert cache.free == slots.avail


def test_a_namespace_shares_nothing_but_the_slots() -> None:
    cache = RadixCache(1, 0)
    cache.extend(cache.root("a"), ((1, 0, 10),), 10, 0, False)
    assert cache.match(cache.root("b"), ((1, 0, 10),), 10)[1] == 0
    assert cache.match(cache.root("a"), ((1, 0, 10),), 9)[1] == 9
    cache.evict(1)
    assert cache.free == 9 or cache.free == 1  # a match of 9 has split the node; the older part goes whole


def test_whole_leaves_go_and_the_oldest_first() -> None:
    cache = RadixCache(1, 0)
    for content in (1, 2, 3):
        cache.extend(cache.root(0), ((content, 0, 100),), 100, 0, False)
    cache.match(cache.root(0), ((1, 0, 100),), 100)
    cache.evict(1)
    assert cache.free == 100
    assert [cache.match(cache.root(0), ((c, 0, 100),), 100)[1] for c in (1, 2, 3)] == [100, 0, 100]


def test_a_locked_path_is_never_evicted_and_a_parent_follows_its_last_child() -> None:
    cache = RadixCache(1, 0)
    root = cache.root(0)
    trunk, _ = cache.extend(root, ((1, 0, 50),), 50, 0, False)
    leaf, _ = cache.extend(trunk, ((2, 0, 30),), 30, 0, False)
    cache.pin(leaf)
    assert cache.evictable == 0
    cache.evict(10)
    assert cache.free == 0
    cache.unpin(leaf)
    assert cache.evictable == 80
    cache.evict(31)
    assert (cache.free, cache.evictable, root.kids) == (80, 0, {})


def test_versions_are_the_oldest_on_the_path() -> None:
    cache = RadixCache(1, 0)
    old, _ = cache.extend(cache.root(0), ((1, 0, 50),), 50, 3, False)
    new, _ = cache.extend(old, ((2, 0, 30),), 30, 7, False)
    other, _ = cache.extend(cache.root(0), ((5, 0, 30),), 30, 7, False)
    assert (old.version, new.version, other.version) == (3, 3, 7)


def test_work_does_not_depend_on_the_number_of_tokens() -> None:
    """A prompt of 10^12 tokens is one run: two nodes after a split, whatever the length."""
    cache = RadixCache(1, 0)
    n = 10**12
    cache.extend(cache.root(0), ((1, 0, n),), n, 0, False)
    node, got = cache.match(cache.root(0), ((1, 0, n),), n - 1)
    assert got == n - 1
    assert node.kids is not None
    assert [kid.size for kid in node.kids.values()] == [1]


def test_rk_08_versions_as_namespaces_do_not_pile_up() -> None:
    """An empty namespace that nobody uses is forgotten; one with KV, or with an open request, is not."""
    cache = RadixCache(1, 100)
    for version in range(50):
        cache.root(version)
    kept, _ = cache.extend(cache.root(49), ((1, 0, 30),), 30, 49, False)
    cache.free -= 30
    cache.forget_namespaces({48})
    assert sorted(cache.roots) == [48, 49]
    assert cache.match(cache.root(49), ((1, 0, 30),), 30) == (kept, 30)
    cache.evict(100)
    cache.forget_namespaces(set())
    assert cache.roots == {}
