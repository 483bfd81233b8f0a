"""The rules of SGLang's scheduler that the engine model states, by name: which one is behind a difference.

A difference shows in a field of the state; the fields are looked at in the order of cause and effect, because a wrong
batch makes everything after it wrong too. It refuses to know how a replay finds differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Rule(NamedTuple):
    name: str
    states: str
    """What the model assumes."""
    where: str
    """Where the engine decides it: SGLang 0.5.23's files below `sglang/srt/`."""


class Difference(NamedTuple):
    """One field of one iteration that is not the same."""

    n: int
    field: str
    model: Any
    trace: Any

    def __str__(self) -> str:
        return f"iteration {self.n}: {self.field}: model {self.model!r}, engine {self.trace!r}"


_SCHEDULER, _POLICY, _BATCH = "managers/scheduler.py", "managers/schedule_policy.py", "managers/schedule_batch.py"

_TABLE = (
    Rule(
        "max_new_tokens is clipped",
        "to what context and pool leave after the prompt, one token and one page",
        f"{_SCHEDULER} init_req_max_new_tokens",
    ),
    Rule(
        "abort",
        "waiting: gone at once; running: ends with its next result; half prefilled: gone at the next iteration, its "
        "last chunk unpublished",
        f"{_SCHEDULER} abort_request, process_pending_chunked_abort",
    ),
    Rule(
        "pause",
        "in_place touches nothing; retract handles the results in flight and sends the running, then the last prefill, "
        "then the half prefilled to the tail of the queue",
        f"{_SCHEDULER} pause_generation",
    ),
    Rule("flush", "refused while a batch exists, or requests wait unpaused", f"{_SCHEDULER} flush_cache"),
    Rule(
        "weight version spans",
        "every request with outputs notes the old version and its count of outputs handed out",
        "utils/weight_versions.py record_weight_version_events",
    ),
    Rule(
        "queue entry",
        "arrivals and requests sent back go to the tail, in the order of the batch",
        f"{_SCHEDULER} _add_request_to_queue",
    ),
    Rule(
        "batch_is_full latch",
        "set when rows or tokens run out with something running or admitted; cleared when a request leaves",
        f"{_SCHEDULER} _get_new_batch_prefill_raw, get_next_batch_to_run",
    ),
    Rule(
        "prefill first",
        "a prefill that can be formed runs alone, decode waits; prefill_decode_interval holds it back",
        f"{_SCHEDULER} get_next_batch_to_run",
    ),
    Rule(
        "queue order",
        "fcfs: as it is; lpm: longest cached prefix first up to 128 waiting; priority: higher, then earlier entry",
        f"{_POLICY} SchedulePolicy.calc_priority",
    ),
    Rule(
        "admission budget",
        "extend + min(max_new - outputs, 4096) + page < free + evictable - expected tokens, first that fails ends it",
        f"{_POLICY} PrefillAdder.add_one_req",
    ),
    Rule(
        "preemption",
        "lowest priority first, latest entry first, lower by more than the threshold, until the tokens suffice",
        f"{_POLICY} PrefillAdder.preempt_to_schedule",
    ),
    Rule(
        "prefix match",
        "longest cached prefix but one token, at most logprob_start_len, whole pages, per extra_key",
        "mem_cache/unified_radix_cache.py match_prefix",
    ),
    Rule(
        "chunking",
        "the unfinished prompt goes first; a prompt longer than what is left of the chunk is cut to whole pages",
        f"{_POLICY} PrefillAdder.add_chunked_req, add_one_req",
    ),
    Rule(
        "decode batch",
        "all running requests in the order of joining, without those whose last token is in flight",
        f"{_SCHEDULER} update_running_batch",
    ),
    Rule(
        "results lag",
        "with overlap a step's results are handled after the next step is launched, else at once",
        f"{_SCHEDULER} event_loop_overlap, event_loop_normal",
    ),
    Rule(
        "decode memory check",
        "evict until a slot (a page at a page's end) a request is free; else retract",
        f"{_BATCH} check_decode_mem",
    ),
    Rule(
        "retraction order",
        "fewest outputs first, then longest prompt, then latest; until the next step fits; the last one is aborted",
        f"{_BATCH} retract_decode",
    ),
    Rule(
        "new_token_ratio",
        "0.7 x conservativeness, falling to 0.14 of it with decode steps; set anew by a retraction, reset when idle",
        "managers/scheduler_components/new_token_ratio_tracker.py",
    ),
    Rule(
        "eviction",
        "whole unlocked leaves, least recently used first, until the target is free",
        "mem_cache/unified_radix_cache.py _evict",
    ),
    Rule(
        "publication to the tree",
        "a chunk at the next iteration, a prompt with its result, everything at the end",
        "mem_cache/unified_radix_cache.py checkpoint, finish",
    ),
    Rule("rows", "a request holds one from its first prefill to its end or retraction", f"{_BATCH} alloc_for_extend"),
    Rule(
        "end of a request",
        "abort, stop token, length, looked at when the result is handled",
        f"{_BATCH} Req.update_finish_state",
    ),
    Rule("cached_tokens", "prefix length at the first admission", f"{_BATCH} prepare_for_extend"),
)
RULES: dict[str, Rule] = {rule.name: rule for rule in _TABLE}

