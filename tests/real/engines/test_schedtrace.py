"""A real engine with the tracing plugin: what its scheduler decides is what the engine model decides, and what a reused
prefix, a freed slot and a full cache are to it, counted in batches and tokens.

One engine of 900 KV slots, five requests at once and chunks of 64 answers all questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from real.engines import schedtrace_cases as cases
from real.engines.client import RID_END
from real.engines.schedtrace_run import Ask, Script, TraceCase, read_trace, record, save
from real.errors import RealError
from sim.trace_replay import load, replay

SLOTS, KV_TOKENS, CHUNK = 5, 900, 64

# --- the same prompt twice, alone in the engine -----------------------------------------------------------------------

TWICE, TWICE_OUT = (60, *cases.ids(200, 149)), 20
"""Begins as no other prompt does, as do all prompts from here on that say what they find."""
TWO_TIMES = cases.script([(at, Ask(f"twice{i}", TWICE, TWICE_OUT)) for i, at in enumerate((0, 30))])

# --- more requests than slots -----------------------------------------------------------------------------------------

LENGTHS = (40, 6, 25, 12, 9, 31, 5, 18, 22, 7, 14, 28, 10)
"""Output tokens. Prompts of ten tokens: those of all slots fit in a chunk, all KV fits in the pool."""
MANY = cases.script([(0, Ask(f"slot{i}", cases.ids(300 + i, 10), n)) for i, n in enumerate(LENGTHS)])

# --- prompts that come back, in caches of several sizes ---------------------------------------------------------------

PROMPT, OUT = 100, 4
HELD_PROMPT, HELD_OUT = 320, 140
"""Of a request that keeps its KV for as long as it runs."""


def coming_back(name: str, first: int, prompts: int, *, beside: bool = False) -> Script:
    """Prompts one after the other, then all once more; `beside` a request that holds a part of the pool. They begin
    with the tokens from `first` on."""
    asks = [
        (10 + 8 * (prompts * again + i), Ask(f"{name}{i}.{again}", begun(first + i, PROMPT), OUT))
        for again in range(2)
        for i in range(prompts)
    ]
    held = [(0, Ask(f"{name}-holder", begun(first + prompts, HELD_PROMPT), HELD_OUT))] if beside else []
    return cases.script([*held, *asks])


def begun(token: int, tokens: int) -> tuple[int, ...]:
    return (token, *cases.ids(token, tokens - 1))


SHORT = TraceCase(
    "short",
    "several samples, aborts, pauses by iteration, weight updates over HTTP; reuse, slots and eviction",
    (
        cases.samples,
        cases.namespaces(),
        cases.aborts(),
        cases.pauses("in_place"),
        cases.aborts_while_paused(),
        TWO_TIMES,
        MANY,
        coming_back("few", 61, 6),
        coming_back("crowded", 70, 6, beside=True),
        coming_back("many", 80, 10),
        cases.weight_updates,
    ),
    ("--schedule-conservativeness", "0.2"),
    max_total_tokens=KV_TOKENS,
    max_running_requests=SLOTS,
    chunked_prefill_size=CHUNK,
)

Trace = dict[str, Any]


@pytest.fixture(scope="module")
def trace(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    folder = tmp_path_factory.mktemp("traced")
    save(record(SHORT, tiny_model, folder / "engine"), folder / "short.json.gz")
    yield load(folder / "short.json.gz")


def asked(trace: Trace, name: str) -> list[dict[str, Any]]:
    """Requests whose id begins with this, in order of arrival."""
    return [r for r in trace["requests"] if r["rid"].startswith(name)]


def batches(trace: Trace, mode: str, rids: Sequence[str]) -> list[dict[str, Any]]:
    """Batches of this mode that hold one of these requests."""
    return [e for e in trace["events"] if e.get("mode") == mode and any(r[0] in rids for r in e["reqs"])]


def test_the_model_forms_every_batch_of_a_real_engine(trace: Trace) -> None:
    for skip in (False, True):
        done = replay(trace, skip)
        assert done.differences == [], f"{done.rule}\n{done.around}"
    assert done.counts["prefills"] + done.counts["decodes"] > 1000
    assert done.counts["abort"] >= 15
    assert {m["mode"] for m in trace["events"] if m["e"] == "pause_generation"} == {"retract", "in_place"}
    assert {m["ret"] for m in trace["events"] if m["e"] == "flush_cache"} == {True, False}
    by_key: dict[str | None, list[int]] = {}
    for r in asked(trace, "x"):
        by_key.setdefault(r["extra_key"], []).append(r["cached_tokens"])
    assert by_key["a"] == [0, 90, 90], "the prompt is shared under the same key alone"
    samples = [r["cached_tokens"] for r in trace["requests"] if r["input_ids"] == list(cases.ids(100, 40))]
    assert samples[:5] == [0, 39, 39, 39, 39], "a request for no token, then n = 4 that find its prompt"


def test_rk_03_reuse_saves_prompt_computation_and_no_decode_step(trace: Trace) -> None:
    """Computed in chunks of 64 the first time, all but the last token found the second: 150 tokens in three batches
    against one in one. The other tokens take as many decode steps as before, and are the same."""
    first, second = asked(trace, "twice")
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, len(TWICE) - 1)
    assert first["output_ids"] == second["output_ids"] and len(first["output_ids"]) == TWICE_OUT
    computed, steps = [], []
    for r in (first, second):
        prefills = batches(trace, "EXTEND", [r["rid"]])
        computed.append([new for e in prefills for rid, _, new in e["reqs"] if rid == r["rid"]])
        steps.append(len(batches(trace, "DECODE", [r["rid"]])))
    assert computed == [[64, 64, 22], [1]]
    assert steps[0] == steps[1] >= TWICE_OUT - 1


def test_rk_04_a_freed_slot_is_taken_at_the_next_step(trace: Trace) -> None:
    """Whenever a batch is chosen while requests wait and a slot is free, it is one that fills the free slots."""
    rids = [r["rid"] for r in asked(trace, "slot")]
    running: set[str] = set()
    filled = 0
    for e in trace["events"]:
        if e["e"] == "next" and set(e["w0"]) <= set(rids) and e["w0"]:
            free = SLOTS - len(running)
            taken = [r[0] for r in e["reqs"]] if e["mode"] == "EXTEND" else []
            assert taken == e["w0"][:free], f"iteration {e['n']}: {free} free"
            filled += bool(taken)
        if e["e"] == "next" and e["mode"] == "EXTEND":
            running |= {r[0] for r in e["reqs"]} & set(rids)
        elif e["e"] == "proc":
            running -= {f[0] for f in e["fin"]}
    assert filled > len(LENGTHS) // SLOTS, "slots are not refilled in whole batches"
    steps = len(batches(trace, "DECODE", rids))
    static = sum(max(LENGTHS[i : i + SLOTS]) - 1 for i in range(0, len(LENGTHS), SLOTS))
    tokens = sum(n - 1 for n in LENGTHS)
    assert tokens / SLOTS <= steps < static, "slots are used better than by batches that end together"


def found(trace: Trace, name: str) -> list[list[int]]:
    """Cached tokens of each prompt, when it came and when it came back."""
    return [[r["cached_tokens"] for r in asked(trace, name) if r["rid"].endswith(f".{i}{RID_END}")] for i in range(2)]


def least_recently_used(prompts: int, slots: int) -> list[int]:
    """Cached tokens of prompts that come back in a cache of whole prompts: each takes its tokens and its outputs' but
    the last one's; all but the last token are found, or nothing is."""
    held: dict[int, int] = {}
    hits = []
    for i in (*range(prompts), *range(prompts)):
        hits.append(PROMPT - 1 if i in held else 0)
        held.pop(i, None)
        held[i] = PROMPT + OUT - 1
        while sum(held.values()) > slots:
            del held[next(iter(held))]
    return hits[prompts:]


