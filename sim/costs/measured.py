"""Step times from a table of SGLang step latencies (computed from measured kernel tables).

The bundled table is of SGLang 0.5.14 on H100 and H200; tables of other engines come from `sim.costs.tabulate`.

Decode: between table points linear in the batch size and in the context per sequence. Prefill: the seconds of one
query-key pair are fitted to rows that have the same tokens in fewer or more prompts; what remains depends on tokens
alone and is interpolated. So a cached prefix adds the attention over it and nothing else. Rows of one prompt are met
exactly, rows of 4 and 16 prompts to about 7 % (Qwen3-0.6B: 33 %). Beyond the edges both go on linearly, and such
answers are counted. It refuses to know where a table that it is handed comes from.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.resources import files
from math import inf, log
from statistics import median

from msgspec import Struct

from sim.costs.errors import CostModelError
from sim.costs.overheads import NONE, Overheads, collectives
from sim.costs.segments import Row, SegmentCosts, row_through
from testbed.scenario.catalogue import GpuSpec, ModelSpec, model_preset

TABLE = "aiconfigurator_sglang_step_latency_h100_h200.csv"
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm"}
WEIGHT_PRECISION = {"DeepSeek-V3": "fp8"}
"""Precision of a model's rows where it is not bf16. KV is bf16 throughout."""
PAIR_FIT_FROM_TOKENS = 8192
"""Rows with fewer tokens are not used to fit the seconds of a query-key pair: attention is a small part of them."""

Key = tuple[str, str, int]
"""(GPU or system, model, tensor-parallel size)"""


class StepTable(Struct, frozen=True):
    """Rows of one engine kind, seconds; decode by (context per sequence, batch), prefill by (prompts, tokens of
    each)."""

    expert_parallel: int | None
    decode: dict[tuple[int, int], float]
    prefill: dict[tuple[int, int], float]


@lru_cache(maxsize=1)
def step_tables() -> dict[Key, StepTable]:
    """All tables of the bundled file."""
    gpus = {system: gpu for gpu, system in SYSTEMS.items()}
    with (files("testbed") / "data" / TABLE).open(encoding="utf-8") as f:
        return {(gpus[system], name.split("/")[-1], tp): t for (system, name, tp), t in read_tables(f).items()}


def read_tables(lines: Iterable[str]) -> dict[Key, StepTable]:
    """Tables of a CSV file by (system, model, TP) as written there (columns: `testbed/data/README.md`).

    Raises `KeyError` or `ValueError` if it is not such a file.
    """
    tables: dict[Key, StepTable] = {}
    for r in csv.DictReader(lines):
        key = (r["system"], r["model"], int(r["tp_size"]))
        if key not in tables:
            tables[key] = StepTable(int(float(r["moe_ep_size"])) if r["moe_ep_size"] else None, {}, {})
        batch, tokens, seconds = int(r["batch_size"]), int(r["context_tokens"]), float(r["latency_ms"]) * 1e-3
        if r["phase"] == "decode_step":
            tables[key].decode[tokens, batch] = seconds
        else:
            tables[key].prefill[batch, tokens] = seconds
    return tables


def find_table(model: ModelSpec, gpu: str, tensor_parallel: int, precision: str, kv_dtype: str) -> StepTable:
    """The rows of this engine kind. Raises `CostModelError` that names the nearest one the table has."""
    tables = step_tables()
    name = next((k[1] for k in tables if k[1].lower() == model.name.lower()), None)
    asked = f"{model.name} in {precision} with {kv_dtype} KV on {gpu}, TP {tensor_parallel}"
    key = (gpu, name or "", tensor_parallel)
    if key in tables and precision == WEIGHT_PRECISION.get(key[1], "bf16") and kv_dtype == "bf16":
        return tables[key]
    near = min(tables, key=lambda k: _distance(k, model, gpu, tensor_parallel))
    fits = f"{near[1]} in {WEIGHT_PRECISION.get(near[1], 'bf16')} with bf16 KV on {near[0]}, TP {near[2]}"
    raise CostModelError(
        f"the table of measured steps has no {asked}", f"{fits}; or `engine_costs: {{type: analytic}}`"
    )


def _distance(key: Key, model: ModelSpec, gpu: str, tensor_parallel: int) -> tuple[float, bool, float]:
    """Same model first (else the nearest in active parameters), then the same GPU, then the nearest split."""
    size = abs(log(model_preset(key[1]).active_params / model.active_params))
    return (0.0 if key[1].lower() == model.name.lower() else size), key[0] != gpu, abs(log(key[2] / tensor_parallel))


