"""How variants compare in one column, and the small tables that HTML and Markdown share.

Difference to the baseline, spread, who is marked as best; GPU time as numbers; what was checked. Text only: it refuses
to know markup.
"""

from __future__ import annotations

from typing import Any

from reports import numbers
from reports.comparison import Comparison, Figures, Lane, closure
from reports.kinds import BY_NAME
from reports.metrics import EVERY, METRICS
from reports.palette import GPU_TIME
from reports.spread import best_of, separated
from reports.view import View

NAVIGATION = {
    "gpu": "GPU time",
    "reward": "Reward",
    "held_out": "Held-out tasks",
    "learning": "What the updates did",
    "ratios": "Ratios of single tokens",
    "staleness": "Staleness",
    "trajectory": "Trajectory time",
    "update": "Weight update",
    "limits": "Limits",
    "reproduce": "Reproduce",
    "glossary": "Glossary",
}
"""Section -> its name, in the order of the page."""
NONE = "·"
"""Where a variant has no such figure."""
LANE_WORDS = {"engines": "engines", "trainer": "trainer", "shared": "one pool"}
COLUMNS: dict[str, tuple[str, str]] = {
    "step_time_s": ("Step time", "lower is better"),
    "trained_tokens_per_s_per_gpu": ("Trained tokens", "in the loss, per s per GPU"),
    "cost_usd_per_1000_steps": ("Cost", "USD per 1,000 steps"),
    "staleness_dequeue_mean": ("Staleness", "mean / p95 / max at dequeue"),
    "waste_share": ("Waste", "of generated tokens"),
    "gpu_idle_share": ("GPU idle", "of GPU time"),
}
"""Metric -> (head, unit), the columns of the first table in their order.

Throughput never stands alone: staleness and waste are beside it.
"""


def difference(view: View, f: Figures, metric: str) -> str:
    """`−24 %`, `+7.4 pt`; `≈` in front of what lies within the spread; `–` for the baseline itself."""
    if f.letter == view.base.letter:
        return "–"
    a, b = f.stats[metric], view.base.stats[metric]
    how = METRICS[metric].difference
    if how == "points":
        text = numbers.points(a.mean - b.mean)
    elif b.mean == 0:
        return "–"
    else:
        text = numbers.signed_percent(a.mean / b.mean - 1)
    return text if separated(a, b) or text.startswith("0") else f"≈{numbers.NBSP}{text}"


def spread(view: View, f: Figures, metric: str) -> str:
    """`± 6` over seeds; empty with one seed."""
    return numbers.plus_minus(f.stats[metric].sd) if len(view.comparison.seeds) > 1 else ""


def small_figures(view: View, f: Figures, metric: str) -> str:
    """The line under a value: difference, and for the step time the spread."""
    if view.comparison.single:
        return spread(view, f, metric)
    parts = [difference(view, f, metric)]
    if metric == "step_time_s":
        parts.append(spread(view, f, metric))
        if f.letter == view.base.letter:
            parts = parts[1:] if parts[1] else parts
    return " · ".join(p for p in parts if p)


def marked(view: View) -> dict[str, set[str]]:
    """Metric -> letters of the best. Ties are marked together; where more than two tie, nobody is."""
    out: dict[str, set[str]] = {}
    for metric in COLUMNS:
        better = METRICS[metric].better
        best = best_of([f.stats[metric] for f in view.figures], better)
        alone = view.ranked and not view.comparison.single and len(best) <= 2 and len(best) < len(view.figures)
        out[metric] = {view.figures[i].letter for i in best} if alone else set()
    return out


def staleness_text(f: Figures, slash: str = " / ") -> str:
    """`1.8 / 2 / 2`: mean, p95, max at dequeue."""
    return slash.join(f.text(f"staleness_dequeue_{part}") for part in ("mean", "p95", "max"))


def measured_by(comparison: Comparison) -> str:
    """The staleness measure's name."""
    return comparison.variants[0].runs[0].staleness_measure


def lane_words(figures: Figures, lane: Lane) -> str:
    word = LANE_WORDS.get(lane.lane, lane.lane)
    if lane.lane == "shared" and len(figures.lanes) > 1:
        word = "shared"
    return f"{word}, {lane.gpus}"


def legend(view: View) -> list[tuple[str, str]]:
    """(cause, label) of every cause that occurs."""
    present = {c for f in view.figures for c in f.causes}
    return [(name, cause.label) for name, cause in GPU_TIME.items() if name in present]


def lane_table(view: View) -> dict[str, Any]:
    """GPU time as numbers, seconds per step, and the idle share of each lane (each side on its own)."""
    causes = [name for name, _ in legend(view)]
    body = [
        {
            "letter": f.letter,
            "name": lane_words(f, lane),
            "cells": [(numbers.grouped(lane.seconds[c], 1) if c in lane.seconds else "") for c in causes],
            "idle": numbers.percent(lane.idle_share, 1),
            "kind": f.kinds["gpu_idle_share"],
        }
        for f in view.figures
        for lane in f.lanes
    ]
    return {"head": [GPU_TIME[c].short for c in causes], "rows": body}


def metrics_of(view: View) -> list[str]:
    """Every metric that any variant has."""
    return [name for name in EVERY if any(name in f.stats for f in view.figures)]


def all_numbers_text(view: View) -> list[list[str]]:
    """The same for Markdown: label, then a value with its mark per variant."""
    return [
        [
            f"{EVERY[name].label} ({EVERY[name].unit})",
            *(f"{f.text(name)} {BY_NAME[f.kinds[name]].mark}" if name in f.stats else NONE for f in view.figures),
        ]
        for name in metrics_of(view)
    ]


def checks(view: View) -> list[tuple[str, str]]:
    """What was checked before the variants were put side by side."""
    c = view.comparison
    gap = closure(c)
    within = f" within {gap:.0e}" if gap else ""
    closes = f"sum of causes ÷ (wall × GPUs) = 1{within}: " + ("passed" if gap < 1e-6 else "NOT passed")
    out = []
    if not c.single:
        equal = (
            "different, as the study allows" if "gpus" in c.unequal else f"{view.base.gpus} in every variant: passed"
        )
        out.append(("equal GPUs", equal))
        same = f"hash {c.variants[0].runs[0].workload_hash[:12]} (first seed): passed for every seed"
        out.append(("equal workload", "different, as the study allows" if "workload" in c.unequal else same))
    return [*out, ("GPU time closes", closes)]
