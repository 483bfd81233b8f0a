"""The published suite as one HTML page and the same as Markdown: per source its conditions, every number with its
error, signs and rankings, what was fitted, why predictions miss, and what is pending.

It refuses to simulate, and to compute errors: they come with the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from reports import numbers
from reports.kinds import BY_NAME
from reports.markdown import table
from reports.pages import page, write_pages
from testbed.commands.published.results import Compared, Result, median_error, predicted_errors, wrong_orders

HEAD = ["Number", "published", "simulated", "error", "role"]
QUESTION = "How far is the simulation from what others measured?"


class FittedValue(Protocol):
    """A coefficient with where it comes from (`sim.coefficients.Provenance`)."""

    @property
    def value(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def rows(self) -> Sequence[str]: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def write_published(
    results: Sequence[Result], fitted: Mapping[str, FittedValue], folder: Path, command: str
) -> dict[str, Path]:
    """Write `index.html` and `report.md`; returns their paths by `index` and `report`."""
    return write_pages(folder, render(results, fitted, command), markdown(results, fitted, command))


# --- words ------------------------------------------------------------------------------------------------------------


def headline(results: Sequence[Result]) -> str:
    """The answer in one sentence."""
    errors, measured = predicted_errors(results), predicted_errors(results, exact=False)
    wrong = wrong_orders(results)
    orders = sum(len(r.orders) for r in results)
    right = f"{orders - len(wrong)} of {orders} signs and rankings are right"
    median = median_error(results)
    if median is None:
        return f"Nothing is predicted here; {right}"
    beside, strict = "", median_error(results, exact=False)
    if strict is not None and len(measured) < len(errors):
        beside = f" ({numbers.percent(strict, 1)} over the {len(measured)} that are times, rates and lengths)"
    return f"Median error {numbers.percent(median, 1)} over {len(errors)} predicted numbers{beside}; {right}"


def line_of(r: Result) -> str:
    """One line of a terminal."""
    if r.table.pending:
        return f"{r.table.table}: pending: {' '.join(r.table.pending.split())}"
    predicted = [abs(c.error) for c in r.numbers if c.number.role == "predicted"]
    parts = [f"{len(r.numbers)} numbers"]
    if predicted:
        shown = sorted(predicted)
        middle = (shown[(len(shown) - 1) // 2] + shown[len(shown) // 2]) / 2
        parts.append(f"{len(predicted)} predicted, median error {100 * middle:.1f} %, worst {100 * shown[-1]:.1f} %")
    if r.orders:
        parts.append(f"{sum(o.holds for o in r.orders)} of {len(r.orders)} orders hold")
    return f"{r.table.table}: {'; '.join(parts)}"


def value_text(value: float, unit: str) -> str:
    return f"{numbers.plain(value)}{numbers.NBSP}{unit}"


def cells(c: Compared, kind: str) -> list[str]:
    """A row; the simulated value carries the mark of what it rests on."""
    name = c.number.name + (f" ({c.number.note})" if c.number.note else "")
    return [
        name,
        f"{value_text(c.number.published, c.number.unit)} {BY_NAME['published'].mark}",
        f"{value_text(c.simulated, c.number.unit)} {BY_NAME[kind].mark}",
        numbers.signed_percent(c.error),
        c.number.role,
    ]


LIMITS = (
    "Errors count for predicted numbers alone. Fitted ones come out by construction, given ones went in.",
    "Formulas and rules that hold exactly (△) are predicted too; the median is also given without them.",
    "Most published figures are single runs; where the scales of one source contradict each other, no model gives all.",
    "A coefficient fitted to as many rows as there are coefficients has no interval.",
)


# --- pages ------------------------------------------------------------------------------------------------------------


def markdown(results: Sequence[Result], fitted: Mapping[str, FittedValue], command: str) -> str:
    lines = ["# Published numbers", "", QUESTION, "", f"**{headline(results)}.**", ""]
    lines += ["Made by:", "", "```", command, "```", ""]
    lines += [f"- {s}" for s in LIMITS] + [""]
    for r in (r for r in results if not r.table.pending):
        t = r.table
        lines += [f"## {t.title}", "", f"Source: {t.source}.", "", f"Conditions: {t.conditions}", ""]
        lines += [f"Simulated: {t.model}", ""] if t.model else []
        lines += [*table(HEAD, [cells(c, t.kind) for c in r.numbers]), ""]
        lines += [f"- {'right' if o.holds else '**WRONG**'}: {o.order.says}" for o in r.orders]
        lines += [f"- miss: {' '.join(m.split())}" for m in t.misses]
        lines += ["", f"`testbed published --only {t.table}`", ""]
    pending = [r.table for r in results if r.table.pending]
    if pending:
        lines += [
            "## Pending",
            "",
            *table(["Table", "why"], [[t.title, " ".join(t.pending.split())] for t in pending]),
            "",
        ]
    lines += ["## Fitted coefficients of the simulator", "", *table(FITTED_HEAD, fitted_rows(fitted)), ""]
    return "\n".join(lines)


FITTED_HEAD = ["Coefficient", "value", "95 % interval", "fitted to"]


def fitted_rows(fitted: Mapping[str, FittedValue]) -> list[list[str]]:
    rows = []
    for name, f in fitted.items():
        interval = f"{f.low:.3g} to {f.high:.3g}" if f.low is not None and f.high is not None else "–"
        rows.append(
            [name, f"{f.value:.4g} {f.unit} {BY_NAME['calibrated'].mark}", interval, f"{f.table}: {'; '.join(f.rows)}"]
        )
    return rows


def render(results: Sequence[Result], fitted: Mapping[str, FittedValue], command: str) -> str:
    """The page."""
    return page(
        "published.html.j2",
        {"value_text": value_text, "signed": numbers.signed_percent},
        question=QUESTION,
        headline=headline(results),
        tables=[r for r in results if not r.table.pending],
        pending=[r.table for r in results if r.table.pending],
        head=HEAD,
        limits=LIMITS,
        fitted_head=FITTED_HEAD,
        fitted=fitted_rows(fitted),
        command=command,
    )
