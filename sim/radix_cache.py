"""The prefix cache of one engine: SGLang's page-granular radix tree over KV slots, with locks and least-recently-used
leaves.

It owns which token sequences have KV, who holds them, how many slots are free, and what goes first when slots run
short. It refuses to know requests, batches and time: recency is a counter.

Content is not stored as tokens. A token sequence is a tuple of runs `(content, start, length)`: tokens
start..start+length-1 of the content with that id. Equal runs are equal tokens, so every operation costs O(nodes and
runs touched), never O(tokens).

Rules (SGLang 0.5.23, `mem_cache/unified_radix_cache.py`): a partly covered node is split at a page boundary and its
suffix counts as fresh; a match stamps its path with the deepest node newest; an insertion stamps each node on the way
down; locks hold a whole path; eviction takes whole unlocked leaves, oldest first, and stops as soon as enough slots are
free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from heapq import heappop, heappush
from typing import Any

Run = tuple[int, int, int]
Runs = tuple[Run, ...]

_NEVER = 1 << 62


def normalised(runs: Runs) -> Runs:
    """The same tokens in the fewest runs: adjacent pieces of one content are joined, empty ones dropped."""
    content = end = None
    for c, s, n in runs:
        if not n or (s == end and c == content):
            break
        content, end = c, s + n
    else:
        return runs
    out: list[Run] = []
    for c, s, n in runs:
        if not n:
            continue
        if out and out[-1][0] == c and out[-1][1] + out[-1][2] == s:
            out[-1] = (c, out[-1][1], out[-1][2] + n)
        else:
            out.append((c, s, n))
    return tuple(out)


def cut(runs: Runs, lo: int, hi: int) -> Runs:
    """Tokens lo..hi-1 of a sequence, as runs. `hi` may not exceed its length. O(runs)."""
    if len(runs) == 1:
        c, s, _ = runs[0]
        return ((c, s + lo, hi - lo),)
    out: list[Run] = []
    at = 0
    for run in runs:
        n = run[2]
        end = at + n
        if end > lo:
            a, b = (lo if lo > at else at), (hi if hi < end else end)
            out.append(run if b - a == n else (run[0], run[1] + a - at, b - a))
        if end >= hi:
            break
        at = end
    return tuple(out)


class Node:
    """A stretch of cached tokens. `end`: tokens from the root to its end. `t`: last access, larger is newer; of nodes
    stamped at once, which lie on one path, the deeper is newer.

    `version`: oldest weight version among the KV of the path from the root to here. `queued_t`: `t` when it was queued
    to be evicted; -1: it is not.
    """

    __slots__ = ("ckey", "end", "key", "kids", "lock", "parent", "queued_t", "size", "t", "version")

    def __init__(self, parent: Node | None, key: Runs, ckey: Any, size: int, t: int, lock: int, version: int) -> None:
        self.parent = parent
        self.key = key
        self.ckey = ckey
        self.size = size
        self.t = t
        self.lock = lock
        self.version = version
        self.end: int = size if parent is None else parent.end + size
        self.kids: dict[Any, Node] | None = None
        self.queued_t = -1


class RadixCache:
    """`free`: slots that hold nothing; `evictable`: slots of unlocked nodes. Both in tokens, multiples of `page`.

    `log`, if a list, receives `(wanted, got, tag)` of every eviction walk.
    """

    __slots__ = ("_fresh", "_others", "clock", "emptied", "evictable", "free", "log", "page", "roots", "tag")

    def __init__(self, page: int, slots: int) -> None:
        self.page = page
        self.log: list[tuple[int, int, int]] | None = None
        self.tag = 0
        self.clock = 0
        self.reset(slots)

    def reset(self, slots: int) -> None:
        """Forget everything; `slots` are free."""
        self.free = slots
        self.evictable = 0
        # Nodes to evict by (queued_t, end), least recently used first: those that were queued in this order (nearly
        # all), and a heap of the others, as (queued_t, end, node). One entry a node, checked when it comes up.
        self._fresh: deque[Node] = deque()
        self._others: list[tuple[int, int, Node]] = []
        self.emptied = False
        """Whether a namespace may have become empty since they were last forgotten."""
        self.roots: dict[Any, Node] = {}

    def root(self, namespace: Any) -> Node:
        """Requests of different namespaces (`extra_key`) never share; they compete for the same slots."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, (), None, 0, 0, 0, _NEVER)
            self.emptied = True
        return root

    def forget_namespaces(self, in_use: Set[Any]) -> None:
        """Drop empty namespaces that no open request belongs to. With versions as namespaces they would pile up."""
        empty = [name for name, root in self.roots.items() if not root.kids and name not in in_use]
        for name in empty:
            del self.roots[name]
        self.emptied = not all([root.kids for root in self.roots.values()])

    # --- walking ------------------------------------------------------------------------------------------------------

    def _first_page(self, runs: Runs, ri: int, ro: int) -> Runs:
        """Key of a child: the page of tokens at run `ri`, offset `ro`."""
        need = self.page
        c, s, n = runs[ri]
        if n - ro >= need:
            return ((c, s + ro, need),)
        out = [(c, s + ro, n - ro)]
        need -= n - ro
        while need:
            ri += 1
            c, s, n = runs[ri]
            if n > need:
                n = need
            out.append((c, s, n))
            need -= n
        return tuple(out)

    def _key_of(self, runs: Runs) -> Any:
        """Key among its parent's children of a node with these tokens. Of single tokens: the content where it begins,
        which is nearly always so."""
        if self.page > 1:
            return self._first_page(runs, 0, 0)
        c, s, _ = runs[0]
        return (c, s) if s else c

    def _descend(self, node: Node, runs: Runs, length: int, stamp: bool) -> tuple[Node, int]:
        """Follow `runs` (at most `length` tokens, a multiple of the page) down from `node`; split a partly covered
        node.

        Returns the node reached and the tokens covered.
        """
        page, i, ri, ro = self.page, 0, 0, 0
        nruns = len(runs)
        while i < length:
            kids = node.kids
            if not kids:
                break
            c, s, n = runs[ri]
            if page > 1:
                kid = kids.get(self._first_page(runs, ri, ro))
            else:
                kid = kids.get((c, s + ro) if s + ro else c)
            if kid is None:
                break
            if stamp:
                self.clock = kid.t = self.clock + 1
            size = kid.size
            key = kid.key
            if ro + size <= n and len(key) == 1 and i + size <= length:
                node = kid  # within one run of both: their first tokens are equal, so all are
                i += size
                ro += size
                if ro == n:
                    ri += 1
                    ro = 0
                continue
            m = 0
            for kc, ks, kn in key:
                c, s, n = runs[ri]
                if c != kc or s + ro != ks:
                    break
                n -= ro
                if kn < n:
                    m += kn
                    ro += kn
                else:
                    m += n
                    ri += 1
                    ro = 0
                    if kn > n or ri == nruns:
                        break
            if m == size and i + m <= length:
                node = kid
                i += m
                continue
            if m > length - i:
                m = length - i
            if page > 1:
                m -= m % page
            return self._split(kid, m), i + m
        return node, i

    def _split(self, kid: Node, at: int) -> Node:
        """Cut a node after `at` tokens. The node stays the suffix, which counts as fresh; the new upper part is
        returned."""
        parent = kid.parent
        clock = self.clock = self.clock + 2
        upper = Node(parent, cut(kid.key, 0, at), kid.ckey, at, clock - 1, kid.lock, kid.version)
        parent.kids[kid.ckey] = upper  # type: ignore[union-attr, index]
        kid.key = cut(kid.key, at, kid.size)
        kid.size -= at
        kid.parent = upper
        kid.t = clock
        kid.ckey = self._key_of(kid.key)
        upper.kids = {kid.ckey: kid}
        return upper

    # --- matching and locks -------------------------------------------------------------------------------------------

    def match(self, root: Node, runs: Runs, length: int) -> tuple[Node, int]:
        """Longest cached prefix of the first `length` tokens: (its last node, its length). Stamps its path."""
        page = self.page
        node, got = self._descend(root, runs, length if page == 1 else length // page * page, False)
        self.touch(node)
        return node, got

    def longest(self, namespace: Any, runs: Runs, length: int) -> tuple[Node, int]:
        """As `match`, in whatever memory the KV is."""
        return self.match(self.root(namespace), runs, length)

    def touch(self, node: Node) -> None:
        """Stamp a path, the deepest node newest."""
        self.clock = t = self.clock + 1
        while (parent := node.parent) is not None:
            node.t = t
            node = parent

    def pin(self, node: Node) -> None:
        """Lock the path to `node`."""
        while (parent := node.parent) is not None:
            if not node.lock:
                self.evictable -= node.size
            node.lock += 1
            node = parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        if node.lock == 1 and not node.kids and node.queued_t < 0:
            self._queue(node)
        while (parent := node.parent) is not None:
            node.lock -= 1
            if not node.lock:
                self.evictable += node.size
            node = parent

    # --- publishing ---------------------------------------------------------------------------------------------------

    def extend(self, node: Node, runs: Runs, length: int, version: int, lock: bool) -> tuple[Node, int]:
        """Publish `length` tokens (a multiple of the page) below `node`, whose path is stamped by the caller.

        Returns the last node and how many of the tokens were there already. With `lock`, the nodes below `node` are
        locked. Slots change hands by the caller's arithmetic; a new unlocked leaf is counted evictable.
        """
        top = node
        have = 0
        key = runs if len(runs) == 1 and runs[0][2] == length else cut(runs, 0, length)
        ckey = self._key_of(key)
        kids = node.kids
        if kids and ckey in kids:
            node, have = self._descend(node, key, length, True)
            if have < length:
                key = cut(key, have, length)
                ckey = self._key_of(key)
                kids = node.kids
        last = node
        if have < length:
            self.clock = clock = self.clock + 1
            if version > node.version:
                version = node.version
            last = Node(node, key, ckey, length - have, clock, 1 if lock else 0, version)
            if kids is None:
                node.kids = {ckey: last}
            else:
                kids[ckey] = last
            if not lock:
                self.evictable += length - have
                last.queued_t = clock
                self._fresh.append(last)  # no stamp is newer
        if lock:
            while node is not top:
                if not node.lock:
                    self.evictable -= node.size
                node.lock += 1
                node = node.parent  # type: ignore[assignment]
        return last, have

    def separate(self, node: Node, at: int, runs: Runs) -> None:
        """Make `at` a node boundary on the path to `node` (whose tokens begin with `runs`) and stamp the path up to
        it."""
        while node.end > at:
            node = node.parent  # type: ignore[assignment]
        self.touch(node)
        if node.end < at:
            self._descend(node, cut(runs, node.end, at), at - node.end, True)

    # --- eviction -----------------------------------------------------------------------------------------------------

    def _queue(self, node: Node) -> None:
        """Where it comes by its stamp."""
        t, fresh = node.t, self._fresh
        node.queued_t = t
        if not fresh or fresh[-1].queued_t < t:
            fresh.append(node)
        else:
            heappush(self._others, (t, node.end, node))

    def evict(self, target: int) -> None:
        """Drop whole unlocked leaves, least recently used first, until `target` slots are free or no such leaf is left.

        Stamps only grow, so the stamp of an entry is a lower bound of its node's.
        """
        fresh, others = self._fresh, self._others
        before = self.free
        while self.free < target:
            if fresh and (not others or (fresh[0].queued_t, fresh[0].end) < (others[0][0], others[0][1])):
                node = fresh.popleft()
            elif others:
                node = heappop(others)[2]
            else:
                break
            if node.lock or node.kids:
                node.queued_t = -1
                continue
            if node.t != node.queued_t:
                self._queue(node)
                continue
            node.queued_t = -1
            node.lock = -1
            size = node.size
            self.free += size
            self.evictable -= size
            parent: Node = node.parent  # type: ignore[assignment]
            kids = parent.kids
            del kids[node.ckey]  # type: ignore[union-attr]
            if not kids:
                if parent.parent is None:
                    self.emptied = True
                elif not parent.lock and parent.queued_t < 0:
                    self._queue(parent)
        if self.log is not None:
            self.log.append((target - before, self.free - before, self.tag))
