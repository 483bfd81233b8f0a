"""Is there an answer to be had: files that exist, lengths that can be, tables that know the engine, steps to measure.

The only module of the rules that opens files: it looks whether they are there and whether their lines are whole.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import msgspec
import zstandard
from msgspec import Struct

from testbed.run_files import JOURNAL
from testbed.scenario import fields
from testbed.scenario.catalogue import model_names
from testbed.scenario.errors import Fault
from testbed.scenario.rules.context import Context
from testbed.scenario.run import CalibratedCosts, MeasuredCosts
from testbed.scenario.training import RateTrainer
from testbed.scenario.workload import (
    GeometricLength,
    JournalWorkload,
    LengthsWorkload,
    LognormalLength,
    SessionsWorkload,
    TraceLength,
    TraceWorkload,
    UniformLength,
)

TRACES = ("azure_conv", "azure_code", "mooncake_conversation", "mooncake_synthetic")
"""Names of bundled traces."""

TABLE = "aiconfigurator_sglang_step_latency_h100_h200.csv"
TABLE_GPUS = {"h100_sxm": "H100", "h200_sxm": "H200"}
FP8_IN_TABLE = ("DeepSeek-V3",)
"""Models that the table has in fp8; all others are in bf16. KV is bf16 throughout."""

TABULATED_GPUS = ("A100", "H100", "H200", "B200")
TABULATED_PRECISIONS = ("bf16", "fp8")
TABULATED_MOST_GPUS = 8
"""What can be tabulated where the bundled table ends, with the package of the `tables` extra (`sim.costs.tabulate`)."""

INSTALL = "pip install 'rl-testbed[tables]'"
ANALYTIC = "simulation.engine_costs: {type: analytic}"


# --- lengths --------------------------------------------------------------------------------------------------------


def lengths_exist(c: Context) -> Iterator[Fault]:
    """Distributions have the moments they claim, under the cap of the workload."""
    w = c.scenario.workload
    if not isinstance(w, LengthsWorkload):
        return
    cap = w.max_response_length
    for name, length, top in (
        ("prompt", w.prompt, None),
        ("reply", w.reply, cap),
        ("turns", w.turns, None),
        ("observation", w.observation, None),
    ):
        key = f"workload.{name}"
        if isinstance(length, UniformLength) and length.low > length.high:
            yield Fault(f"{key}.low", f"low {length.low} is above high {length.high}", f"{key}.low: {length.high}")
        if isinstance(length, GeometricLength) and length.mean < 1:
            yield Fault(
                f"{key}.mean",
                f"the mean of a geometric distribution is at least 1, not {length.mean:g}",
                f"{key}.mean: 1",
            )
        if isinstance(length, LognormalLength):
            yield from _lognormal(key, length, top)


def _lognormal(key: str, length: LognormalLength, cap: int | None) -> Iterator[Fault]:
    if cap is None:
        if length.capped_share is not None:
            yield Fault(
                f"{key}.capped_share", "nothing caps these lengths, so no share of them is capped", f"{key}.sigma: 1.0"
            )
        return
    if length.mean >= cap:
        what = f"a mean of {length.mean:g} tokens after the cut at max_response_length {cap} cannot be"
        yield Fault(f"{key}.mean", what, f"workload.max_response_length: {math.ceil(4 * length.mean)}")
    elif length.capped_share is not None and length.capped_share * cap >= length.mean:
        what = f"a share of {length.capped_share:g} at the cap of {cap} alone gives a mean over {length.mean:g}"
        yield Fault(f"{key}.capped_share", what, f"{key}.capped_share: {math.floor(50 * length.mean / cap) / 100:g}")


# --- files ----------------------------------------------------------------------------------------------------------


class _Call(Struct):
    input_toks: int
    output_toks: int
    tool_duration_ns: float = 0.0


class _Session(Struct):
    session_id: str | int
    arrival_time_ns: float
    sub_requests: list[_Call]


class _Request(Struct):
    timestamp: float
    input_length: int
    output_length: int


def files_exist(c: Context) -> Iterator[Fault]:
    """Every file that the scenario names is there, and the lines of sessions and traces are whole."""
    w, costs = c.scenario.workload, c.scenario.simulation.engine_costs
    if isinstance(w, TraceWorkload):
        yield from _trace(c, "workload.trace", w.trace)
    elif isinstance(w, LengthsWorkload) and isinstance(w.prompt, TraceLength):
        yield from _trace(c, "workload.prompt.trace", w.prompt.trace)
    elif isinstance(w, SessionsWorkload):
        yield from _lines(c, "workload.path", w.path, _Session)
    elif isinstance(w, JournalWorkload):
        yield from _run_folder(c, w.run)
    if isinstance(costs, CalibratedCosts):
        yield from _exists(
            c, "simulation.engine_costs.profile", costs.profile, "a profile is made by `testbed calibrate`"
        )


def _trace(c: Context, key: str, name: str) -> Iterator[Fault]:
    if name in TRACES:
        return
    if not (c.base_dir / name).is_file():
        near = fields.closest(name, TRACES, cutoff=0.5) or _beside(c.base_dir / name)
        yield Fault(key, f"no bundled trace and no file is called `{name}`; bundled: {', '.join(TRACES)}", near)
    elif ".jsonl" in Path(name).suffixes:
        yield from _lines(c, key, name, _Request)


def _exists(c: Context, key: str, name: str, hint: str = "") -> Iterator[Fault]:
    if not (c.base_dir / name).is_file():
        yield Fault(key, f"no such file: {c.base_dir / name}", _beside(c.base_dir / name) or hint)


def _run_folder(c: Context, name: str) -> Iterator[Fault]:
    path = c.base_dir / name
    if not path.exists():
        yield Fault("workload.run", f"no such run folder or journal: {path}", _beside(path))
    elif path.is_dir() and not (path / JOURNAL).is_file():
        yield Fault("workload.run", f"{path} holds no journal.jsonl.zst", "a run made with run.journal: full")


def _beside(path: Path) -> str:
    """The name in the same folder that is most like the missing one."""
    if not path.parent.is_dir():
        return ""
    return fields.closest(path.name, sorted(p.name for p in path.parent.iterdir()))


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True))
    return path.open("rb")


def _lines(c: Context, key: str, name: str, kind: type[Struct]) -> Iterator[Fault]:
    """The first line that is not what the file's format says, with its number."""
    path = c.base_dir / name
    missing = list(_exists(c, key, name))
    if missing:
        yield from missing
        return
    decode = msgspec.json.Decoder(kind).decode
    number = 0
    try:
        with _open(path) as file:
            for line in file:
                number += 1
                if line.strip():
                    decode(line)
    except msgspec.ValidationError as err:
        yield Fault(key, f"not a line of this format: {err}", where=f"{path}:{number}")
    except msgspec.DecodeError as err:
        yield Fault(key, f"not a complete JSON object: {err}", where=f"{path}:{number}")
    except (OSError, EOFError, zstandard.ZstdError) as err:
        yield Fault(key, f"cannot be read to its end: {err}", where=f"{path}:{number + 1}")


