"""Step tables of the engine kinds that the measured serving points are of.

The bundled file was computed with `aiconfigurator-core` from kernel tables measured on the GPU, as the table of
`sim.costs.measured`, but for both engines and for more precisions and splits. It refuses to know what is simulated
with them.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from msgspec.structs import astuple, fields

from sim.costs.errors import CostModelError
from sim.costs.tables import StepTable, step_tables
from sim.costs.tabulate import whole_grid
from testbed.commands.serving_points import EngineKind

TABLES = "serving_step_tables.csv.gz"
VERSIONS = {"sglang": "0.5.14", "vllm": "0.24.0"}
"""Versions of the engines whose kernels were measured."""
KEY = tuple(f.name for f in fields(EngineKind))
COLUMNS = (*KEY, "phase", "batch_size", "context_tokens", "latency_ms")


@lru_cache(maxsize=1)
def tables() -> dict[EngineKind, StepTable]:
    """All tables of the bundled file."""
    raw = (files("testbed") / "data" / TABLES).read_bytes()
    return read(gzip.decompress(raw).decode().splitlines())


def read(lines: Iterable[str]) -> dict[EngineKind, StepTable]:
    found: dict[EngineKind, StepTable] = {}
    for r in csv.DictReader(lines):
        text = [r[name] for name in KEY]
        kind = EngineKind(*text[:4], text[4] or None, text[5], *map(int, text[6:]))  # type: ignore[arg-type, call-arg]
        table = found.setdefault(kind, StepTable(kind.moe_ep_size if kind.moe else None, {}, {}))
        batch, tokens, seconds = int(r["batch_size"]), int(r["context_tokens"]), float(r["latency_ms"]) * 1e-3
        if r["phase"] == "decode_step":
            table.decode[tokens, batch] = seconds
        else:
            table.prefill[batch, tokens] = seconds
    return {k: StepTable(t.expert_parallel, whole_grid(t.decode), t.prefill) for k, t in found.items()}


def tabulate(kinds: Iterable[EngineKind], path: Path, said: Callable[[str], None]) -> None:
    """Ask the package for every kind on the grid of `sim.costs.measured`'s table, and write the file.

    Kinds that it has nothing of are left out and `said`. Raises `CostModelError` if it is not installed.
    """
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as e:
        raise CostModelError("aiconfigurator-core is not installed", "pip install 'rl-testbed[tables]'") from e
    grid = next(iter(step_tables().values()))
    rows: list[tuple[Any, ...]] = []
    for kind in kinds:
        options: dict[str, Any] = {
            "backend_version": VERSIONS[kind.backend],
            "tp_size": kind.tp_size,
            "gemm_quant_mode": kind.gemm,
            "fmha_quant_mode": "bfloat16",
            "kvcache_quant_mode": kind.kv_cache,
        }
        if kind.moe:
            options |= {
                "moe_tp_size": kind.moe_tp_size,
                "moe_ep_size": kind.moe_ep_size,
                "moe_quant_mode": kind.moe,
                "attention_dp_size": 1,
            }
        try:
            engine = EngineHandle.compile(kind.model, kind.system, kind.backend, **options)
        except (ValueError, RuntimeError, KeyError) as e:
            said(f"{kind}: {str(e).splitlines()[0][:200]}")
            continue
        key = tuple(x or "" for x in astuple(kind))
        before = len(rows)
        for prompts, tokens in grid.prefill:
            _add(rows, (*key, "prefill", prompts, tokens), engine.predict_prefill_latency, prompts, tokens, 0)
        for context, batch in grid.decode:
            _add(rows, (*key, "decode_step", batch, context), engine.decode_step_latency, batch, context, 2)
        said(f"{kind}: {len(rows) - before} points")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
    path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))


def _add(rows: list[Any], key: tuple[Any, ...], ask: Callable[..., float], *question: int) -> None:
    """One point, unless the package has no data for it."""
    try:
        milliseconds = ask(*question)
    except RuntimeError:
        return
    if 0 < milliseconds < inf:
        rows.append((*key, f"{milliseconds:.4f}"))
