"""Figures as data: CSV for spreadsheets and plain JSON for programs. Exact values, no formatting.

It refuses to phrase and to round.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from reports.answer import answer, price_of_it, rests_on
from reports.comparison import Comparison, Figures, closure
from reports.headings import headings
from reports.metrics import EVERY
from reports.palette import GPU_TIME
from reports.ratios import shares
from reports.sentences import as_text
from reports.series import SERIES
from reports.view import View, input_kinds, view_of

MEASURED = "measured"
"""Kind of what updates did: only real runs have any."""


def table_csv(figures: list[Figures]) -> str:
    """One number a line: variant, name, metric, label, unit, mean, sd, seeds, kind. What updates did is
    `learning.SERIES`, of the last fifth of the batches."""
    lines: list[list[object]] = [["variant", "name", "metric", "label", "unit", "mean", "sd", "seeds", "kind"]]
    for f in figures:
        for name, s in f.stats.items():
            m = EVERY[name]
            lines.append([f.letter, f.name, name, m.label, m.unit, s.mean, s.sd, len(s.values), f.kinds[name]])
        for name, ends in f.learning.items():
            x, s = SERIES[name], ends.last
            lines.append([f.letter, f.name, f"learning.{name}", x.label, x.unit, s.mean, s.sd, len(s.values), MEASURED])
    return _csv(lines)


def gpu_time_csv(figures: list[Figures]) -> str:
    """GPU time: variant, lane, pool, gpus, cause, seconds_per_step, share_of_lane, kind."""
    lines: list[list[object]] = [
        ["variant", "lane", "pool", "gpus", "cause", "seconds_per_step", "share_of_lane", "kind"]
    ]
    for f in figures:
        for lane in f.lanes:
            for cause in GPU_TIME:
                s = lane.seconds.get(cause, 0.0)
                lines.append(
                    [
                        f.letter,
                        lane.lane,
                        lane.name,
                        lane.gpus,
                        cause,
                        s,
                        s / lane.length if lane.length else 0.0,
                        f.kind,
                    ]
                )
    return _csv(lines)


def _csv(lines: list[list[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def variant_figures(f: Figures) -> dict[str, Any]:
    return {
        "letter": f.letter,
        "name": f.name,
        "note": f.note,
        "changes": {
            k: v if isinstance(v, (int, float, str, bool, type(None))) else str(v) for k, v in f.changes.items()
        },
        "figures": {
            name: {
                "mean": s.mean,
                "sd": s.sd,
                "values": list(s.values),
                "unit": EVERY[name].unit,
                "kind": f.kinds[name],
            }
            for name, s in f.stats.items()
        },
        "learning": {
            name: {
                "first": list(ends.first.values),
                "last": list(ends.last.values),
                "unit": SERIES[name].unit,
                "kind": MEASURED,
            }
            for name, ends in f.learning.items()
        },
        "engine_weight_bytes": f.engine_weight_bytes,
        "formats": f.formats,
        "gpu_time": [{"lane": x.lane, "pool": x.name, "gpus": x.gpus, "seconds_per_step": x.seconds} for x in f.lanes],
        "staleness": {
            "completion": {str(k): v for k, v in f.completion.items()},
            "dequeue": {str(k): v for k, v in f.dequeue.items()},
            "bound": f.bound,
        },
    }


def comparison_figures(comparison: Comparison) -> dict[str, Any]:
    """Every figure that the report prints, as plain JSON values."""
    view: View = view_of(comparison)
    return {
        "study": comparison.study,
        "question": comparison.question,
        "answer": as_text(answer(view)),
        "price_of_it": as_text(price_of_it(view)),
        "rests_on": as_text(rests_on(view)),
        "findings": {k: as_text(s) for k, s in headings(view).items()},
        "best": [view.figures[i].letter for i in view.best] if view.ranked else [],
        "baseline": view.base.letter,
        "seeds": list(comparison.seeds),
        "input_kinds": input_kinds(comparison),
        "gpu_time_closes_within": closure(comparison),
        "command": comparison.command,
        "versions": comparison.versions,
        "wall_seconds" if comparison.real else "cpu_seconds": comparison.seconds,
        "scenario_hashes": comparison.scenario_hashes,
        "variants": [
            variant_figures(f) | {"ratios": shares(v)} for f, v in zip(view.figures, comparison.variants, strict=True)
        ],
    }
