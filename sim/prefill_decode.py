"""One turn on two engines: the request that only prefills, the one that goes on, and what both said as one.

The prefill engine computes the prompt and makes the first token. The decode engine gets the prompt with its KV
(`Request.brought`) and the first token behind it, whose KV it computes as it makes the second one: in a prefill batch
of one token, where a real decode engine makes it a decode step. It refuses to know engines, links and the core.
"""

from __future__ import annotations

from msgspec import Struct, structs

from sim.engine_notices import Aborted, Finished, Span
from sim.engine_request import FOREVER, Request


class Prefilled(Struct, frozen=True, gc=False):
    """A computed prompt that waits for a decode engine, or is decoded."""

    request: Request
    """The whole turn, as if one engine served it."""
    said: Finished
    """What its prefill engine said."""
    engine: int
    """That engine."""
    version: int
    """Oldest weight version among the KV of the prompt."""


def prefill_part(whole: Request) -> Request:
    """The prompt and one token of a turn of several."""
    return Request(
        whole.rid,
        whole.content,
        whole.prompt_tokens,
        1,
        1,
        False,
        whole.ignore_eos,
        whole.output_content,
        None,
        whole.namespace,
        whole.known_tokens,
    )


def prefilled(whole: Request, said: Finished, engine: int) -> Prefilled:
    """The first token's version computed what was not reused."""
    made = said.spans[0][0]
    return Prefilled(whole, said, engine, min(made, said.kv_version) if said.kv_version >= 0 else made)


def decode_part(p: Prefilled) -> Request:
    """The rest of the turn, with the KV of its prompt."""
    whole, output = p.request, p.request.output_content
    r = Request(
        whole.rid,
        (*whole.content, (output, 0, 1)),
        whole.prompt_tokens + 1,
        whole.output_tokens - 1,
        whole.max_new_tokens - 1,
        whole.stops,
        whole.ignore_eos,
        output,
        ((output, 1, FOREVER),),
        whole.namespace,
        whole.prompt_tokens,
    )
    r.brought = (whole.prompt_tokens, p.version)
    return r


def whole_turn(p: Prefilled, n: Finished | Aborted) -> Finished | Aborted:
    """What one engine would have said: started and first token from the prefill, the end from the decode."""
    first = p.said
    kv_version = first.kv_version
    if n.kv_version >= 0 and n.spans and n.kv_version < n.spans[0][0]:  # it went on with KV of older weights
        kv_version = n.kv_version if kv_version < 0 else min(kv_version, n.kv_version)
    return structs.replace(
        n,
        output_tokens=1 + n.output_tokens,
        spans=_joined(first.spans, n.spans),
        cached_tokens=first.cached_tokens,
        started_t=first.started_t,
        first_token_t=first.first_token_t,
        recomputed_tokens=first.recomputed_tokens + n.recomputed_tokens,
        kv_version=kv_version,
        retractions=first.retractions + n.retractions,
    )


def _joined(first: tuple[Span, ...], rest: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans of the first token, then of the others; one span where the version is the same."""
    spans = list(first)
    for version, start, end in rest:
        if spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], end + 1)
        else:
            spans.append((version, start + 1, end + 1))
    return tuple(spans)
