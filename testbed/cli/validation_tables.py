"""What `testbed validate` prints: the table of one scenario, and of a suite one line a scenario.

It refuses to compute errors.
"""

from __future__ import annotations

from statistics import fmean

from rich.table import Table

from testbed.console import say, show_table
from testbed.validation.quantities import STEP_TIME
from testbed.validation.result import Validation, causes, judged
from testbed.validation.suite import Suite, kept, misses, why


def percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"


def show(v: Validation) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for head in ("real", "± std", "own work", "error", "full", "error", "limit", ""):
        table.add_column(head, justify="right", no_wrap=True)
    shown = [r for r in v.rows if r.quantity.group in ("steps", "turns") or r.quantity.name == "update/total"]
    for r in shown:
        limit = r.quantity.limit
        table.add_row(
            r.quantity.label,
            f"{fmean(r.real):.4g}",
            "-" if r.spread is None else f"{r.spread:.2g}",
            f"{fmean(r.timing):.4g}",
            percent(r.timing_error),
            f"{fmean(r.full):.4g}",
            percent(r.full_error),
            "" if limit is None else f"{100 * limit:.0f} %",
            r.verdict(r.timing, limit),
        )
    show_table(table)
    for h in v.staleness:
        own = f"{h.timing_variation:.3f} with the run's own work, {h.full_variation:.3f} in full"
        spread = "" if h.spread is None else f" (between real runs {h.spread:.3f})"
        say(f"staleness at {h.event} ({v.measure}): total variation {own}{spread}")
    m = v.turns
    say(
        f"turns    {m.pairs:,} of {m.turns:,} matched; cached tokens equal in {100 * m.same_cached:.1f} %, latency off "
        f"by {100 * m.latency_error_median:+.1f} % in the median, {100 * m.latency_error_p95:.0f} % at p95 without sign"
    )
    if (between := v.repeated) is not None:
        say(
            f"between real runs {between.pairs:,} matched; cached tokens equal in {100 * between.same_cached:.1f} %, "
            f"latency apart by {100 * between.latency_error_p50:.1f} % in the median and "
            f"{100 * between.latency_error_p95:.0f} % at p95"
        )
    if v.speeds:
        say(f"machine  times around the real runs: {', '.join(f'{s:.3f}' for s in v.speeds)} of the calibration's")
    alike = sum(not d.difference for d in v.decisions)
    actions = sum(d.actions for d in v.decisions)
    say(f"decisions identical in {alike} of {len(v.decisions)} runs, {actions:,} actions")
    parts = [f"{cause} {100 * t:+.1f} % times, {100 * w:+.1f} % work" for cause, t, w in causes(v)[:3]]
    if parts:
        say(f"of a step: {'; '.join(parts)}")


COLUMNS = ((STEP_TIME, "step"), ("trajectories_per_s", "rate"), ("latency_p50", "p50"), ("latency_p95", "p95"))
MARKS = {"within": "", "spread": "~", "missed": "!", "": ""}
"""Behind an error: beyond its limit but within the real side's own spread, or beyond both."""


def show_suite(s: Suite) -> None:
    """One line a scenario: errors with the run's own work."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for head in ("real step", "± std", "machine", *(label for _, label in COLUMNS), "staleness", "cached", "decisions"):
        table.add_column(head, justify="right", no_wrap=True)
    for v in s.validations:
        step = v.row(STEP_TIME)
        assert step is not None
        cells = [f"{fmean(step.real):.3g} s", "-" if step.spread is None else f"{step.spread:.2g}"]
        cells.append(f"{fmean(v.speeds):.3f}" if v.speeds else "-")
        for name, _ in COLUMNS:
            row = v.row(name)
            cells.append(
                "-" if row is None else percent(row.timing_error) + MARKS[row.verdict(row.timing, row.quantity.limit)]
            )
        said = dict(judged(v))
        dequeue = next(h for h in v.staleness if h.event == "dequeue")
        cells.append(f"{dequeue.timing_variation:.3f}" + MARKS[said["staleness_at_dequeue"]])
        cells.append(f"{100 * v.turns.same_cached:.1f} %" + MARKS[said["cached_tokens_equal"]])
        cells.append("same" if v.decided_alike else "DIFFER")
        table.add_row(v.name, *cells)
    show_table(table)
    counts = kept(s)
    say(
        f"limits   {counts['within']} kept, {counts['spread']} missed within the real side's own spread (~), "
        f"{counts['missed']} missed (!)"
    )
    say(f"turns    {s.turns:,} matched, cached tokens equal in {100 * s.same_cached:.2f} %")
    for v, what in misses(s):
        say(f"missed   {v.name}: {what} ({why(v, what)})")
    for name, problem in s.failed.items():
        say(f"failed   {name}: {problem}")