_BY_FIELD = {
    "limit": "max_new_tokens is clipped",
    "abort": "abort",
    "pause_generation": "pause",
    "flush_cache": "flush",
    "versions": "weight version spans",
    "queue before": "queue entry",
    "preempted": "preemption",
    "w": "queue order",
    "run": "decode batch",
    "full": "batch_is_full latch",
    "ck": "chunking",
    "evictions": "eviction",
    "ratio": "new_token_ratio",
    "rows": "rows",
    "avail": "publication to the tree",
    "evict": "publication to the tree",
    "prot": "publication to the tree",
    "results": "results lag",
    "finished": "end of a request",
    "outputs": "end of a request",
    "cached": "cached_tokens",
}
_ORDER = (
    "limit",
    "abort",
    "pause_generation",
    "flush_cache",
    "queue before",
    "retracted",
    "lost",
    "preempted",
    "mode",
    "batch",
    "versions",
    "full",
    "ck",
    "evictions",
    "w",
    "run",
    "ratio",
    "results",
    "finished",
    "outputs",
    "cached",
    "rows",
    "avail",
    "evict",
    "prot",
)


def changed(differences: Sequence[Difference]) -> Rule:
    """The rule behind the differences of one iteration."""
    first = min(differences, key=lambda d: _ORDER.index(d.field))
    if first.field in ("retracted", "lost"):
        both = first.model and first.trace
        return RULES["retraction order" if both or first.field == "lost" else "decode memory check"]
    if first.field == "mode":
        return RULES["prefill first" if "EXTEND" in (first.model, first.trace) else "decode batch"]
    if first.field == "batch":
        return RULES[_of_batch(first.model, first.trace)]
    return RULES[_BY_FIELD[first.field]]


def _of_batch(model: Sequence[Any], trace: Sequence[Any]) -> str:
    """Both are (kind, rows): [rid, prefix, new] of a prefill, [rid, slots, outputs] of a decode step."""
    (kind, mine), (_, its) = model, trace
    if isinstance(mine, str):  # what the model raised instead
        return "admission budget"
    ours, theirs = [r[0] for r in mine], [r[0] for r in its]
    if kind == "DECODE":
        return "decode batch" if ours != theirs else "results lag"
    if ours != theirs:
        n = min(len(ours), len(theirs))
        return "admission budget" if ours[:n] == theirs[:n] else "queue order"
    return "prefix match" if [r[1] for r in mine] != [r[1] for r in its] else "chunking"
