"""A journal is read back as it was written; broken, cut off and sampled journals say so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.core import actions as do
from testbed.core import events as said
from testbed.journal import (
    FORMAT,
    JournalError,
    JournalHeader,
    JournalWriter,
    Record,
    read_journal,
    require_complete,
)
from testbed.journal.writer import BATCH_RECORDS, chosen
from tests.metrics.builders import sync_step

HEADER = JournalHeader(scenario_hash="0123abcd", seed=5, backend="simulated", versions={"rl-testbed": "0.1.0"})


def steps(n: int) -> list[tuple[said.Event, Sequence[do.Action]]]:
    return [r for i in range(n) for r in sync_step(71.0 * i, i)]


def write(
    path: Path, records: list[tuple[said.Event, Sequence[do.Action]]], level: str = "full", sample: float = 1.0
) -> Path:
    with JournalWriter(path, level, sample, HEADER) as journal:  # type: ignore[arg-type]
        for event, actions in records:
            journal.write(event, actions)
    return path


def lines(path: Path) -> list[bytes]:
    with path.open("rb") as f:
        return zstandard.ZstdDecompressor().stream_reader(f).read().splitlines()


def pack(path: Path, text: bytes) -> Path:
    path.write_bytes(zstandard.ZstdCompressor().compress(text))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl.zst"


def test_what_is_written_is_read_back(path: Path) -> None:
    records = steps(3)
    header, read = read_journal(write(path, records))
    assert (header.format, header.scenario_hash, header.seed, header.backend) == (FORMAT, "0123abcd", 5, "simulated")
    assert [(r.event, list(r.actions)) for r in read] == [(e, list(a)) for e, a in records]
    assert read.truncated is None


def test_the_lines_are_plain_tagged_json(path: Path) -> None:
    write(path, [(said.EnginePaused(62.5, 1), [do.CopyWeights(0, 3, "p2p", (0, 1))])])
    head, line = lines(path)
    assert msgspec.json.decode(head)["format"] == "testbed-journal/1"
    assert msgspec.json.decode(line) == {
        "event": {"type": "EnginePaused", "t": 62.5, "engine": 1},
        "actions": [{"type": "CopyWeights", "engine": 0, "version": 3, "path": "p2p", "participants": [0, 1]}],
    }


@settings(max_examples=50, deadline=None)
@given(
    t=st.floats(0, 1e9),
    ids=st.lists(st.integers(0, 2**40), max_size=4),
    values=st.lists(st.floats(-1e9, 1e9), max_size=4),
)
def test_numbers_survive_exactly(t: float, ids: list[int], values: list[float]) -> None:
    record = Record(said.SignalReady(t, "reward", tuple(ids), tuple(values)), [do.SetTimer(1, t / 3)])
    again = msgspec.json.decode(msgspec.json.encode(record), type=Record)
    assert again.event == record.event
    assert list(again.actions) == record.actions


def test_many_batches(path: Path) -> None:
    records = [(said.TimerFired(float(i), i), []) for i in range(3 * BATCH_RECORDS + 7)]
    _, read = read_journal(write(path, records))
    assert [r.event for r in read] == [e for e, _ in records]


def test_a_killed_run_leaves_every_flushed_batch(path: Path) -> None:
    """The writer is never closed: what it flushed is read, and the reader says that the journal breaks off."""
    journal = JournalWriter(path, "full", 1.0, HEADER)
    for i in range(2 * BATCH_RECORDS + 100):
        journal.write(said.TimerFired(float(i), i), [])
    _, read = read_journal(path)
    times = [r.event.t for r in read]
    assert times == [float(i) for i in range(len(times))]
    assert len(times) >= 2 * BATCH_RECORDS - 1
    assert read.truncated is not None
    assert "breaks off" in read.truncated
    journal.close()
    _, whole = read_journal(path)
    assert len(list(whole)) == 2 * BATCH_RECORDS + 100
    assert whole.truncated is None


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_file_that_was_cut_anywhere_is_read_up_to_the_cut(path: Path, share: float) -> None:
    records = [(said.TimerFired(float(i) * 1.37, i), []) for i in range(5000)]
    write(path, records)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    _, read = read_journal(path)
    got = [r.event for r in read]
    assert got == [e for e, _ in records[: len(got)]]
    assert read.truncated is not None


def test_ctrl_c_closes_the_journal(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), JournalWriter(path, "full", 1.0, HEADER) as journal:
        journal.write(said.TimerFired(1.0, 1), [])
        raise KeyboardInterrupt
    _, read = read_journal(path)
    assert len(list(read)) == 1
    assert read.truncated is None


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"event": {"type": "TimerFired", "t": 1.0}, "actions": []}', "timer"),
        (b'{"event": {"type": "NoSuchEvent", "t": 1.0}, "actions": []}', "NoSuchEvent"),
        (b'{"event": {"type": "TimerFired", "t": "soon", "timer": 1}, "actions": []}', "float"),
        (b"{nonsense", "not a record"),
    ],
)
def test_a_broken_line_is_an_error_with_its_place(path: Path, line: bytes, what: str) -> None:
    good = b'{"event": {"type": "TimerFired", "t": 1.0, "timer": 0}, "actions": []}'
    pack(path, b"\n".join([msgspec.json.encode(HEADER), good, line, good, b""]))
    _, read = read_journal(path)
    assert next(read).event == said.TimerFired(1.0, 0)
    with pytest.raises(JournalError, match=what) as error:
        list(read)
    assert (error.value.path, error.value.line) == (path, 3)
    assert str(error.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "not a header"),
        (b'{"hello": 1}\n', "not a header"),
        (msgspec.json.encode(msgspec.structs.replace(HEADER, format="testbed-journal/9")) + b"\n", "testbed-journal/9"),
    ],
)
def test_what_is_no_journal_is_refused(path: Path, text: bytes, what: str) -> None:
    with pytest.raises(JournalError, match=what):
        read_journal(pack(path, text))


def test_a_missing_file_and_one_that_is_not_compressed(path: Path) -> None:
    with pytest.raises(JournalError, match="no such journal"):
        read_journal(path)
    path.write_bytes(b"plain text\n")
    with pytest.raises(JournalError, match="zstd"):
        read_journal(path)


def test_off_makes_no_file(path: Path) -> None:
    write(path, steps(1), "off")
    assert not path.exists()


def test_a_sampled_journal_keeps_whole_groups_and_the_control_plane(path: Path) -> None:
    records = steps(200)
    header, read = read_journal(write(path, records, "sampled", 0.25))
    kept = list(read)
    assert (header.level, header.sample) == ("sampled", 0.25)
    groups = {g for g in range(400) if chosen(g, 0.25)}
    assert 60 <= len(groups) <= 140
    starts = [a for r in kept for a in r.actions if isinstance(a, do.StartTurn)]
    trajectories = {2 * g + i for g in groups for i in range(2)}
    assert {a.trajectory for a in starts} == trajectories
    assert {a.group for r in kept for a in r.actions if isinstance(a, do.Retire)} == groups
    of_turns = [r.event.trajectory for r in kept if isinstance(r.event, said.TurnFinished)]
    assert sorted(of_turns) == sorted(trajectories)
    for kind in (said.TrainStepFinished, said.EnginePaused, said.EngineResumed, said.WeightsPrepared):
        assert [r.event for r in kept if isinstance(r.event, kind)] == [e for e, _ in records if isinstance(e, kind)]
    for kind in (do.Train, do.PrepareWeights, do.Note):
        wanted = [a for _, actions in records for a in actions if isinstance(a, kind)]
        assert [a for r in kept for a in r.actions if isinstance(a, kind)] == wanted


def test_the_same_groups_are_kept_in_every_run_and_the_share_is_kept() -> None:
    kept = [chosen(g, 0.1) for g in range(50_000)]
    assert kept == [chosen(g, 0.1) for g in range(50_000)]
    # binomial: 5,000 with a standard deviation of 67
    assert abs(sum(kept) - 5000) < 5 * 67
    assert not any(chosen(g, 0.0) for g in range(1000))
    assert all(chosen(g, 1.0) for g in range(1000))


def test_a_sampled_journal_cannot_be_replayed(path: Path) -> None:
    header, _ = read_journal(write(path, steps(1), "sampled", 0.01))
    with pytest.raises(JournalError, match=r"sampled journal \(0.01 of the groups\) cannot be replayed"):
        require_complete(path, header)
    header, _ = read_journal(write(path, steps(1)))
    require_complete(path, header)


def test_a_share_that_is_none_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="share"):
        JournalWriter(path, "sampled", 1.5, HEADER)
