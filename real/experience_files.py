"""Experience as Parquet files: records of other people's rollouts in, ours out; one row per trajectory, list columns.

    column                    type                 what
    trajectory, group, task   int64                ids; `trajectory` is unique in the file
    prompt_tokens             int32                leading tokens that are the task's prompt
    token_ids                 list<int32>   [T]    prompt and response, as the engine saw and sampled them
    loss_mask                 list<bool>    [R]    R = T - prompt_tokens: True where the actor chose the token
    generation_log_probs      list<float32> [R]    log p when sampled; anything at masked positions
    span_versions             list<int64>   [S]    published weight versions, in order
    span_starts, span_ends    list<int32>   [S]    response-side; the spans partition the actor tokens
    reward                    float64
    finish_reason *           string               stop, length, aborted, failed; missing: ""
    turn_starts, turn_ends *  list<int32>   [N]    response-side [start, end) of each model call; missing: none
    old_log_probs *           list<float32> [R]    or null: recomputed before the update
    reference_log_probs *     list<float32> [R]    or null: by the frozen reference
    routed_experts *          list<int32>          or null: [T - 1, layers, top_k] in C order, of the shape that
    routed_layers *           int32                  these two columns say; null where there is no record
    routed_top_k *            int32
    extra.NAME *              list<float32> [R]    or null: any further signal per token

`*`: may be missing. Wider and narrower numbers of the same kind are read if they fit; there is no column for text.
Responsible for that layout and for saying which file, column and row breaks it. Refuses to know stores and trainers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from real.errors import RealError
from real.records import Record, RecordError

EXTRA = "extra."
FORMAT = b"testbed-experience"
VERSION = b"1"
ROWS = 64
"""Trajectories of one row group, and of one step of reading: with routed experts one may be tens of MiB."""

_INTS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
REQUIRED: dict[str, pa.DataType] = {
    "trajectory": pa.int64(),
    "group": pa.int64(),
    "task": pa.int64(),
    "prompt_tokens": pa.int32(),
    "token_ids": _INTS,
    "loss_mask": pa.list_(pa.bool_()),
    "generation_log_probs": _FLOATS,
    "span_versions": pa.list_(pa.int64()),
    "span_starts": _INTS,
    "span_ends": _INTS,
    "reward": pa.float64(),
}
OPTIONAL: dict[str, pa.DataType] = {
    "finish_reason": pa.string(),
    "turn_starts": _INTS,
    "turn_ends": _INTS,
    "old_log_probs": _FLOATS,
    "reference_log_probs": _FLOATS,
    "routed_experts": _INTS,
    "routed_layers": pa.int32(),
    "routed_top_k": pa.int32(),
}
MAY_BE_NULL = ("old_log_probs", "reference_log_probs", "routed_experts", "routed_layers", "routed_top_k")
DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "generation_log_probs": np.float32,
    "old_log_probs": np.float32,
    "reference_log_probs": np.float32,
    "routed_experts": np.int32,
}


class _Wrong(Exception):
    """`column` of one row breaks the layout."""

    def __init__(self, column: str, what: str) -> None:
        super().__init__(what)
        self.column = column


# --- writing ----------------------------------------------------------------------------------------------------------


def write_records(path: str | Path, records: Iterable[Record]) -> int:
    """Write a file that holds exactly these records; returns how many. The file appears as a whole or not at all.

    Raises `RealError` for a record that `read_records` would refuse, and if the file cannot be written."""
    path, held = Path(path), list(records)
    extras = sorted({name for record in held for name in record.extra})
    schema = _schema({**REQUIRED, **OPTIONAL, **{EXTRA + name: _FLOATS for name in extras}})
    seen: set[int] = set()
    for row, record in enumerate(held):
        try:
            _check(record, seen)
        except _Wrong as wrong:
            raise RealError(f"{path} is not written: column {wrong.column}, row {row}: {wrong}") from None
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
            left = iter(held)
            while rows := [_row(record, extras) for record in islice(left, ROWS)]:
                columns = {name: [row[name] for row in rows] for name in schema.names}
                writer.write_table(pa.table(columns, schema=schema))
        unfinished.replace(path)
    except OSError as error:
        raise RealError(f"{path} cannot be written: {error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return len(held)


def _schema(columns: dict[str, pa.DataType]) -> pa.Schema:
    fields = [
        pa.field(name, kind, nullable=name in MAY_BE_NULL or name.startswith(EXTRA)) for name, kind in columns.items()
    ]
    return pa.schema(fields, metadata={FORMAT: VERSION})


def _row(r: Record, extras: list[str]) -> dict[str, Any]:
    versions, starts, ends = zip(*r.spans, strict=True) if r.spans else ((), (), ())
    firsts, lasts = zip(*r.turns, strict=True) if r.turns else ((), ())
    routed = r.routed_experts
    return {
        "trajectory": r.trajectory,
        "group": r.group,
        "task": r.task,
        "prompt_tokens": r.prompt_tokens,
        "token_ids": r.token_ids,
        "loss_mask": r.loss_mask,
        "generation_log_probs": r.generation_log_probs,
        "span_versions": versions,
        "span_starts": starts,
        "span_ends": ends,
        "reward": r.reward,
        "finish_reason": r.finish_reason,
        "turn_starts": firsts,
        "turn_ends": lasts,
        "old_log_probs": r.old_log_probs,
        "reference_log_probs": r.reference_log_probs,
        "routed_experts": None if routed is None else routed.reshape(-1),
        "routed_layers": None if routed is None else routed.shape[1],
        "routed_top_k": None if routed is None else routed.shape[2],
        **{EXTRA + name: r.extra.get(name) for name in extras},
    }


# --- reading ----------------------------------------------------------------------------------------------------------


def read_records(path: str | Path) -> Iterator[Record]:
    """The records of a file in its order, a few at a time; each has passed `Record.check`.

    Raises `RealError`, at once for a file that is missing, no Parquet or has other columns, and while it is read for
    the first row that breaks the layout: file, column, row (from 0)."""
    path = Path(path)
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else f"no Parquet file: {error}"
        raise RealError(f"{path}: {reason}") from None
    _check_columns(path, file.schema_arrow)
    return _read(path, file)


def _check_columns(path: Path, schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(FORMAT, VERSION)
    if version != VERSION:
        raise RealError(f"{path}: layout version {version.decode()!r}; this release reads {VERSION.decode()}")
    known = {**REQUIRED, **OPTIONAL}
    for name in schema.names:
        if name not in known and not name.startswith(EXTRA):
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"a signal per token is called {EXTRA}{name}"
            raise RealError(f"{path}: column {name} is not of the layout; {hint}")
        kind, wanted = schema.field(name).type, known.get(name, _FLOATS)
        if not _readable(kind, wanted):
            raise RealError(f"{path}: column {name} is {kind}, expected {wanted}")
    missing = [name for name in REQUIRED if name not in schema.names]
    if missing:
        raise RealError(f"{path}: column {missing[0]} is missing ({known[missing[0]]}); there are {schema.names}")
    for pair in (("turn_starts", "turn_ends"), ("routed_experts", "routed_layers", "routed_top_k")):
        there = [name for name in pair if name in schema.names]
        if there and len(there) < len(pair):
            raise RealError(f"{path}: column {there[0]} without {', '.join(n for n in pair if n not in there)}")


def _readable(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Of one kind: whole numbers, floating-point numbers, truth values, text, or lists of one of them."""
    if pa.types.is_list(wanted):
        some_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        return some_list and _readable(kind.value_type, wanted.value_type)
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    if any(of(wanted) and of(kind) for of in kinds) or (pa.types.is_floating(wanted) and pa.types.is_integer(kind)):
        return True
    return bool(pa.types.is_string(wanted) and (pa.types.is_string(kind) or pa.types.is_large_string(kind)))


