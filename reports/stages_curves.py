"""Learning curves of a graph's stages side by side, as files: stages that differ in nothing but a seed are one line.

`NAME-1`, `NAME-2`, ... of one kind that start from one model are the seeds of NAME. It refuses to know how curves are
drawn."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from reports.comparison import ComparisonError, VariantRuns, build_comparison
from reports.figure_files import write_figures
from testbed.metrics.files import read_summary
from testbed.metrics.stages import StagePlan, StagesResult
from testbed.metrics.summary import RunSummary
from testbed.run_files import SUMMARY

SEEDED = re.compile(r"(.+)-\d+")
UNEQUAL = ("gpus", "workload", "batch")
"""Stages are not layouts of one piece of work: they may differ in all of it."""


def lines_of(result: StagesResult, folder: Path) -> list[VariantRuns]:
    """Stages with a run, grouped over seeds where their names say so; of the seeds that most groups have."""
    groups: dict[str, list[RunSummary]] = {}
    for plan in result.graph:
        run = _run(plan, folder)
        if run is not None:
            groups.setdefault(_group(plan, result.graph), []).append(run)
    lines = [VariantRuns("", name, "", sorted(runs, key=lambda r: r.seed)) for name, runs in groups.items()]
    seeds = Counter(tuple(r.seed for r in line.runs) for line in lines)
    most = max(seeds, key=lambda s: (seeds[s], len(s))) if seeds else ()
    return [line for line in lines if tuple(r.seed for r in line.runs) == most]


def write_curves(result: StagesResult, folder: Path) -> list[str]:
    """Write `figures/` into the folder of the graph; file names of what there is to draw."""
    lines = lines_of(result, folder)
    if not lines:
        return []
    try:
        comparison = build_comparison(study=result.name, question="", variants=lines, allow_unequal=UNEQUAL)
    except ComparisonError:  # runs without a measured step, too many stages, other measures of staleness
        return []
    return sorted(write_figures(comparison, folder))


def _run(plan: StagePlan, folder: Path) -> RunSummary | None:
    path = folder / plan.name / SUMMARY
    return read_summary(path) if path.is_file() else None


def _group(plan: StagePlan, graph: list[StagePlan]) -> str:
    """The name without its seed, if others of the same make differ in it alone."""
    match = SEEDED.fullmatch(plan.name)
    if match is None:
        return plan.name
    others = [p for p in graph if (m := SEEDED.fullmatch(p.name)) and m[1] == match[1]]
    alike = all((p.kind, p.model, p.teachers) == (plan.kind, plan.model, plan.teachers) for p in others)
    return match[1] if alike and len(others) > 1 else plan.name
