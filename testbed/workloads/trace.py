"""Recorded requests: Mooncake JSON lines with prefix blocks, Azure CSV without.

Responsible for reading them and for what a request is as a task: one turn, its recorded lengths, and content such
that recorded prefixes are shared. It refuses to know what the requests said: the traces hold counts and hashes
only.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from testbed.scenario.workload import TraceWorkload
from testbed.workloads.errors import WorkloadError
from testbed.workloads.files import TRACES, find, lines
from testbed.workloads.outcomes import needs_environment, outcomes
from testbed.workloads.plan import BLOCK_TOKENS, Plan, Run, Task, prompt_content


class Trace(Struct):
    """Columns of one trace in order of arrival; seconds and tokens."""

    path: Path
    sha256: str
    """Of the uncompressed file."""
    arrival_s: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    hash_ids: list[tuple[int, ...]] | None
    """One id per 512-token block, renumbered 0 .. block_count - 1 in order of first use; None where the trace has
    none."""
    block_count: int = 0

    def prompt(self, row: int, number: int, passes: int = 0) -> tuple[tuple[Run, ...], tuple[int, ...]]:
        """(runs, routing blocks) of row `row`, used by the number-th prompt overall in pass `passes` over the trace.

        Recorded blocks become runs of 512 tokens, the last one cut. Every pass has content of its own: reuse within
        a pass is as recorded, and repeating a trace adds none. Without recorded blocks each prompt is fresh.
        """
        tokens = self.prompt_tokens[row]
        if self.hash_ids is None:
            return ((prompt_content(number), 0, tokens),), fresh_blocks(number, tokens)
        first = prompt_content(passes * self.block_count)
        blocks = tuple([first - block for block in self.hash_ids[row]])
        runs = [(block, 0, BLOCK_TOKENS) for block in blocks]
        runs[-1] = (blocks[-1], 0, tokens - BLOCK_TOKENS * (len(blocks) - 1))
        return tuple(runs), blocks


_HALVINGS = 60
"""Of an interval of one swing: what is left is below the spacing of floats."""
_MOST_BLOCKS = 1 << 20
"""Blocks a fresh prompt may have (over 500 million tokens)."""


def fresh_blocks(number: int, tokens: int, block_tokens: int = BLOCK_TOKENS, shared: int = 0) -> tuple[int, ...]:
    """Routing blocks of a prompt that shares its first `shared` blocks with all others and the rest with none."""
    own = -(-tokens // block_tokens) - shared
    first = -(number + 1) * _MOST_BLOCKS - 1
    if shared == 0:
        return tuple(range(first, first - own, -1))
    return (*range(-1, -1 - shared, -1), *range(first, first - own, -1))


class _MooncakeRow(Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(name: str, base_dir: Path) -> Trace:
    """Read a bundled trace by name, or a file: `.jsonl` is Mooncake's format, `.csv` Azure's; `.gz` and `.zst` may
    follow.

    Raises WorkloadError.
    """
    path = find(name, base_dir, TRACES)
    kind = [suffix for suffix in path.suffixes if suffix in (".jsonl", ".csv")]
    if not kind:
        raise WorkloadError(path, None, "a trace's name ends in .jsonl (Mooncake) or .csv (Azure), before .gz or .zst")
    digest = hashlib.sha256()
    rows = list(_mooncake(path, digest) if kind[-1] == ".jsonl" else _azure(path, digest))
    if not rows:
        raise WorkloadError(path, None, "holds no request")
    rows.sort(key=lambda row: row[0])
    ids: dict[int, int] = {}
    hash_ids = None
    if rows[0][3]:
        hash_ids = [tuple([ids.setdefault(block, len(ids)) for block in row[3]]) for row in rows]
    return Trace(
        path,
        digest.hexdigest(),
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
        hash_ids,
        len(ids),
    )


_Row = tuple[float, int, int, tuple[int, ...]]


def _mooncake(path: Path, digest: hashlib._Hash) -> Iterator[_Row]:
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    for number, line in lines(path, digest):
        try:
            row = decode(line)
        except msgspec.DecodeError as error:
            raise WorkloadError(path, number, explain(error)) from error
        if row.input_length < 1 or row.output_length < 1:
            raise WorkloadError(path, number, "`input_length` and `output_length` must be at least 1")
        blocks = -(-row.input_length // BLOCK_TOKENS)
        if len(row.hash_ids) != blocks:
            raise WorkloadError(
                path,
                number,
                f"`hash_ids` has {len(row.hash_ids)} ids, but {row.input_length} tokens are {blocks} blocks of "
                f"{BLOCK_TOKENS}",
            )
        yield row.timestamp / 1000.0, row.input_length, row.output_length, row.hash_ids


_AZURE_COLUMNS = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_TIME = re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d+))?$")


def _azure(path: Path, digest: hashlib._Hash) -> Iterator[_Row]:
    start: tuple[datetime, float] | None = None
    last_text, last_time = b"", datetime.min
    for number, line in lines(path, digest):
        if number == 1:
            if line.removeprefix(b"\xef\xbb\xbf") != _AZURE_COLUMNS:
                raise WorkloadError(path, 1, f"the columns must be {_AZURE_COLUMNS.decode()}")
            continue
        cells = line.split(b",")
        if len(cells) != 3:
            raise WorkloadError(path, number, f"3 columns expected, {len(cells)} found")
        match = _AZURE_TIME.match(cells[0])
        if match is None:
            raise WorkloadError(path, number, f"not a time: {cells[0].decode(errors='replace')!r}")
        if match[1] != last_text:
            last_text = match[1]
            try:
                last_time = datetime.fromisoformat(last_text.decode())
            except ValueError as error:
                raise WorkloadError(path, number, f"not a time: {error}") from error
        fraction = float(b"0." + match[2]) if match[2] else 0.0
        start = start or (last_time, fraction)
        try:
            prompt, output = int(cells[1]), int(cells[2])
        except ValueError as error:
            raise WorkloadError(path, number, f"token counts must be whole numbers: {error}") from error
        if prompt < 1 or output < 1:
            raise WorkloadError(path, number, "`ContextTokens` and `GeneratedTokens` must be at least 1")
        yield (last_time - start[0]).total_seconds() + (fraction - start[1]), prompt, output, ()


def explain(error: msgspec.DecodeError) -> str:
    """What is wrong with a JSON line, in words a person can act on."""
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    return f"not a complete JSON object: {error}"


def trace_arrivals(config: TraceWorkload, trace: Trace) -> list[float]:
    """Seconds at which the requests arrive: the trace's, scaled; with a swing, the times u at which
    u + share T / (2 pi) (1 - cos(2 pi u / T)), the integral of the rate, reaches them."""
    times = [t * config.time_scale for t in trace.arrival_s]
    if config.swing is None:
        return times
    t = np.asarray(times)
    share, period = config.swing.share, config.swing.period_s
    high, low = t, t - share * period / math.pi
    for _ in range(_HALVINGS):
        u = (low + high) / 2
        late = u + share * period / (2 * math.pi) * (1 - np.cos(2 * math.pi * u / period)) > t
        low, high = np.where(late, low, u), np.where(late, u, high)
    return [float(u) for u in np.maximum(high, 0.0)]


def trace_tasks(config: TraceWorkload, trace: Trace, members: int, seed: int, ignore_eos: bool) -> Iterator[Task]:
    """One task per request, in order of arrival; all members have the recorded output length, cut at the cap."""
    environment = needs_environment(config.tools)
    results = outcomes(config.rewards, config.tools, members, seed)
    cap = config.max_response_length
    for row in range(min(len(trace.arrival_s), config.max_requests or len(trace.arrival_s))):
        tokens = cap if ignore_eos else min(trace.output_tokens[row], cap)
        output, stops = (tokens,), (tokens < cap,)
        plans = [Plan(output, stops, (), (), *outcome) for outcome in islice(results, members)]
        prompt, blocks = trace.prompt(row, row)
        yield Task(row, prompt, trace.prompt_tokens[row], blocks, BLOCK_TOKENS, environment, plans)
