"""The router's approximate picture of which engine has which prefix in its KV cache.

Responsible for one tree over all engines whose nodes are prompt blocks, with a bound in tokens per engine. Refuses to
know load and what engines really cached: a turn's prompt is assumed to be there once the turn was sent, until it is
the least recently used leaf of an engine that is over the bound, or until the engine is said to have dropped its
cache.

A prompt is a path: its block ids; if it has none, its group's prompt as one block. What a trajectory has said since
(the part of a later turn's prompt that no block names) hangs below as one node per turn, reachable by that trajectory
alone. So after turn n the engine it ran on counts as having the whole prompt of turn n, which is a prefix of turn
n+1's.
"""

from __future__ import annotations

from collections import OrderedDict

from testbed.policies.routing.base import RouteRequest

_Key = int | tuple[str, int]
_PROMPT, _SAID = "group", "trajectory"


class _Node:
    """A prefix that ends with this block. Engines that hold a node hold its ancestors (`holders` shrink with depth)."""

    __slots__ = ("children", "end", "first", "holders", "key", "parent")

    def __init__(self, key: _Key, parent: _Node | None, end: int) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[_Key, _Node] = {}
        self.end = end  # tokens of the whole prefix
        self.holders = 0  # bit mask of engines
        self.first = -1  # engine that held it first, of those that hold it without a gap


class PrefixTree:
    """Prefixes held per engine. All operations but `drop` are O(blocks of the prompt), evictions amortised."""

    def __init__(self, num_engines: int, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._root = _Node(0, None, 0)
        # Least recently used first. A path is touched leaf first, so an ancestor is always younger than what hangs
        # below it, and the oldest node of an engine is a leaf of what that engine holds.
        self._held: list[OrderedDict[_Node, None]] = [OrderedDict() for _ in range(num_engines)]
        self._tokens = [0] * num_engines
        self._walked: tuple[RouteRequest, list[_Node]] | None = None
        """The last request and its path, as long as the tree has not changed: `insert` mostly follows `matches`."""

    def tokens(self, engine: int) -> int:
        """Tokens that this engine is assumed to hold."""
        return self._tokens[engine]

    def matches(self, request: RouteRequest, engines: int) -> list[tuple[int, int, int]]:
        """Which engines of the mask hold how much of the prompt: (tokens, mask of the engines that hold them, first
        holder).

        From the shortest to the longest prefix; the masks shrink strictly, an engine's match is the last entry it
        appears in. `first` is the engine that has held that prefix longest, -1 if it does not hold it any more.
        """
        found: list[tuple[int, int, int]] = []
        previous, prompt = 0, request.prompt_tokens
        path = self._walk(request)
        self._walked = (request, path)
        for node in path:
            mask = node.holders & engines
            if not mask:
                break
            end = node.end
            entry = (end if end < prompt else prompt, mask, node.first)
            if mask == previous:
                found[-1] = entry
            else:
                found.append(entry)
                previous = mask
        return found

    def cached_tokens(self, engine: int, request: RouteRequest) -> int:
        """Tokens of this prompt that the engine is assumed to hold."""
        found = self.matches(request, 1 << engine)
        return found[-1][0] if found else 0

    def insert(self, engine: int, request: RouteRequest) -> int:
        """The engine computes this prompt and holds all of it, as its most recently used prefix.

        Returns the tokens of it that the engine held before.
        """
        walked, self._walked = self._walked, None
        path = walked[1] if walked is not None and walked[0] is request else self._walk(request)
        node = path[-1] if path else self._root
        keys, step = self._keys(request)
        prompt, known = request.prompt_tokens, len(path)
        if known < len(keys):
            for index in range(known, len(keys)):
                node = self._child(node, keys[index], max(node.end, min((index + 1) * step, prompt)))
                path.append(node)
        unnamed = prompt - node.end
        # The first turn's cut-off block is not worth a node for each trajectory.
        if unnamed >= (1 if request.turn else max(step, 1)):
            path.append(self._child(node, (_SAID, request.trajectory), prompt))

        held, bit, tokens, cached = self._held[engine], 1 << engine, self._tokens[engine], 0
        for node in reversed(path):
            if node.holders & bit:
                held.move_to_end(node)
                cached = cached or node.end
            else:
                if not node.holders:
                    node.first = engine
                node.holders |= bit
                held[node] = None
                tokens += _size(node)
        self._tokens[engine] = tokens
        while self._tokens[engine] > self._max_tokens:
            oldest, _ = held.popitem(last=False)
            self._release(engine, oldest)
        return cached if cached < prompt else prompt

    def drop(self, engine: int) -> None:
        """The engine holds nothing any more."""
        self._walked = None
        for node in self._held[engine]:
            self._release(engine, node)
        self._held[engine].clear()

    def _keys(self, request: RouteRequest) -> tuple[tuple[_Key, ...], int]:
        """Named part of the path, and tokens of one block."""
        if request.blocks and request.block_tokens > 0:
            return request.blocks, request.block_tokens
        group = (_PROMPT, request.group)
        if request.turn and group not in self._root.children:
            return (), 0  # how much of a later turn's prompt the group shares is not known any more
        return (group,), request.prompt_tokens

    def _walk(self, request: RouteRequest) -> list[_Node]:
        """Nodes of this prompt's path that exist, from the root's child on."""
        node = self._root
        path: list[_Node] = []
        for key in self._keys(request)[0]:
            child = node.children.get(key)
            if child is None:
                return path
            path.append(child)
            node = child
        if node.end < request.prompt_tokens:
            said = (_SAID, request.trajectory)
            while (child := node.children.get(said)) is not None:
                path.append(child)
                node = child
        return path

    def _child(self, parent: _Node, key: _Key, end: int) -> _Node:
        node = _Node(key, parent, end)
        parent.children[key] = node
        return node

    def _release(self, engine: int, node: _Node) -> None:
        """Forget that the engine holds this node, and the node if nobody does. Called leaf first."""
        node.holders &= ~(1 << engine)
        self._tokens[engine] -= _size(node)
        if node.first == engine:
            node.first = -1
        if not node.holders and node.parent is not None:
            del node.parent.children[node.key]


def _size(node: _Node) -> int:
    """Tokens of the block alone."""
    return node.end - node.parent.end if node.parent is not None else 0
