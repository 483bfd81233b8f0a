"""The engine model against traces of real SGLang 0.5.23 schedulers, and against an independent model where no trace
exists. What is compared in every iteration is said in `sim.trace_replay.replay`. There is no tolerance.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine_request import Request
from sim.engine_scheduler import EngineModelOptions, Scheduler
from sim.trace_replay import TraceError, load, replay
from sim.trace_replay.trace import iterations, options, runs
from tests.support import reference_scheduler as reference

TRACES = Path(__file__).parent.parent / "data" / "sglang_scheduler_traces"
FILES = sorted(TRACES.glob("*.json.gz")) + sorted(
    Path(os.environ["SCHEDULER_TRACES"]).glob("*.json.gz") if "SCHEDULER_TRACES" in os.environ else []
)
"""The traces that travel with the tests, and those of the folder that `SCHEDULER_TRACES` names."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.removesuffix(".json.gz"))
@pytest.mark.parametrize("skip", [False, True], ids=["iterate", "skip"])
def test_trace_without_a_difference(path, skip: bool) -> None:
    trace = load(path)
    done = replay(trace, skip)
    assert done.differences == [], f"{done.rule}\n{done.around}"
    scheduler = done.scheduler
    assert not scheduler.queue
    assert scheduler.iterations == sum(it.next is not None and it.next["mode"] is not None for it in iterations(trace))
    want = {r["rid"]: (r["cached_tokens"], r["num_retractions"]) for r in trace["requests"]}
    assert len(want) == len(trace["requests"])


def test_traces_are_all_there_and_reach_what_matters() -> None:
    assert len(FILES) >= 18
    skipped = evictions = retractions = batches = 0
    for path in FILES:
        trace = load(path)
        done = replay(trace, True)
        assert done.differences == []
        skipped += done.skipped
        batches += done.scheduler.iterations
        retractions += done.scheduler.retractions
        evictions += sum(len(it.evictions) for it in iterations(trace))
    assert batches > 7000
    assert skipped > batches / 2, "most iterations are taken in runs"
    assert evictions > 1000
    assert retractions >= 10


def test_each_new_trace_reaches_the_rule_it_is_for() -> None:
    events = {path.name.removesuffix(".json.gz"): load(path)["events"] for path in sorted(TRACES.glob("*.json.gz"))}

    def of(name: str, kind: str) -> list[dict]:
        return [e for e in events[name] if e["e"] == kind]

    assert max(len(e["out"]) for e in of("victims", "retract")) == 2, "two victims in one retraction"
    assert [e["abort"] for e in of("cannot_fit", "retract")] == [["only;"]], "a last request that cannot fit"
    assert sum(len(e["out"]) for e in of("priority", "preempt")) >= 5
    assert sum(len(e["out"]) for e in of("priority_no_preemption", "retract")) >= 1
    assert {len(e["w0"]) > 128 for e in of("long_queue", "next")} == {True, False}, "lpm falls to fcfs, and comes back"
    for name in ("requests", "requests_no_overlap"):
        assert {e["mode"] for e in of(name, "pause_generation")} == {"retract", "in_place"}
        assert {e["ret"] for e in of(name, "flush_cache")} == {True, False}
        assert of(name, "record_weight_version_change")
        requests = load(TRACES / f"{name}.json.gz")["requests"]
        aborted = [r for r in requests if r["finish_reason"]["type"] == "abort"]
        assert len({len(r["output_ids"]) > 0 for r in aborted}) == 2, "aborted with outputs and before any"
        assert sum(r["max_new_tokens"] == 0 for r in requests) >= 3, "n > 1 begins with a request for no token"
        assert len({r["extra_key"] for r in requests}) == 4


def test_options_come_from_the_server_arguments_alone() -> None:
    trace = {"server_args": ["--max-total-tokens", "64", "--page-size=16"], "server_env": {}, "passes_at_start": 2}
    o = options(trace)
    assert (o.max_total_num_tokens, o.page_size, o.passes, o.schedule_policy) == (64, 16, 2, "fcfs")
    with pytest.raises(TraceError, match="--enable-mixed-chunk is not modelled"):
        options({**trace, "server_args": ["--enable-mixed-chunk"]})