def _read(path: Path, file: pq.ParquetFile) -> Iterator[Record]:
    row, seen = 0, set[int]()
    with file:
        try:
            for batch in file.iter_batches(batch_size=ROWS):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                for i in range(batch.num_rows):
                    try:
                        record = _record({name: _value(name, column, i) for name, column in columns.items()})
                        _check(record, seen)
                    except _Wrong as wrong:
                        raise RealError(f"{path}: column {wrong.column}, row {row}: {wrong}") from None
                    yield record
                    row += 1
        except (OSError, pa.ArrowException) as error:
            raise RealError(f"{path}: cannot be read after row {row}: {error}") from None


def _value(name: str, column: pa.Array, row: int) -> Any:
    """None, a number, text, or a new array in the layout's type."""
    value, wanted = column[row], REQUIRED.get(name) or OPTIONAL.get(name, _FLOATS)
    if not value.is_valid:
        if name in MAY_BE_NULL or name.startswith(EXTRA):
            return None
        raise _Wrong(name, "null, and the column must have a value")
    try:
        if not pa.types.is_list(wanted):
            return pa.scalar(value.as_py(), wanted).as_py()
        values = value.values
        if values.null_count:
            raise _Wrong(name, f"null at position {values.is_null().index(True).as_py()}")
        return np.array(values.cast(wanted.value_type).to_numpy(zero_copy_only=False))
    except (pa.ArrowInvalid, OverflowError) as error:
        raise _Wrong(name, str(error)) from None


