"""Step times from a table of step latencies (`tables`).

Decode: between table points linear in the batch size and in the context per sequence. Prefill: the seconds of one
query-key pair are fitted to rows that have the same tokens in fewer or more prompts; what remains depends on tokens
alone and is interpolated. So a cached prefix adds the attention over it and nothing else. Rows of one prompt are met
exactly, rows of 4 and 16 prompts to about 7 % (Qwen3-0.6B: 33 %). Beyond the edges both go on linearly, and such
answers are counted. It refuses to know where a table that it is handed comes from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from math import inf
from statistics import median

from sim.costs.overheads import NONE, Overheads, collectives
from sim.costs.segments import Row, SegmentCosts, row_through
from sim.costs.tables import StepTable, find_table
from testbed.scenario.catalogue import GpuSpec, ModelSpec

PAIR_FIT_FROM_TOKENS = 8192
"""Rows with fewer tokens are not used to fit the seconds of a query-key pair: attention is a small part of them."""


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