def test_rk_13_hits_fall_with_the_capacity_and_nothing_evicted_is_found(trace: Trace) -> None:
    """Six prompts that fit come back to their KV; where another request holds enough of the pool, or there are ten,
    each has been evicted when it comes back, and is computed again to the last token."""
    left = KV_TOKENS - HELD_PROMPT
    for name, prompts, slots in (("few", 6, KV_TOKENS), ("crowded", 6, left), ("many", 10, KV_TOKENS)):
        came, back = found(trace, name)
        assert came == [0] * prompts
        assert back == least_recently_used(prompts, slots), name
    assert sum(found(trace, "few")[1]) == 6 * (PROMPT - 1) > sum(found(trace, "crowded")[1]) == 0
    evicted = [r["rid"] for r in asked(trace, "crowded") + asked(trace, "many") if r["rid"].endswith(f".1{RID_END}")]
    new = {rid: 0 for rid in evicted}
    for e in batches(trace, "EXTEND", evicted):
        for rid, _, tokens in e["reqs"]:
            if rid in new:
                new[rid] += tokens
    assert set(new.values()) == {PROMPT}


def test_a_server_that_wrote_no_trace_is_said_plainly(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("Failed to load plugin\nAttributeError: Scheduler has no attribute 'get_next_batch_to_run'\n")
    with pytest.raises(RealError, match=r"holds no trace: the plugin could not take hold(.|\n)*get_next_batch_to_run"):
        read_trace(tmp_path / "schedtrace.jsonl", log)
