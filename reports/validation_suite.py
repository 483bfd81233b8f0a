"""The page of several validations: one line a scenario with its errors, which limits are missed and why; the same as
Markdown. Each scenario has a page of its own.

It refuses to compute errors: they come with the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from statistics import fmean

from reports import numbers
from reports.kinds import KINDS
from reports.markdown import table
from reports.pages import page, write_pages
from reports.validation import LIMITS, VERDICTS, error_text
from testbed.validation.quantities import STEP_TIME
from testbed.validation.result import CACHED_LIMIT, STALENESS_LIMIT, Row, Validation, judged
from testbed.validation.suite import Suite, kept, misses, why

QUESTION = "How far is the simulation from actual engines and an actual trainer?"
COLUMNS = (
    (STEP_TIME, "step time"),
    ("trajectories_per_s", "throughput"),
    ("latency_p50", "turn p50"),
    ("latency_p95", "turn p95"),
)
HEAD = ["Scenario", "real step", "machine", *(label for _, label in COLUMNS), "staleness", "cached equal", "decisions"]
MISS_HEAD = ["Scenario", "limit", "cause"]


def write_suite(s: Suite, pages: Mapping[str, PurePath], folder: Path) -> dict[str, Path]:
    """Write `index.html` and `report.md`; returns their paths by `index` and `report`. `pages`: of each scenario, from
    the folder above."""
    return write_pages(folder, render(s, pages), markdown(s))


# --- words ------------------------------------------------------------------------------------------------------------


def headline(s: Suite) -> str:
    """The answer in one sentence."""
    counts = kept(s)
    total = sum(counts.values())
    decided = "Every decision is repeated" if s.decided_alike else "The core decides differently"
    spread = f", {counts['spread']} more within the real side's own spread" if counts["spread"] else ""
    return (
        f"{decided}; cached tokens are equal in {numbers.percent(s.same_cached, 2)} of "
        f"{numbers.grouped(s.turns)} turns; {counts['within']} of {total} limits are kept{spread}"
    )


def marked(text: str, verdict: str) -> str:
    return f"{text} ({VERDICTS[verdict]})" if verdict in ("missed", "spread") else text


def cell(row: Row | None) -> str:
    return "–" if row is None else marked(error_text(row.timing_error), row.verdict(row.timing, row.quantity.limit))


def step_text(row: Row | None) -> str:
    if row is None:
        return "–"
    mean, spread = fmean(row.real), row.spread
    if spread is None or not mean:
        return numbers.seconds(mean)
    return f"{numbers.seconds(mean)} {numbers.plus_minus(100 * spread / mean)}{numbers.NBSP}%"


def cells(v: Validation) -> list[str]:
    """A scenario's row, errors of the simulation with the run's own work."""
    dequeue = next(h for h in v.staleness if h.event == "dequeue")
    said = dict(judged(v))
    return [
        v.name,
        step_text(v.row(STEP_TIME)),
        f"× {numbers.plain(fmean(v.speeds))}" if v.speeds else "–",
        *(cell(v.row(name)) for name, _ in COLUMNS),
        marked(numbers.grouped(dequeue.timing_variation, 3), said["staleness_at_dequeue"]),
        marked(numbers.percent(v.turns.same_cached, 1), said["cached_tokens_equal"]),
        "same" if v.decided_alike else "DIFFER",
    ]


def miss_rows(s: Suite) -> list[list[str]]:
    return [[v.name, what.replace("_", " "), why(v, what)] for v, what in misses(s)]


def limits(s: Suite) -> tuple[str, ...]:
    return (
        f"Limits: step time and throughput 3 %, turn latency 5 % (p50) and 10 % (p95), total variation of staleness at "
        f"dequeue {STALENESS_LIMIT:g}, cached tokens equal in {numbers.percent(CACHED_LIMIT)} of turns.",
        *LIMITS,
        *(pooled_text(engines, spreads) for engines, spreads in s.pooled.items()),
        *s.remarks,
    )


POOLED = {STEP_TIME: "step time", "latency_p50": "turn p50", "latency_p95": "turn p95"}


def pooled_text(engines: int, spreads: Mapping[str, float]) -> str:
    said = ", ".join(f"{label} {numbers.percent(spreads[q], 1)}" for q, label in POOLED.items() if q in spreads)
    how_many = f"{engines} engine{'s' * (engines > 1)}"
    return f"Real runs of one scenario with {how_many} differ by (one standard deviation, pooled): {said}."


def facts(s: Suite) -> dict[str, str]:
    first = s.validations[0] if s.validations else None
    found = {
        "real runs": f"{s.repeats} of each scenario, {0 if first is None else first.steps} measured steps and more",
        "wall time": numbers.seconds(s.seconds),
    }
    if first is not None:
        found["real side"] = ", ".join(f"{k} {version}" for k, version in first.real_versions.items())
    return found


# --- pages ------------------------------------------------------------------------------------------------------------


def markdown(s: Suite) -> str:
    lines = ["# Validation suite", "", QUESTION, "", f"**{headline(s)}.**", ""]
    lines += [
        "Errors of the simulation with the real run's own work, (simulated − real) / real, measured steps only.",
        "",
    ]
    lines += [*table(HEAD, [cells(v) for v in s.validations]), ""]
    if rows := miss_rows(s):
        lines += ["## Limits that are missed", "", *table(MISS_HEAD, rows), ""]
    lines += [f"- {name}: the real run did not come to its end: {problem}" for name, problem in s.failed.items()]
    lines += ["## Limits of this result", "", *(f"- {said}" for said in limits(s)), ""]
    lines += ["## Reproduce", "", "```", s.command, "```", "", *(f"- {k}: {said}" for k, said in facts(s).items()), ""]
    return "\n".join(lines)


def render(s: Suite, pages: Mapping[str, PurePath]) -> str:
    """The page."""
    return page(
        "validation_suite.html.j2",
        {"cells": cells},
        s=s,
        question=QUESTION,
        headline=headline(s),
        head=HEAD,
        links={v.name: f"../{pages[v.name].as_posix()}" if v.name in pages else "" for v in s.validations},
        misses=miss_rows(s),
        miss_head=MISS_HEAD,
        limits=limits(s),
        facts=facts(s),
        kinds=[k for k in KINDS if k.name in ("measured", "simulated")],
    )
