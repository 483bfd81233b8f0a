"""Writes a report's files into a folder. It refuses to know what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reports import html, markdown, tables
from reports.comparison import Comparison, VariantRuns, all_figures, build_comparison
from reports.figure_files import write_figures
from testbed.metrics.summary import RunSummary


def write_report(comparison: Comparison, folder: Path) -> dict[str, Path]:
    """Write `index.html`, `report.md`, `table.csv` and `gpu_time.csv`, and of real runs the learning figures in
    `figures/`; returns their paths by those names' stems (figures: by file name).

    The folder is made if it is missing. Raises OSError when it cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figures = all_figures(comparison)
    content = {
        "index": ("index.html", html.render(comparison)),
        "report": ("report.md", markdown.render(comparison)),
        "table": ("table.csv", tables.table_csv(figures)),
        "gpu_time": ("gpu_time.csv", tables.gpu_time_csv(figures)),
    }
    paths = {}
    for key, (name, text) in content.items():
        paths[key] = folder / name
        paths[key].write_text(text, encoding="utf-8", newline="\n")
    return paths | write_figures(comparison, folder)


def write_run_report(
    summary: RunSummary,
    folder: Path,
    *,
    question: str = "",
    command: str = "",
    versions: Mapping[str, str] | None = None,
    seconds: float = 0.0,
    facts: Mapping[str, str] | None = None,
) -> dict[str, Path]:
    """The same page for one run, without comparisons."""
    comparison = build_comparison(
        study=summary.name,
        question=question or f"What does {summary.name} do with its GPUs?",
        variants=[VariantRuns("A", summary.name, "", [summary])],
        command=command,
        versions=versions,
        seconds=seconds,
        facts=facts,
    )
    return write_report(comparison, folder)
