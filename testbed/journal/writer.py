"""Writes a journal: JSON lines in one zstd stream, flushed in batches. It refuses to know what the records mean for
metrics.

A sampled journal keeps every record of the control plane (training, weights, pools, loads, timers, notes) and, of the
rollout records, those of a share of the groups chosen by a hash of the group's number: the same groups in every run.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zstandard

from testbed.core.actions import (
    AbortTurn,
    AnyAction,
    ComputeSignals,
    DrawTask,
    FetchPrefix,
    HandOver,
    PrepareEnvironment,
    ReleaseEnvironment,
    Retire,
    RunTool,
    StartTurn,
)
from testbed.core.events import (
    AnyEvent,
    EnvironmentReady,
    PrefillFinished,
    SignalReady,
    TaskArrived,
    TasksExhausted,
    ToolFinished,
    TurnFailed,
    TurnFinished,
)
from testbed.journal.format import JournalHeader, Level, Record

BATCH_RECORDS = 1024
"""Records between two flushes: what a killed process loses at most."""

_ONE, _SEVERAL, _GROUP, _START = range(1, 5)
_KIND: dict[type, int] = {
    **dict.fromkeys((EnvironmentReady, PrefillFinished, TurnFinished, TurnFailed, ToolFinished), _ONE),
    **dict.fromkeys((ReleaseEnvironment, AbortTurn, RunTool, FetchPrefix, HandOver), _ONE),
    **dict.fromkeys((SignalReady, ComputeSignals), _SEVERAL),
    **dict.fromkeys((TaskArrived, TasksExhausted, DrawTask, Retire), _GROUP),
    **dict.fromkeys((PrepareEnvironment, StartTurn), _START),
}
"""What a rollout record names: a trajectory, several, or their group. Records of other types are always kept."""


def chosen(group: int, share: float) -> bool:
    """Whether a sampled journal keeps this group: CRC-32 of its number, as a fraction of 2^32, lies below the share."""
    return zlib.crc32(group.to_bytes(8, "little", signed=True)) < share * 2**32


class GroupSample:
    """Which records a sampled journal keeps. Remembers the living trajectories of chosen groups and nothing else."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._kept: set[int] = set()

    def keep(self, event: AnyEvent, actions: Sequence[AnyAction]) -> Record | None:
        """The record to write: the event with those actions that are kept, or None if nothing of it is."""
        for a in actions:
            if _KIND.get(type(a)) == _START and chosen(a.group, self._share):  # type: ignore[union-attr]
                self._kept.add(a.trajectory)  # type: ignore[union-attr]
        actions_kept = [a for a in actions if self._keeps(a)]
        if not actions_kept and not self._keeps(event):
            return None
        for a in actions_kept:
            if type(a) is Retire:
                self._kept.difference_update(a.trajectories)
        return Record(event, actions_kept)

    def _keeps(self, what: Any) -> bool:
        kind = _KIND.get(type(what), 0)
        if kind == _ONE:
            return what.trajectory in self._kept
        if kind == _SEVERAL:
            return not self._kept.isdisjoint(what.trajectories)
        return chosen(what.group, self._share) if kind else True


class JournalWriter:
    """`write` a record per core call, then `close`. A context manager; with `level="off"` no file is made.

    Raises OSError if the file cannot be written, ValueError if the share is not between 0 and 1.
    """

    def __init__(self, path: Path | str, level: Level, sample: float, header: JournalHeader) -> None:
        if not 0.0 <= sample <= 1.0:
            raise ValueError(f"the share of groups kept is {sample}, not between 0 and 1")
        self.path = Path(path)
        self.records = 0
        """Records written so far."""
        self._encoder = msgspec.json.Encoder()
        self._lines: list[bytes] = []
        self._sample = GroupSample(sample) if level == "sampled" else None
        self._stream: zstandard.ZstdCompressionWriter | None = None
        if level != "off":
            header = msgspec.structs.replace(header, level=level, sample=sample if level == "sampled" else 1.0)
            self._stream = zstandard.ZstdCompressor(level=3).stream_writer(self.path.open("wb"), closefd=True)
            self._lines.append(self._encoder.encode(header))
            self._flush()

    def write(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        """Add one record; it reaches the disk with its batch, or at `close`."""
        if self._stream is None:
            return
        record = Record(event, actions) if self._sample is None else self._sample.keep(event, actions)
        if record is None:
            return
        self._lines.append(self._encoder.encode(record))
        self.records += 1
        if len(self._lines) >= BATCH_RECORDS:
            self._flush()

    def close(self) -> None:
        """Write what is left and end the zstd frame. Closing twice does nothing."""
        if self._stream is not None:
            self._flush()
            self._stream.close()  # type: ignore[no-untyped-call]
            self._stream = None

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        if self._stream is not None and self._lines:
            self._stream.write(b"\n".join(self._lines) + b"\n")
            self._stream.flush(zstandard.FLUSH_BLOCK)
            self._lines.clear()
