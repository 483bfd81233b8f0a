"""Reads a journal record by record. It refuses to guess: a broken line is an error with its place, a cut-off tail is
reported.

A run that was interrupted leaves a zstd frame without an end. Everything up to the cut is read; `Records.truncated`
then says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from testbed.journal.format import FORMAT, JournalError, JournalHeader, Record

_CHUNK = 1 << 18


class Records(Iterator[Record]):
    """The records of a journal, in order. Raises `JournalError` at a line that is not a record.

    `truncated`, once all are read: None, or a sentence that says where the journal breaks off.
    """

    def __init__(self, path: Path, lines: _Lines) -> None:
        self.path = path
        self._lines = lines
        self._decoder = msgspec.json.Decoder(Record)

    @property
    def truncated(self) -> str | None:
        return self._lines.truncated

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        line = next(self._lines)
        try:
            return self._decoder.decode(line)
        except msgspec.MsgspecError as e:
            raise JournalError(self.path, self._lines.number, f"not a record of a journal ({e})") from None


def read_journal(path: Path | str) -> tuple[JournalHeader, Records]:
    """The header, and an iterator over the records. Raises `JournalError` if there is no such file or it is no
    journal."""
    path = Path(path)
    if not path.is_file():
        raise JournalError(path, 0, "no such journal")
    lines = _Lines(path)
    first = next(lines, b"")
    try:
        header = msgspec.json.decode(first, type=JournalHeader)
    except msgspec.MsgspecError as e:
        raise JournalError(path, 1, f"not a journal: its first line is not a header ({e})") from None
    if header.format != FORMAT:
        raise JournalError(path, 1, f"format {header.format!r}, this version reads {FORMAT!r}")
    return header, Records(path, lines)


def require_complete(path: Path | str, header: JournalHeader, purpose: str = "replayed") -> None:
    """Raise `JournalError` if the journal is sampled: a core that is given some of the events cannot repeat its
    decisions."""
    if header.level != "full":
        raise JournalError(
            path,
            1,
            f"a sampled journal ({header.sample:.3g} of the groups) cannot be {purpose}; "
            "run again with `run.journal: full`",
        )


class _Lines(Iterator[bytes]):
    """Complete lines of the decompressed stream; `number` is that of the last one given out."""

    def __init__(self, path: Path) -> None:
        self.number = 0
        self.truncated: str | None = None
        self._path = path
        self._lines = self._read()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        line = next(self._lines)
        self.number += 1
        return line

    def _read(self) -> Iterator[bytes]:
        rest = b""
        with self._path.open("rb") as file:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while chunk := file.read(_CHUNK):
                try:
                    data = frame.decompress(chunk)
                except zstandard.ZstdError as e:
                    raise JournalError(self._path, self.number + 1, f"not readable as zstd ({e})") from None
                *complete, rest = (rest + data).split(b"\n")
                yield from complete
                if frame.eof:
                    break
        if rest or not frame.eof:
            self.truncated = (
                f"{self._path}: breaks off after line {self.number}: the run was interrupted or is still going on"
            )
