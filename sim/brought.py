"""KV that a request does not compute, though this engine's GPU does not have it: it comes from the engine's host
memory, or was brought from another engine.

It enters the tree at admission, as if it had been published there, in slots that eviction frees; from then on it is a
prefix like any other. It refuses to know where it came from and how long that took.
"""

from __future__ import annotations

from sim.engine_request import Request
from sim.engine_state import State
from sim.radix_cache import Node
from sim.tiered_cache import TieredCache

LOAD_BACK_THRESHOLD = 10
"""Tokens beyond the GPU's match from which SGLang's HiCache loads from the host."""


def take_in(s: State, r: Request, node: Node, hit: int, cap: int, other: float) -> tuple[Node, int]:
    """The longest prefix of `r` after its brought KV has been put below `node`, where the tree's match of `hit` tokens
    ends; the same if there is none, or if `r` would not be admitted anyhow.

    `cap`: most tokens that may be reused. `other`: slots that must stay free besides those of its tokens.
    """
    cache, upto, version = s.cache, hit, 0
    if r.brought is not None:
        upto, version = r.brought
        if upto > cap:
            upto = cap
        upto -= upto % s.page
    loaded = 0
    if isinstance(cache, TieredCache):
        there, held = cache.host.match(cache.host.root(r.namespace), r.tokens() if r.out else r.content, cap)
        if held >= max(upto, hit + LOAD_BACK_THRESHOLD):
            loaded, upto, version = held - hit, held, there.version
    new = upto - hit
    if new <= 0:
        return node, hit
    cache.pin(node)
    fits = r.prompt_tokens + r.out - hit + other < cache.free + cache.evictable
    if fits and cache.free < new:
        cache.evict(new)
    if fits:
        inner, have = cache.extend(node, r.tail(hit, upto), new, version, False)
        cache.free -= new - have  # an engine that looks for nothing (`disable_radix_cache`) may have it still
        s.loaded_tokens += loaded
    else:
        inner, upto = node, hit
    cache.unpin(node)
    cache.touch(inner)
    return inner, upto
