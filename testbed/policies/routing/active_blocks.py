"""Blocks that the turns in an engine use, shared prefixes counted once: the decode load of Dynamo's router.

Refuses to know caches: a block is here while a turn uses it, and gone with the last one.
"""

from __future__ import annotations

from testbed.policies.routing.base import RouteRequest


class ActiveNode:
    """A block of prompts in engines. `users[e]`: turns in engine e that go through it."""

    __slots__ = ("blocks", "children", "key", "mask", "parent", "users")

    def __init__(self, key: object, parent: ActiveNode | None, blocks: int) -> None:
        self.key = key
        self.parent = parent
        self.blocks = blocks
        self.children: dict[object, ActiveNode] = {}
        self.users: dict[int, int] = {}
        self.mask = 0


class ActiveBlocks:
    """A prompt is its prefix blocks, and what no block names as a piece of its trajectory's own. O(blocks of it)."""

    def __init__(self, num_engines: int, block_size: int) -> None:
        self.count = [0] * num_engines
        """Blocks of `block_size` tokens in use, per engine."""
        self._size = block_size
        self._root = ActiveNode(None, None, 0)

    def blocks_of(self, request: RouteRequest) -> int:
        """Blocks of a prompt; each piece is rounded up to whole ones."""
        return sum(-(-tokens // self._size) for _, tokens in self._pieces(request))

    def shared(self, request: RouteRequest, engines: int) -> list[tuple[int, int]]:
        """(blocks, mask of the engines that use them), from the shortest prefix on; masks shrink strictly."""
        found: list[tuple[int, int]] = []
        node, blocks = self._root, 0
        for key, _ in self._pieces(request):
            child = node.children.get(key)
            if child is None or not (mask := child.mask & engines):
                break
            blocks += child.blocks
            if found and found[-1][1] == mask:
                found.pop()
            found.append((blocks, mask))
            node = child
        return found

    def add(self, engine: int, request: RouteRequest) -> ActiveNode:
        """The engine works on this prompt; returns what `remove` takes."""
        node, bit = self._root, 1 << engine
        for key, tokens in self._pieces(request):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = ActiveNode(key, node, -(-tokens // self._size))
            users = child.users.get(engine, 0)
            child.users[engine] = users + 1
            if not users:
                child.mask |= bit
                self.count[engine] += child.blocks
            node = child
        return node

    def remove(self, engine: int, node: ActiveNode) -> None:
        """The turn that `add` returned this for is over."""
        while (parent := node.parent) is not None:
            node.users[engine] -= 1
            if not node.users[engine]:
                del node.users[engine]
                node.mask ^= 1 << engine
                self.count[engine] -= node.blocks
                if not node.users:
                    del parent.children[node.key]
            node = parent

    @staticmethod
    def _pieces(request: RouteRequest) -> list[tuple[object, int]]:
        """(key, tokens) of the prompt's pieces."""
        prompt, step = request.prompt_tokens, request.block_tokens
        if not request.blocks or step <= 0:
            return [((request.group, request.turn and request.trajectory + 1), prompt)]
        pieces: list[tuple[object, int]] = []
        left = prompt
        for block in request.blocks:
            if left <= 0:
                break
            pieces.append((block, min(step, left)))
            left -= step
        if left > 0:
            pieces.append((("trajectory", request.trajectory), left))
        return pieces
