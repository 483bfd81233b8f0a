"""Cached tokens of every turn as the project's radix tree has them, from what a run did and when. The engines' own
answers (`cached_tokens`) are not read.

A turn finds what was in its engine's tree when the engine began with it: prompts whose first token was there by then,
and whole turns that had ended, but for their last token, which was never an input. Nothing is evicted: for runs that
fit the engines' KV and force lengths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from sim.radix_cache import RadixCache, Runs
from testbed.core import events as said

Turn = tuple[said.TurnFinished, Sequence[int]]
"""A turn's end, and the token ids of its prompt and output."""

Predicted = Mapping[tuple[int, int], int]
"""(trajectory, turn) -> cached tokens."""


def version_of(e: said.TurnFinished) -> int:
    """Of the weights that a turn began with: what its KV may be shared under, unless old KV is kept."""
    return e.spans[0][0]


def predicted(
    turns: Sequence[Turn],
    *,
    namespace: Callable[[said.TurnFinished], Hashable] = version_of,
    one_cache: bool = False,
) -> Predicted:
    """`one_cache`: as if all engines shared theirs. Turns share KV within a namespace alone."""
    caches: dict[int, RadixCache] = {}
    found: dict[tuple[int, int], int] = {}

    def cache_of(e: said.TurnFinished) -> RadixCache:
        return caches.setdefault(0 if one_cache else e.engine, RadixCache(page=1, slots=0))

    def look(e: said.TurnFinished, ids: Sequence[int]) -> None:
        cache, n = cache_of(e), len(ids) - 1  # one token must be computed
        found[e.trajectory, e.turn] = cache.match(cache.root(namespace(e)), _runs(ids), n)[1]

    def keep(e: said.TurnFinished, ids: Sequence[int]) -> None:
        cache = cache_of(e)
        node, have = cache.match(cache.root(namespace(e)), _runs(ids), len(ids))
        if have < len(ids):
            cache.extend(node, _runs(ids[have:]), len(ids) - have, 0, False)

    steps: list[tuple[float, int, Any]] = []
    for e, ids in turns:
        prompt, inputs = ids[: e.prompt_tokens], ids[: e.prompt_tokens + e.output_tokens - 1]
        steps += [
            (e.started_t, 0, (look, e, prompt)),
            (e.first_token_t, 1, (keep, e, prompt)),
            (e.t, 2, (keep, e, inputs)),
        ]
    for _, _, (act, e, ids) in sorted(steps, key=lambda step: step[:2]):
        act(e, ids)
    return found


def right(turns: Sequence[Turn], model: Predicted) -> float:
    """Share of turns whose engine found as many tokens as the model says."""
    return sum(model[e.trajectory, e.turn] == e.cached_tokens for e, _ in turns) / len(turns)


def _runs(ids: Sequence[int]) -> Runs:
    """Every token is the first one of a content of its own."""
    return tuple((token, 0, 1) for token in ids)
