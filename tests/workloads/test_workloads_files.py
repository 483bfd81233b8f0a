"""Recorded workloads: the bundled traces are what their sources say, and every fault of a file is named with its
line."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from testbed.core.actions import AnyAction, ComputeSignals, RunTool, StartTurn
from testbed.core.events import AnyEvent, SignalReady, TaskArrived, ToolFinished, TurnFinished
from testbed.scenario import Scenario
from testbed.workloads import Plan, Task, WorkloadError, workload
from testbed.workloads.files import TRACES, find
from testbed.workloads.trace import read_trace

ROOT = Path(__file__).parents[2]


def scenario(work: dict[str, Any], members: int = 1) -> Scenario:
    return Scenario.model_validate(
        {
            "cluster": {"gpu": "H100", "nodes": 1},
            "model": {"type": "preset", "name": "Qwen3-8B"},
            "workload": work,
            "algorithm": {"n_samples_per_prompt": members},
            "placement": {"mode": "colocated", "num_gpus": 8},
            "rollout": {"admission": {"type": "sync"}},
            "weights": {
                "path": {"type": "fixed", "update_weight_transfer_mode": "cuda_ipc"},
                "transition": {"pause_generation_mode": "finish", "kv": "flush"},
            },
        }
    )


def tasks(work: dict[str, Any], base_dir: Path = ROOT, members: int = 1) -> list[Task]:
    source = workload(scenario(work, members), base_dir)
    drawn = []
    while (task := source.draw()) is not None:
        drawn.append(task)
    return drawn


# --- the bundled traces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "prompt", "output", "rate_per_s", "seconds"),
    [
        ("mooncake_conversation", 12_031, (12_035, 6_909, 126_195), (343, 350, 2_000), 3.40, 3_537),
        ("mooncake_synthetic", 3_993, (15_326, 11_587, 191_378), (149, 69, 893), 3.91, 1_022),
        ("azure_code", 8_819, (2_048, 1_469, 7_437), (28, 13, 1_899), 2.57, 3_436),
        ("azure_conv", 19_366, (1_155, 1_020, 14_050), (211, 129, 1_000), 5.53, 3_502),
    ],
)
def test_bundled_traces_have_the_statistics_of_their_sources(
    name: str, rows: int, prompt: tuple[int, int, int], output: tuple[int, int, int], rate_per_s: float, seconds: int
) -> None:
    """Rows; mean, median and largest of both lengths; arrivals a second and duration."""
    trace = read_trace(name, ROOT)
    assert len(trace.arrival_s) == rows
    for values, (mean, median, largest) in ((trace.prompt_tokens, prompt), (trace.output_tokens, output)):
        assert abs(np.mean(values) - mean) < 1
        assert abs(np.median(values) - median) <= 1
        assert max(values) == largest
    assert trace.arrival_s[0] == 0.0 and sorted(trace.arrival_s) == trace.arrival_s
    assert trace.arrival_s[-1] == pytest.approx(seconds, abs=0.51)
    assert rows / trace.arrival_s[-1] == pytest.approx(rate_per_s, abs=0.005)


@pytest.mark.parametrize(("name", "share"), [("mooncake_conversation", 0.374), ("mooncake_synthetic", 0.651)])
def test_recorded_prefixes_are_shared_as_in_the_trace(name: str, share: float) -> None:
    """Published share of input tokens that an unbounded prefix cache would hold: 37.4 % and 65.1 %."""
    seen: set[tuple[int, int, int]] = set()
    cached = total = 0
    for task in tasks({"type": "trace", "trace": name}):
        assert sum(run[2] for run in task.prompt) == task.prompt_tokens
        assert task.block_tokens == 512 and len(task.blocks) == len(task.prompt)
        for run in task.prompt:
            if run not in seen:
                break
            cached += run[2]
        seen.update(task.prompt)
        total += task.prompt_tokens
    assert cached / total == pytest.approx(share, abs=0.0006)
    assert max(content for content, _, _ in seen) < 0


def test_traces_without_ids_share_nothing_and_are_one_turn_each() -> None:
    drawn = tasks({"type": "trace", "trace": "azure_code", "max_requests": 500}, members=2)
    assert len({run for task in drawn for run in task.prompt}) == len(drawn) == 500
    assert len({block for task in drawn for block in task.blocks}) == sum(len(task.blocks) for task in drawn)
    first = drawn[0]
    assert first.prompt_tokens == 4808 and len(first.plans) == 2
    assert all(plan.output_tokens == (10,) and plan.stops == (True,) and plan.tool_s == () for plan in first.plans)


def test_recorded_replies_are_cut_at_the_cap() -> None:
    drawn = tasks({"type": "trace", "trace": "azure_conv", "max_requests": 2, "max_response_length": 44})
    assert [(plan.output_tokens, plan.stops) for task in drawn for plan in task.plans] == [((44,), (False,))] * 2


def test_recorded_arrivals_come_when_the_trace_says() -> None:
    """2023-11-16 18:15:46.6805900, then 18:15:50.9951690: 4.3145790 s later."""
    config = {"type": "trace", "trace": "azure_conv", "arrivals": "trace", "time_scale": 2.0}
    arrivals = workload(scenario(config), ROOT).arrivals()
    assert arrivals is not None
    (first, task), (second, _) = next(arrivals), next(arrivals)
    assert first == 0.0 and second == pytest.approx(2 * 4.314579, abs=1e-9) and task.prompt_tokens == 374
    assert workload(scenario({"type": "trace", "trace": "azure_conv"}), ROOT).arrivals() is None


def test_a_swing_brings_more_while_the_rate_is_up_and_the_same_in_a_whole_period(tmp_path: Path) -> None:
    """1,000 even arrivals, one a second. By hand, with 0.5 and 100 s: half a period brings 50 + 0.5 x 100 / pi = 65.9
    of them, a quarter 25 + 0.5 x 100 / (2 pi) = 32.96, whole ones 100 each."""
    rows = [{"timestamp": 1000 * t, "input_length": 7, "output_length": 5, "hash_ids": [t]} for t in range(1000)]
    (tmp_path / "even.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {"type": "trace", "trace": "even.jsonl", "arrivals": "trace", "swing": {"share": 0.5, "period_s": 100.0}}
    arrivals = workload(scenario(config), tmp_path).arrivals()
    assert arrivals is not None
    times = [t for t, _ in arrivals]
    assert times == sorted(times) and times[0] == 0.0 and times[100] == pytest.approx(100.0)
    assert [sum(t <= end for t in times) for end in (25.0, 50.0, 100.001, 125.0, 150.0)] == [33, 66, 101, 133, 166]
    with pytest.raises(ValueError, match="`swing` moves arrivals"):
        scenario({k: v for k, v in config.items() if k != "arrivals"})


def test_prompt_lengths_from_a_trace_repeat_with_fresh_content(tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 700, "output_length": 5, "hash_ids": [9, 10 + t]} for t in range(3)]
    (tmp_path / "three.jsonl").write_text("\n".join(map(json.dumps, rows)))
    work = {
        "type": "lengths",
        "prompt": {"type": "trace", "trace": "three.jsonl"},
        "reply": {"type": "fixed", "tokens": 7},
        "max_response_length": 100,
        "num_tasks": 7,
        "shared_prefix_tokens": 64,
    }
    drawn = tasks(work, tmp_path)
    assert [task.prompt_tokens for task in drawn] == [764] * 7
    assert all(task.prompt[0] == (-1, 0, 64) and task.plans[0].output_tokens == (7,) for task in drawn)
    shared = [task.prompt[1] for task in drawn]
    assert all(run[1:] == (0, 512) for run in shared) and all(task.prompt[2][1:] == (0, 188) for task in drawn)
    assert shared[0] == shared[1] == shared[2] != shared[3] == shared[4] == shared[5] != shared[6]
    assert len({task.prompt[2] for task in drawn}) == 7
    assert len({task.blocks[0] for task in drawn}) == 1 and len({task.blocks[1] for task in drawn}) == 3


def test_the_same_data_elsewhere_is_the_same_workload(tmp_path: Path) -> None:
    bundled = find("azure_code", ROOT, TRACES)
    shutil.copy(bundled, tmp_path / "mine.csv.gz")
    (tmp_path / "plain.csv").write_bytes(gzip.decompress(bundled.read_bytes()))
    names = ("azure_code", "mine.csv.gz", "plain.csv")
    prints = {workload(scenario({"type": "trace", "trace": name}), tmp_path).fingerprint for name in names}
    assert len(prints) == 1
    assert workload(scenario({"type": "trace", "trace": "azure_conv"}), tmp_path).fingerprint not in prints


# --- sessions ---------------------------------------------------------------------------------------------------------


def session(name: str, arrival: int, calls: list[tuple[int, int, int]]) -> dict[str, Any]:
    keys = ("input_toks", "output_toks", "tool_duration_ns")
    return {
        "session_id": name,
        "arrival_time_ns": arrival,
        "sub_requests": [dict(zip(keys, call, strict=True)) for call in calls],
    }


def test_sessions_become_tasks_in_order_of_arrival(tmp_path: Path) -> None:
    late = session("late", 2_000_000_000, [(1200, 300, 80_000_000), (50, 20, 250_000_000), (70, 500, 1)])
    early = session("early", 500_000_000, [(10, 3, 0)])
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, (late, early))) + "\n\n")
    work = {"type": "sessions", "path": "s.jsonl", "arrivals": "trace", "max_response_length": 400}
    arrivals = workload(scenario(work, members=2), tmp_path).arrivals()
    assert arrivals is not None
    (t0, first), (t1, second) = arrivals
    assert (t0, t1) == (0.5, 2.0)
    assert first.prompt_tokens == 10 and first.plans[0].output_tokens == (3,)
    assert second.prompt == ((-3, 0, 1200),) and len(second.plans) == 2
    for plan in second.plans:
        assert plan.output_tokens == (300, 20, 400) and plan.stops == (True, True, False)
        assert plan.tool_s == (0.08, 0.25) and plan.observation_tokens == (50, 70)


def test_the_example_sessions_are_readable() -> None:
    drawn = tasks({"type": "sessions", "path": "scenarios/traces/example_sessions.jsonl"})
    assert len(drawn) == 20
    assert {len(task.plans[0].output_tokens) for task in drawn} >= {1, 5, 10}


# --- journals ---------------------------------------------------------------------------------------------------------


def start(trajectory: int, turn: int, member: int, task: int = 40) -> StartTurn:
    return StartTurn(trajectory, turn, engine=0, group=0, task=task, member=member, attempt=0, why="")


def finished(t: float, trajectory: int, turn: int, tokens: int, reason: str, continues: bool = False) -> TurnFinished:
    return TurnFinished(t, trajectory, turn, 0, 10, tokens, ((0, 0, tokens),), 0, t, t, reason, continues)


RUN: list[tuple[AnyEvent, list[AnyAction]]] = [
    (
        TaskArrived(0.0, 0, task=40, prompt_tokens=900, blocks=(77, 78), block_tokens=512),
        [start(0, 0, 0), start(1, 0, 1)],
    ),
    (TaskArrived(1.0, 1, task=41, prompt_tokens=700, blocks=(77,), block_tokens=512), [start(2, 0, 0, task=41)]),
    (TaskArrived(1.5, 2, task=42, prompt_tokens=5), []),
    (finished(2.0, 0, 0, 30, "tool_calls", continues=True), [RunTool(0, 0)]),
    (finished(3.0, 1, 0, 100, "length"), [ComputeSignals("reward", (1,), -1)]),
    (ToolFinished(4.5, 0, observation_tokens=12), [start(0, 1, 0)]),
    (SignalReady(5.0, "reward", (1,), (1.0,)), []),
    (finished(6.0, 0, 1, 40, "stop"), [ComputeSignals("reward", (0,), -1)]),
    (SignalReady(6.25, "reward", (0,), (0.5,)), []),
    (finished(7.0, 2, 0, 9, "tool_calls", continues=True), []),
]


def write_journal(folder: Path, level: str = "full") -> Path:
    header = {"format": "testbed-journal/1", "scenario_hash": "x", "seed": 0, "backend": "simulated", "level": level}
    records = [{"event": event, "actions": actions} for event, actions in RUN]
    text = b"\n".join(msgspec.json.encode(line) for line in (header, *records)) + b"\n"
    folder.mkdir(exist_ok=True)
    (folder / "journal.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    return folder


def test_a_journal_replays_lengths_tool_times_and_rewards_by_task_member_and_turn(tmp_path: Path) -> None:
    write_journal(tmp_path / "run")
    work = {
        "type": "journal",
        "run": "run",
        "max_response_length": 100,
        "rewards": {"latency": {"type": "fixed", "seconds": 8.0}},
    }
    first, second = tasks(work, tmp_path, members=2)
    assert first.plans == [
        Plan((30, 40), (True, True), (2.5,), (12,), 0.5, 0.25),
        Plan((100,), (False,), (), (), 1.0, 2.0),
    ]
    # Task 42 never ran. Task 41 was cut short after one turn, has no reward, and only one member: both members do
    # what it did.
    assert [(plan.output_tokens, plan.reward_s) for plan in second.plans] == [((9,), 8.0)] * 2
    assert [run[1:] for run in first.prompt] == [(0, 512), (0, 388)] and [run[1:] for run in second.prompt] == [
        (0, 512),
        (0, 188),
    ]
    assert first.prompt[0] == second.prompt[0] and first.prompt[1] != second.prompt[1]
    assert (first.blocks, second.blocks, first.block_tokens) == ((77, 78), (77,), 512)


def test_a_journal_file_and_its_folder_are_the_same_workload(tmp_path: Path) -> None:
    write_journal(tmp_path / "run")
    a, b = ({"type": "journal", "run": run} for run in ("run", "run/journal.jsonl.zst"))
    assert workload(scenario(a), tmp_path).fingerprint == workload(scenario(b), tmp_path).fingerprint
    assert tasks(a, tmp_path) == tasks(b, tmp_path)


# --- faults -----------------------------------------------------------------------------------------------------------

GOOD_SESSION = json.dumps(session("a", 0, [(10, 3, 0)]))
GOOD_ROW = '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,10,10\n"

FAULTS: list[tuple[str, str, str, str]] = [
    (
        "sessions",
        "s.jsonl",
        GOOD_SESSION + "\n" + GOOD_SESSION[:60],
        ":2: not a complete JSON object: Input data was truncated",
    ),
    (
        "sessions",
        "s.jsonl",
        '{"session_id": "a", "sub_requests": []}',
        ":1: Object missing required field `arrival_time_ns`",
    ),
    (
        "sessions",
        "s.jsonl",
        GOOD_SESSION + "\n\n" + GOOD_SESSION.replace('"output_toks": 3', '"output_toks": "many"'),
        ":3: Expected `int`, got `str` - at `$.sub_requests[0].output_toks`",
    ),
    ("sessions", "s.jsonl", json.dumps(session("b", 0, [])), ":1: session 'b': `sub_requests` is empty"),
    (
        "sessions",
        "s.jsonl",
        json.dumps(session("b", 0, [(1, 1, 0), (0, 0, 0)])),
        ":1: session 'b': `sub_requests[1].output_toks` must be at least 1",
    ),
    (
        "sessions",
        "s.jsonl",
        json.dumps(session("b", 0, [(0, 1, 0)])),
        ":1: session 'b': `sub_requests[0].input_toks` must be at least 1",
    ),
    (
        "sessions",
        "s.jsonl",
        json.dumps(session("b", 0, [(1, 1, -1)])),
        ":1: session 'b': `sub_requests[0].tool_duration_ns` is negative",
    ),
    ("sessions", "s.jsonl", "\n", ": holds no session"),
    ("trace", "t.jsonl", GOOD_ROW + "\n" + GOOD_ROW[:-4], ":2: not a complete JSON object: Input data was truncated"),
    ("trace", "t.jsonl", '{"timestamp": 0, "input_length": 7}', ":1: Object missing required field `output_length`"),
    (
        "trace",
        "t.jsonl",
        GOOD_ROW.replace("700", "1700"),
        ":1: `hash_ids` has 2 ids, but 1700 tokens are 4 blocks of 512",
    ),
    ("trace", "t.jsonl", GOOD_ROW.replace("5", "0"), ":1: `input_length` and `output_length` must be at least 1"),
    ("trace", "t.jsonl", "", ": holds no request"),
    ("trace", "t.csv", "time,in,out\n", ":1: the columns must be TIMESTAMP,ContextTokens,GeneratedTokens"),
    ("trace", "t.csv", AZURE + "2023-11-16 18:17:04,10\n", ":3: 3 columns expected, 2 found"),
    ("trace", "t.csv", AZURE + "yesterday,10,10\n", ":3: not a time: 'yesterday'"),
    ("trace", "t.csv", AZURE + "2023-13-16 18:17:04,10,10\n", ":3: not a time: month must be in 1..12"),
    (
        "trace",
        "t.csv",
        AZURE + "2023-11-16 18:17:04,ten,10\n",
        ":3: token counts must be whole numbers: invalid literal for int() with base 10: b'ten'",
    ),
    (
        "trace",
        "t.csv",
        AZURE + "2023-11-16 18:17:04,10,0\n",
        ":3: `ContextTokens` and `GeneratedTokens` must be at least 1",
    ),
    ("trace", "t.txt", "", ": a trace's name ends in .jsonl (Mooncake) or .csv (Azure), before .gz or .zst"),
]


@pytest.mark.parametrize(("kind", "name", "text", "message"), FAULTS)
def test_a_fault_is_named_with_file_line_and_reason(
    kind: str, name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    key = "path" if kind == "sessions" else "trace"
    with pytest.raises(WorkloadError) as error:
        workload(scenario({"type": kind, key: name}), tmp_path)
    assert str(error.value) == f"{tmp_path / name}{message}"


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            {"type": "trace", "trace": "azure_chat"},
            "azure_chat: no such file, and not a bundled trace (azure_code, azure_conv, mooncake_conversation, "
            "mooncake_synthetic) (nearest: azure_conv)",
        ),
        ({"type": "sessions", "path": "sesions.jsonl"}, "sesions.jsonl: no such file (nearest: sessions.jsonl)"),
        ({"type": "sessions", "path": "nowhere/at_all.jsonl"}, "nowhere/at_all.jsonl: no such file"),
        ({"type": "journal", "run": "rnu"}, "rnu: no such file (nearest: run)"),
        ({"type": "journal", "run": "run"}, "run/journal.jsonl.zst: no such file"),
        ({"type": "sessions", "path": "run"}, "run: cannot be read: Is a directory"),
    ],
)
def test_a_missing_file_is_named_with_the_nearest(work: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "sessions.jsonl").write_text(GOOD_SESSION)
    (tmp_path / "run").mkdir()
    with pytest.raises(WorkloadError) as error:
        workload(scenario(work), tmp_path)
    assert str(error.value) == f"{tmp_path}/{message}"


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def test_cut_off_and_damaged_compressed_files_are_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.csv.gz"
    shutil.copy(find("azure_code", ROOT, TRACES), cut)
    damage(cut, lambda data: data[: len(data) // 2])
    with pytest.raises(WorkloadError, match=r"cut\.csv\.gz:\d+: compressed data is damaged or cut off"):
        workload(scenario({"type": "trace", "trace": "cut.csv.gz"}), tmp_path)
    (tmp_path / "plain.jsonl.gz").write_text(GOOD_ROW)
    with pytest.raises(WorkloadError, match=r"plain\.jsonl\.gz:1: compressed data is damaged or cut off"):
        workload(scenario({"type": "trace", "trace": "plain.jsonl.gz"}), tmp_path)


def test_journals_that_cannot_be_replayed_are_refused(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "run", level="sampled") / "journal.jsonl.zst"
    work = {"type": "journal", "run": "run"}
    with pytest.raises(WorkloadError) as error:
        workload(scenario(work), tmp_path)
    assert str(error.value) == f"{path}:1: the journal is sampled; a replay needs one written with `journal: full`"
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(b'{"format": "testbed-journal/1"}\n{"event": {"type": "TurnFin'))
    with pytest.raises(WorkloadError, match=r"zst:2: not a complete JSON object"):
        workload(scenario(work), tmp_path)
    path.write_bytes(compress(b'{"event": {"type": "NoSuchEvent", "t": 0}, "actions": []}'))
    with pytest.raises(WorkloadError, match=r"zst:1: Invalid value 'NoSuchEvent'"):
        workload(scenario(work), tmp_path)
    path.write_bytes(compress(b'{"format": "testbed-journal/1"}\n'))
    with pytest.raises(WorkloadError, match=r"zst: holds no finished turn"):
        workload(scenario(work), tmp_path)
