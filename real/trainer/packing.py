"""Token-packed micro-batches: several sequences in one row, each with its own positions and blind to the others.

Responsible for which sequences share a row and where in it the predictions of their response tokens are. Knows no
model: that the sequences of a row do not see each other is transformers' reading of position ids that restart (a
block-diagonal causal mask, T x T for a row of T tokens under `sdpa`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from real.records import Record
from testbed.packing import bins


@dataclass(frozen=True)
class Row:
    """T tokens of one or more records, K of which are response-side."""

    records: tuple[int, ...]
    """Indices into the list that was packed, in row order."""
    token_ids: NDArray[np.int64]
    """[T]"""
    position_ids: NDArray[np.int64]
    """[T]; 0 at the start of each sequence."""
    predictors: NDArray[np.int64]
    """[K]: row positions whose logits score the response tokens; token t is scored at t - 1."""
    chosen: NDArray[np.int64]
    """[K]: those response tokens."""


EMPTY_ROW = Row((), np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
"""One token and nothing to score: what a rank runs when others have more micro-batches (FSDP's passes are collective).
"""


def pack(records: Sequence[Record], max_tokens: int) -> list[Row]:
    """Rows of at most `max_tokens` tokens that hold every record once."""
    return [_row(records, indices) for indices in bins([len(r.token_ids) for r in records], max_tokens)]


def _row(records: Sequence[Record], indices: list[int]) -> Row:
    members = [records[i] for i in indices]
    lengths = [len(r.token_ids) for r in members]
    starts = np.cumsum([0, *lengths[:-1]])
    ids = np.concatenate([r.token_ids for r in members]).astype(np.int64)
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    chosen = np.concatenate(
        [s + np.arange(r.prompt_tokens, n) for s, r, n in zip(starts, members, lengths, strict=True)]
    ).astype(np.int64)
    return Row(tuple(indices), ids, positions, chosen - 1, ids[chosen])


def row_experts(row: Row, records: Sequence[Record], layers: int, top_k: int) -> NDArray[np.int64]:
    """[T, layers, top_k]: the experts that ran each position of the row in generation; -1 where no record says. A
    sequence's last token is always such a position: it was never an input."""
    found = np.full((len(row.token_ids), layers, top_k), -1, dtype=np.int64)
    start = 0
    for i in row.records:
        record = records[i]
        if record.routed_experts is not None:
            found[start : start + len(record.routed_experts)] = record.routed_experts[:, :layers]
        start += len(record.token_ids)
    return found
