"""A real engine with the tracing plugin: what its scheduler decides is what the engine model decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from real.engines import schedtrace_cases as cases
from real.engines.schedtrace_run import TraceCase, read_trace, record, save
from real.errors import RealError
from sim.trace_replay import load, replay

SHORT = TraceCase(
    "short",
    "several samples, aborts, pauses by iteration, weight updates over HTTP",
    (
        cases.samples,
        cases.namespaces(),
        cases.aborts(),
        cases.pauses("in_place"),
        cases.aborts_while_paused(),
        cases.weight_updates,
    ),
    ("--schedule-conservativeness", "0.2"),
    max_total_tokens=900,
    max_running_requests=5,
    chunked_prefill_size=64,
)


def test_the_model_forms_every_batch_of_a_real_engine(tiny_model: Path, tmp_path: Path) -> None:
    trace = record(SHORT, tiny_model, tmp_path / "engine")
    save(trace, tmp_path / "short.json.gz")
    trace = load(tmp_path / "short.json.gz")
    for skip in (False, True):
        done = replay(trace, skip)
        assert done.differences == [], f"{done.rule}\n{done.around}"
    assert done.counts["prefills"] + done.counts["decodes"] > 500
    assert done.counts["abort"] >= 15
    assert {m["mode"] for m in trace["events"] if m["e"] == "pause_generation"} == {"retract", "in_place"}
    assert {m["ret"] for m in trace["events"] if m["e"] == "flush_cache"} == {True, False}
    by_key: dict[str | None, list[int]] = {}
    for r in trace["requests"]:
        if r["rid"].startswith("x"):
            by_key.setdefault(r["extra_key"], []).append(r["cached_tokens"])
    assert by_key["a"] == [0, 90, 90], "the prompt is shared under the same key alone"
    samples = [r["cached_tokens"] for r in trace["requests"] if r["input_ids"] == list(cases.ids(100, 40))]
    assert samples[:5] == [0, 39, 39, 39, 39], "a request for no token, then n = 4 that find its prompt"


def test_a_server_that_wrote_no_trace_is_said_plainly(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("Failed to load plugin\nAttributeError: Scheduler has no attribute 'get_next_batch_to_run'\n")
    with pytest.raises(RealError, match=r"holds no trace: the plugin could not take hold(.|\n)*get_next_batch_to_run"):
        read_trace(tmp_path / "schedtrace.jsonl", log)