def _reference_and_model(rnd: random.Random) -> tuple[reference.Engine, Scheduler]:
    page = rnd.choice([1, 1, 1, 4, 16])
    pool = rnd.choice([300, 500, 900, 2000]) // page * page
    chunk = rnd.choice([None, 16, 64, 4096])
    slots, policy, overlap = rnd.choice([2, 4, 8, 16]), rnd.choice(["fcfs", "lpm"]), rnd.random() < 0.7
    conservativeness, decay, prefill = (
        rnd.choice([1.0, 0.3, 0.05, 0.02]),
        rnd.choice([600, 5]),
        rnd.choice([16384, 128]),
    )
    passes = rnd.choice([0, 1, 31])
    ref = reference.Engine(
        pool, slots, chunk, prefill, page, policy, overlap, conservativeness, ctx=2048, decay=decay, passes=passes
    )
    model = Scheduler(
        EngineModelOptions(
            max_total_num_tokens=pool,
            max_running_requests=slots,
            chunked_prefill_size=-1 if chunk is None else chunk,
            max_prefill_tokens=prefill,
            page_size=page,
            schedule_policy=policy,
            schedule_conservativeness=conservativeness,
            context_length=2048,
            disable_overlap_schedule=not overlap,
            new_token_ratio_decay_steps=decay,
            passes=passes,
        )
    )
    return ref, model


def _draw(rnd: random.Random, vocabulary: int, documents, history, pool: int, page: int):
    """One request as (prompt, outputs, max_new_tokens, ignore_eos, logprob_start)."""
    if history and rnd.random() < 0.5:
        prompt, outputs = rnd.choice(history)
        prompt = [*prompt, *outputs]
    else:
        prompt = rnd.choice(documents)[: rnd.randrange(1, 150)]
    prompt = [*prompt, *(rnd.randrange(vocabulary) for _ in range(rnd.randrange(1, 20)))][: pool - 60]
    limit = rnd.randrange(1, 100)
    room = min(limit, min(2048, pool) - 2 - len(prompt), pool - -(-len(prompt) // page) * page - page - 1)
    n = room if rnd.random() < 0.4 else min(rnd.randrange(1, limit + 1), room)
    outputs = [rnd.randrange(vocabulary) for _ in range(max(n, 1))]
    return prompt, outputs, limit, rnd.random() < 0.3, rnd.choice([-1, -1, -1, 0, 10, len(prompt)])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32))
def test_equals_the_independent_model(seed: int) -> None:
    """Random servers and workloads, real token ids (a small vocabulary makes accidental prefixes), every iteration."""
    rnd = random.Random(seed)
    ref, model = _reference_and_model(rnd)
    got_evictions: list[tuple[int, int]] = []
    evict = ref.tree.evict

    def logged(engine, target):
        before = engine.avail
        evict(engine, target)
        got_evictions.append((target - before, engine.avail - before))

    ref.tree.evict = logged
    model.cache.log, model.trace = [], []
    vocabulary = rnd.choice([3, 50])
    documents = [[rnd.randrange(vocabulary) for _ in range(200)] for _ in range(3)]
    arrivals: dict[int, int] = {}
    for _ in range(30):
        at = rnd.randrange(rnd.choice([1, 60, 200]))
        arrivals[at] = arrivals.get(at, 0) + 1
    prompts: dict[int, list[int]] = {}
    history: list[tuple[list[int], list[int]]] = []
    mode = {None: None, "EXTEND": 2, "DECODE": 1}
    for n in range(4000):
        news = []
        for _ in range(arrivals.get(n, 0)):
            rid = len(prompts)
            prompt, outputs, limit, ignore_eos, start = _draw(rnd, vocabulary, documents, history, ref.pool, ref.page)
            prompts[rid] = prompt
            news.append(reference.Req(rid, prompt, outputs, limit, ignore_eos, start))
            model.enqueue(
                Request(
                    rid=rid,
                    content=runs(prompt),
                    prompt_tokens=len(prompt),
                    output_tokens=len(outputs),
                    max_new_tokens=limit,
                    ignore_eos=ignore_eos,
                    output_runs=runs(outputs),
                    logprob_start=start,
                )
            )
        got_evictions.clear()
        model.cache.log.clear()
        model.trace.clear()
        batch, finished = ref.step(news)
        kind = model.form(float(n))
        assert ref.full == model.full
        model.settle(kind, float(n))
        assert (batch and (mode[batch["mode"]], batch["log"])) == (model.trace[0] if model.trace else None)
        assert [(r.rid, r.cached, len(r.out)) for r in finished] == [(r.rid, r.cached, r.out) for r in model.ended]
        assert got_evictions == [(w, g) for w, g, _ in model.cache.log]
        assert (ref.avail, ref.tree.evictable, ref.rows) == (model.cache.free, model.cache.evictable, model.rows)
        assert ref.ratio == model.ratio.value()
        assert [r.rid for r in ref.waiting] == [r.rid for r in model.queue]
        history += [(prompts[r.rid], r.out) for r in finished]
        model.ended.clear()
        if n > 200 and batch is None and not ref.waiting:
            break
    assert len(history) == len(prompts) == 30