class TableCostModel(SegmentCosts):
    """Interpolates the rows of one engine kind, and adds the overheads of a step that has `collectives` all-reduces."""

    kind = "measured"

    def __init__(self, table: StepTable, overheads: Overheads = NONE, collectives: int = 0) -> None:
        super().__init__()
        self._fixed_s = overheads.step_s + overheads.collective_s * collectives
        self._sequence_s = overheads.sequence_s
        self._decode = table.decode
        self._contexts = sorted({c for c, _ in table.decode})
        self._batches = sorted({b for _, b in table.decode})
        self._pair_s = _seconds_per_pair(table.prefill)
        self._tokens, self._rest, self._slopes = _without_attention(table.prefill, self._pair_s)
        self._most_pairs = max(b * s * s / 2 for b, s in table.prefill)

    def _row(self, batch: int) -> Row:
        """Points of this batch size: between the two nearest measured ones, beyond the last on the line of the last
        two."""
        sizes = self._batches
        i = min(max(bisect_right(sizes, batch) - 1, 0), len(sizes) - 2)
        b0, b1 = sizes[i], sizes[i + 1]
        share = (batch - b0) / (b1 - b0)
        more = self._fixed_s + self._sequence_s * batch
        points = []
        for c in self._contexts:
            t0, t1 = self._decode[c, b0], self._decode[c, b1]
            points.append((float(c), (t0 + (t1 - t0) * share if share else t0) + more))
        inside = sizes[0] <= batch <= sizes[-1]
        low, high = (float(self._contexts[0]), float(self._contexts[-1])) if inside else (inf, -inf)
        return row_through(points, low, high)

    def _prefill(self, new_tokens: int, attention: float, requests: int) -> tuple[float, bool]:
        grid = self._tokens
        tokens = max(new_tokens, grid[0])  # fewer cost the same: the step is bound by reading the weights
        i = min(bisect_right(grid, tokens) - 1, len(self._slopes) - 1)
        rest = self._rest[i] + self._slopes[i] * (tokens - grid[i])
        outside = tokens > grid[-1] or attention > self._most_pairs
        more = self._fixed_s + self._sequence_s * requests
        return max(rest, 0.0) + self._pair_s * attention + more, outside


class MeasuredCostModel(TableCostModel):
    """Interpolates one engine kind's rows: of `table`, else of the bundled table (`CostModelError` if it has none)."""

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel: int,
        precision: str = "bf16",
        kv_dtype: str = "bf16",
        table: StepTable | None = None,
        overheads: Overheads = NONE,
    ) -> None:
        table = table or find_table(model, gpu.name, tensor_parallel, precision, kv_dtype)
        super().__init__(table, overheads, collectives(model.layers, tensor_parallel))


def can_fit_pairs(prefill: dict[tuple[int, int], float]) -> bool:
    """Whether there are rows of equal token count in b and 4 b prompts."""
    return next(_pair_rows(prefill), None) is not None


def _seconds_per_pair(prefill: dict[tuple[int, int], float]) -> float:
    """Median, over rows of equal token count in b and 4 b prompts, of time difference / difference in pairs."""
    return max(median(_pair_rows(prefill)), 0.0)


def _pair_rows(prefill: dict[tuple[int, int], float]) -> Iterator[float]:
    for (b, s), seconds in prefill.items():
        if b * s >= PAIR_FIT_FROM_TOKENS and (4 * b, s // 4) in prefill:
            yield (seconds - prefill[4 * b, s // 4]) / (b * s * s / 2 - 4 * b * (s // 4) ** 2 / 2)


def _without_attention(
    prefill: dict[tuple[int, int], float], pair_s: float
) -> tuple[list[float], list[float], list[float]]:
    """(tokens, seconds without attention, slopes), by tokens; of single prompts where the table has them, else the
    fewest."""
    fewest: dict[int, tuple[int, float]] = {}
    for (b, s), seconds in sorted(prefill.items()):
        fewest.setdefault(b * s, (b, seconds - pair_s * b * s * s / 2))
    tokens = sorted(fewest)
    rest = [fewest[t][1] for t in tokens]
    slopes = [(rest[i + 1] - rest[i]) / (tokens[i + 1] - tokens[i]) for i in range(len(tokens) - 1)]
    return [float(t) for t in tokens], rest, slopes