def _record(v: dict[str, Any]) -> Record:
    def tuples(*names: str) -> tuple[Any, ...]:
        lists = [v[name].tolist() if name in v else [] for name in names]
        for name, values in zip(names, lists, strict=True):
            if len(values) != len(lists[0]):
                raise _Wrong(name, f"{len(values)} entries, and {names[0]} has {len(lists[0])}")
        return tuple(zip(*lists, strict=True))

    return Record(
        trajectory=v["trajectory"],
        group=v["group"],
        task=v["task"],
        prompt_tokens=v["prompt_tokens"],
        token_ids=v["token_ids"],
        loss_mask=v["loss_mask"],
        generation_log_probs=v["generation_log_probs"],
        spans=tuples("span_versions", "span_starts", "span_ends"),
        reward=v["reward"],
        finish_reason=v.get("finish_reason", ""),
        old_log_probs=v.get("old_log_probs"),
        reference_log_probs=v.get("reference_log_probs"),
        routed_experts=_experts(v.get("routed_experts"), v.get("routed_layers"), v.get("routed_top_k")),
        turns=tuples("turn_starts", "turn_ends"),
        extra={n.removeprefix(EXTRA): a for n, a in v.items() if n.startswith(EXTRA) and a is not None},
    )


def _experts(flat: NDArray[np.int32] | None, layers: int | None, top_k: int | None) -> NDArray[np.int32] | None:
    if flat is None:
        return None
    if not layers or not top_k or layers < 0 or top_k < 0:
        raise _Wrong("routed_layers", f"routed_experts of {layers} layers with top_k {top_k}")
    if len(flat) % (layers * top_k):
        raise _Wrong("routed_experts", f"{len(flat)} entries are no multiple of {layers} layers x top_k {top_k}")
    return flat.reshape(-1, layers, top_k)


# --- what both sides refuse -------------------------------------------------------------------------------------------


def _check(r: Record, seen: set[int]) -> None:
    """Raise `_Wrong` for what a record or a file of records cannot be; adds the trajectory to `seen`."""
    if r.trajectory in seen:
        raise _Wrong("trajectory", f"{r.trajectory} is there twice")
    seen.add(r.trajectory)
    arrays = {name: getattr(r, name) for name in DTYPES} | {EXTRA + name: a for name, a in r.extra.items()}
    for name, values in arrays.items():
        if values is not None and values.dtype != (want := np.dtype(DTYPES.get(name, np.float32))):
            raise _Wrong(name, f"{values.dtype} values, expected {want}")
    tokens, response = len(r.token_ids), r.response_tokens
    if not 1 <= r.prompt_tokens <= tokens:
        raise _Wrong("prompt_tokens", f"{r.prompt_tokens} of {tokens} tokens")
    if tokens and r.token_ids.min() < 0:
        raise _Wrong("token_ids", f"id {r.token_ids.min()} at position {r.token_ids.argmin()}")
    for name, values in arrays.items():
        count = {"token_ids": tokens, "routed_experts": tokens - 1}.get(name, response)
        if values is not None and len(values) != count:
            what = "positions" if name == "routed_experts" else "response tokens"
            raise _Wrong(name, f"{len(values)} entries for {count} {what}")
    odd = r.loss_mask & ~np.isfinite(r.generation_log_probs)
    if odd.any():
        at = int(odd.argmax())
        raise _Wrong("generation_log_probs", f"{r.generation_log_probs[at]} at actor token {at}")
    for start, end in r.turns:
        if not 0 <= start <= end <= response:
            raise _Wrong("turn_starts", f"turn [{start}, {end}) of {response} response tokens")
    try:
        r.check()
    except RecordError as error:
        raise _Wrong("span_starts", str(error)) from None
