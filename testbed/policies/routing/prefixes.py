"""Base of routers that keep their own account of which prefixes an engine holds.

The account is of what was sent, not of what is cached: a prompt counts from the moment it was sent, and until it is the
least recently used one of an engine that is over the bound. Nobody tells a router what an engine evicted. That an
engine was emptied it hears if `told_of_flushes`. Refuses to know any rule for choosing.
"""

from __future__ import annotations

from testbed.policies.routing.base import LoadTracking
from testbed.policies.routing.order import EngineOrder
from testbed.policies.routing.prefix_tree import PrefixTree


class PrefixTracking(LoadTracking):
    """`max_tokens`: what one engine is taken to hold at most."""

    def __init__(self, num_engines: int, max_tokens: int, told_of_flushes: bool) -> None:
        super().__init__(num_engines)
        self.tree = PrefixTree(num_engines, max_tokens)
        self._told = told_of_flushes

    def cache_dropped(self, engine: int) -> None:
        if self._told:
            self.tree.drop(engine)

    def lost(self, engine: int) -> None:
        self.tree.drop(engine)


class OrderedPrefixTracking(PrefixTracking):
    """Base of those whose engines are in an order besides: one that opens again is looked at again."""

    def __init__(self, num_engines: int, max_tokens: int, told_of_flushes: bool) -> None:
        super().__init__(num_engines, max_tokens, told_of_flushes)
        self._order = EngineOrder(num_engines)

    def open(self, engine: int) -> None:
        super().open(engine)
        self._order.opened(engine)