# --- costs and length of the run ------------------------------------------------------------------------------------


@cache
def _measured() -> frozenset[tuple[str, str, int]]:
    """(model, GPU, TP) of the bundled latency table."""
    text = (files("testbed") / "data" / TABLE).read_text("utf-8")
    rows = csv.DictReader(io.StringIO(text))
    return frozenset((r["model"].split("/")[-1], TABLE_GPUS[r["system"]], int(r["tp_size"])) for r in rows)


def table_knows_engine(c: Context) -> Iterator[Fault]:
    """Measured step times exist, or can be tabulated, for this model, GPU, engine size and precision (only the
    simulated backend asks)."""
    if not isinstance(c.scenario.simulation.engine_costs, MeasuredCosts) or c.model is None:
        return
    if not _can_be_tabulated(c):
        yield from _missing_from_table(c, c.model.name, ANALYTIC)
    elif find_spec("aiconfigurator_core") is None:
        yield from _missing_from_table(c, c.model.name, f"{INSTALL}, or {ANALYTIC}")


def _can_be_tabulated(c: Context) -> bool:
    """Whether the package has such engines at all. If it lacks a kernel of this one, that shows when it is asked."""
    e = c.scenario.rollout.engine
    return (
        c.scenario.cluster.gpu in TABULATED_GPUS
        and c.engine_gpus <= TABULATED_MOST_GPUS
        and e.weight_precision in TABULATED_PRECISIONS
        and e.kv_cache_dtype == "bf16"
    )


