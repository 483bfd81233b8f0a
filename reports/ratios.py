"""By how much the probabilities of single tokens differ, in words and numbers: histograms of two ratios, of real runs.

`engine_ratio` is what kernels and number formats make of equal weights, `ratio` what the loss reads and its clip holds
back. All batches and seeds of a variant together: a tail of one token in ten thousand needs many. It refuses to know
markup and geometry."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from reports import numbers
from reports.comparison import Comparison, Figures, VariantRuns
from reports.sentences import Letter, Number, Sentence, joined, say
from reports.view import View
from testbed.metrics.ratios import LEAST, PER_DECADE, added, edges, middle

KIND = "measured"
MIDDLE = 0.99
"""Share of the tokens whose range is said."""
FAR = 3 * PER_DECADE
"""Bins beyond it hold ratios of exp(0.1) = 1.105 and more, or the inverse and less."""
MOST_NAMED = 3


class Ratio(Struct, frozen=True):
    label: str
    words: str
    """In the middle of a sentence."""
    term: str
    """Glossary id."""


RATIOS: dict[str, Ratio] = {
    "engine_ratio": Ratio("Engine ratio", "the trainer’s probability over the engine’s", "g-l-engine-ratio"),
    "ratio": Ratio("Loss ratio", "the ratio that the loss reads", "g-l-ratio"),
}
"""Name in `StepRecord.ratios` -> what it is, in the order of page and tables."""


def counts(v: VariantRuns, name: str) -> dict[int, int]:
    """Bin -> tokens over all batches and seeds; empty where there are none."""
    return added(s.ratios.get(name, {}) for r in v.runs for s in r.steps)


def shown(comparison: Comparison) -> list[str]:
    """Those that some variant has; of real runs only."""
    if not comparison.real:
        return []
    return [name for name in RATIOS if any(counts(v, name) for v in comparison.variants)]


def ratio_text(value: float) -> str:
    """`0.97`, `1.0001`, `2.7`, `0`, `∞`: as many digits as the distance from 1 needs."""
    if math.isinf(value):
        return "∞"
    distance = abs(value - 1)
    if distance >= 0.1:
        return f"{value:.3g}"
    return f"{value:.{max(2, math.ceil(-math.log10(distance) - 0.01))}f}"


def range_text(bins: dict[int, int]) -> str:
    """`0.97 to 1.03`: at least `MIDDLE` of the tokens lie in it."""
    low, high = middle(bins, MIDDLE)
    return f"{ratio_text(low)} to {ratio_text(high)}"


def far_share(bins: dict[int, int]) -> float:
    """Share of the tokens whose probabilities differ by more than a tenth."""
    return sum(n for k, n in bins.items() if abs(k) > FAR) / sum(bins.values())


def same_share(bins: dict[int, int]) -> float:
    """Share of the tokens whose probabilities are the same to 0.01 %."""
    return bins.get(0, 0) / sum(bins.values())


def _width(bins: dict[int, int]) -> float:
    """Of that range, in ln."""
    low, high = middle(bins, MIDDLE)
    return max(-math.log(low), math.log(high)) if low > 0 else math.inf


def _having(view: View, name: str) -> list[tuple[Figures, dict[int, int]]]:
    pairs = zip(view.figures, view.comparison.variants, strict=True)
    return [(f, bins) for f, v in pairs if (bins := counts(v, name))]


def ratio_heading(view: View) -> Sentence:
    """Between what 99 % of the tokens lie; of many variants, in the one that spreads least and in the one that does
    most."""
    name = shown(view.comparison)[0]
    found = _having(view, name)

    def one(f: Figures, bins: dict[int, int]) -> Sentence:
        low, high = middle(bins, MIDDLE)
        letter = () if view.comparison.single else say(" (", Letter(f.letter), ")")
        return say(Number(ratio_text(low), KIND), " and ", Number(ratio_text(high), KIND), letter)

    if len(found) > MOST_NAMED:
        found = [pick(found, key=lambda pair: _width(pair[1])) for pick in (min, max)]
    share = numbers.percent(MIDDLE)
    head = f"For {share} of tokens {RATIOS[name].words} lies between "
    return say(head, joined([one(*pair) for pair in found], ", "))


def ratio_table(view: View) -> dict[str, Any]:
    """Range, equal and far shares of each ratio, and where the loss clips. Cells as in `reports.learning`."""
    names = shown(view.comparison)
    low, high = edges(-FAR - 1)[1], edges(FAR + 1)[0]
    head = []
    for n in names:
        r = RATIOS[n]
        head += [
            (r.label, f"{numbers.percent(MIDDLE)} of the tokens", r.term),
            ("equal", f"to {numbers.percent(LEAST, 2)}", r.term),
            ("outside", f"{ratio_text(low)} to {ratio_text(high)}", r.term),
        ]
    clips = any(v.runs[0].clip for v in view.comparison.variants)
    head += [("Clip", "holds back beyond", "g-l-clip")] if clips else []
    rows = []
    for f, v in zip(view.figures, view.comparison.variants, strict=True):
        cells: list[tuple[str, str]] = []
        for n in names:
            bins = counts(v, n)
            if not bins:
                cells += [("·", "")] * 3
                continue
            shares = [(numbers.percent(x, 2), KIND) for x in (same_share(bins), far_share(bins))]
            cells += [(range_text(bins), KIND), *shares]
        clip = v.runs[0].clip
        cells += [(f"{clip[0]:.4g} to {clip[1]:.4g}" if clip else "·", "")] if clips else []
        rows.append({"letter": f.letter, "name": f.name, "cells": cells})
    return {"head": head, "rows": rows}


def shares(v: VariantRuns) -> dict[str, list[dict[str, float | None]]]:
    """For files: name -> bins with their edges (null: no end) and their share of the tokens."""
    out: dict[str, list[dict[str, float | None]]] = {}
    for name in RATIOS:
        bins = counts(v, name)
        total = sum(bins.values())
        if total:
            ends = {k: edges(k) for k in bins}
            out[name] = [
                {"low": ends[k][0], "high": None if math.isinf(ends[k][1]) else ends[k][1], "share": n / total}
                for k, n in bins.items()
            ]
    return out


def terms(view: View) -> set[str]:
    """Glossary ids of the table's columns."""
    return {term for _, _, term in ratio_table(view)["head"]} if shown(view.comparison) else set()