def test_equals_the_independent_model_beyond_the_clip() -> None:
    """Requests that may make more than 4,096 tokens are charged 4,096 of them until fewer are left."""
    options = {"schedule_conservativeness": 0.5, "max_running_requests": 8, "page_size": 1, "context_length": 1 << 20}
    ref = reference.Engine(9000, 8, 4096, 16384, 1, "fcfs", True, 0.5, ctx=1 << 20, passes=0)
    model = Scheduler(EngineModelOptions(max_total_num_tokens=9000, chunked_prefill_size=4096, **options))
    model.trace = []
    rnd = random.Random(7)
    for i in range(16):
        prompt = [rnd.randrange(10**6) for _ in range(rnd.randrange(10, 200))]
        outputs = [rnd.randrange(10**6) for _ in range(rnd.choice([300, 900, 1800]))]
        limit, ignore_eos = rnd.choice([4000, 4200, 4700, 6000]), rnd.random() < 0.3
        ref.waiting.append(reference.Req(i, prompt, outputs, limit, ignore_eos))
        model.enqueue(
            Request(
                rid=i,
                content=runs(prompt),
                prompt_tokens=len(prompt),
                output_tokens=len(outputs),
                max_new_tokens=limit,
                ignore_eos=ignore_eos,
                output_runs=runs(outputs),
            )
        )
    batches = 0
    for _ in range(6000):
        batch, finished = ref.step()
        model.settle(model.form(0.0), 0.0)
        assert (batch and batch["log"]) == (model.trace.pop()[1] if model.trace else None)
        assert [r.rid for r in finished] == [r.rid for r in model.ended]
        assert (ref.avail, ref.ratio) == (model.cache.free, model.ratio.value())
        model.ended.clear()
        batches += batch is not None
        if batch is None and not ref.waiting and not ref.running:
            break
    assert batches > 2000


# --- which rule has changed -------------------------------------------------------------------------------------------

CHANGED = [
    ("requests", {"chunked_prefill_size": 48}, "chunking"),
    ("requests", {"schedule_conservativeness": 0.4}, "new_token_ratio"),
    ("requests", {"disable_overlap_schedule": True}, "results lag"),
    ("requests", {"context_length": 60}, "max_new_tokens is clipped"),
    ("priority_no_preemption", {"retraction_policy": "length"}, "retraction order"),
    ("cannot_fit", {"prefill_decode_interval": 49}, "prefill first"),
    ("priority", {"priority_scheduling_preemption_threshold": 1000}, "preemption"),
    ("priority", {"schedule_low_priority_values_first": True}, "queue order"),
    ("long_queue", {"schedule_policy": "fcfs"}, "queue order"),
    ("long_queue", {"max_prefill_tokens": 64}, "admission budget"),
]


@pytest.mark.parametrize(("name", "settings", "rule"), CHANGED)
def test_a_changed_rule_is_named(name: str, settings: dict[str, object], rule: str) -> None:
    """An engine that does something else than its settings say is an engine with another rule."""
    trace = load(TRACES / f"{name}.json.gz")
    trace["engine"] |= settings
    done = replay(trace)
    assert done.rule is not None
    assert done.rule.name == rule, f"{done.differences[0]}\n{done.around}"
    assert done.rule.where
    assert "batches before:" in done.around