def _missing_from_table(c: Context, name: str, ways_out: str) -> Iterator[Fault]:
    """Why the bundled table has no rows for an engine of the model `name`. `ways_out`: what works without them."""
    gpu, tp = c.scenario.cluster.gpu, c.engine_gpus
    e = c.scenario.rollout.engine
    known = {m.lower(): m for m, _, _ in _measured()}
    model = known.get(name.lower())
    key = "simulation.engine_costs.type"
    if model is None:
        near = fields.closest(name, known.values(), cutoff=0.5)
        hint = f"{ways_out}, or model.name: {near}" if near in model_names() else ways_out
        what = f"no measured step times for {name}; the table has {', '.join(sorted(known.values()))}"
        yield Fault(key, what, hint, see=f"model.{'path' if c.scenario.model.type == 'config_json' else 'name'}")
        return
    sizes = sorted(t for m, g, t in _measured() if m == model and g == gpu)
    if not sizes:
        gpus = sorted({g for m, g, _ in _measured() if m == model})
        what = f"no measured step times for {model} on {gpu}"
        yield Fault(key, what, f"cluster.gpu: {' or '.join(gpus)}, or {ways_out}", see="cluster.gpu")
    elif tp not in sizes:
        size = "placement.rollout_num_gpus_per_engine"
        near = next((f"{size}: {n}, or " for n in c.engine_sizes() if n in sizes), "")
        had = ", ".join(map(str, sizes))
        what = f"no measured step times for {model} on engines of {tp} {gpu}; the table has {had}"
        yield Fault(key, what, f"{near}{ways_out}", see=size)
    precision = "fp8" if model in FP8_IN_TABLE else "bf16"
    if sizes and (e.weight_precision != precision or e.kv_cache_dtype != "bf16"):
        asked = f"{e.weight_precision} weights and {e.kv_cache_dtype} KV"
        what = f"step times of {model} were measured with {precision} weights and bf16 KV, not {asked}"
        yield Fault(key, what, ways_out, see="rollout.engine.weight_precision")


def one_training_rate(c: Context) -> Iterator[Fault]:
    """A plain rate is in trajectories or in tokens per second."""
    cost = c.scenario.training.cost
    if not isinstance(cost, RateTrainer) or (cost.samples_per_s is None) != (cost.tokens_per_s is None):
        return
    what = (
        "neither samples_per_s nor tokens_per_s is given"
        if cost.samples_per_s is None
        else "both samples_per_s and tokens_per_s are given"
    )
    yield Fault("training.cost", what, "training.cost: {type: rate, samples_per_s: 2.75}")


def steps_after_warmup(c: Context) -> Iterator[Fault]:
    """Means need at least one step that is not warm-up."""
    run = c.scenario.run
    if run.warmup_steps >= run.num_rollout:
        what = f"all {run.num_rollout} steps are warm-up, nothing is left to average"
        near = f"run.warmup_steps: {run.num_rollout - 1}, or run.num_rollout: {run.warmup_steps + 1}"
        yield Fault("run.warmup_steps", what, near, see="run.num_rollout")


def _tasks(c: Context) -> tuple[str, int] | None:
    """(key, number) of the tasks that the workload is limited to."""
    w = c.scenario.workload
    key, n = {
        "lengths": ("num_tasks", getattr(w, "num_tasks", None)),
        "trace": ("max_requests", getattr(w, "max_requests", None)),
        "sessions": ("max_sessions", getattr(w, "max_sessions", None)),
    }.get(w.type, ("", None))
    return (f"workload.{key}", n) if n is not None else None


def enough_tasks(c: Context) -> Iterator[Fault]:
    """The data set fills at least one batch."""
    found = _tasks(c)
    if found is not None and found[1] < c.batch:
        key, n = found
        yield Fault(
            key,
            f"{n} tasks never fill a batch of {c.batch} groups",
            f"{key}: {c.batch}, or algorithm.rollout_batch_size: {n}",
        )


def page_divides_chunk(c: Context) -> Iterator[Fault]:
    """A prefill chunk is a whole number of pages."""
    e = c.scenario.rollout.engine
    if e.chunked_prefill_size > 0 and e.chunked_prefill_size % e.page_size:
        what = f"chunks of {e.chunked_prefill_size} tokens are not whole pages of {e.page_size}"
        near = e.chunked_prefill_size // e.page_size * e.page_size
        yield Fault("rollout.engine.chunked_prefill_size", what, f"rollout.engine.chunked_prefill_size: {near}")


# --- remarks --------------------------------------------------------------------------------------------------------


def data_ends_early(c: Context) -> Iterator[str]:
    found, run = _tasks(c), c.scenario.run
    uses = c.scenario.experience.selection.use_count
    if found is not None and c.batch <= found[1] and found[1] * uses < run.num_rollout * c.batch:
        batches = found[1] * uses // c.batch
        yield f"{found[0]} {found[1]} ends the run after at most {batches} of {run.num_rollout} batches"
