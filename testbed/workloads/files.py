"""Finding and reading data files: the bundled traces by name, others relative to the scenario file, plain or
compressed.

Responsible for turning every way a file can be broken into a WorkloadError with path and line. It refuses to know
formats of lines.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard

import testbed
from testbed.workloads.errors import WorkloadError

TRACES: dict[str, str] = {
    "azure_code": "azure_llm_2023_code.csv.gz",
    "azure_conv": "azure_llm_2023_conv.csv.gz",
    "mooncake_conversation": "mooncake_conversation_trace.jsonl.gz",
    "mooncake_synthetic": "mooncake_synthetic_trace.jsonl.gz",
}
"""Bundled traces, in `testbed/data/traces`."""


def find(name: str, base_dir: Path, known: dict[str, str] | None = None) -> Path:
    """A bundled trace's path if `name` is in `known`, else `base_dir / name`. Raises WorkloadError if there is no
    such file."""
    known = known or {}
    if name in known:
        return Path(testbed.__file__).parent / "data" / "traces" / known[name]
    path = base_dir / name
    if path.exists():
        return path
    message = "no such file"
    if known:
        message += f", and not a bundled trace ({', '.join(sorted(known))})"
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(name, known, 1, 0.5) or difflib.get_close_matches(path.name, beside, 1, 0.6)
    raise WorkloadError(path, None, message + (f" (nearest: {near[0]})" if near else ""))


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        raw = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(raw, 1 << 20)
    return path.open("rb")


def lines(path: Path, digest: hashlib._Hash | None = None) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its end) of each line that is not empty; `digest` is fed everything read.

    Raises WorkloadError if the file cannot be read or its compressed data is damaged or cut off.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if digest is not None:
                    digest.update(line)
                line = line.strip()
                if line:
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise WorkloadError(path, number + 1, f"compressed data is damaged or cut off: {error}") from error
    except OSError as error:
        raise WorkloadError(path, None, f"cannot be read: {error.strerror or error}") from error
