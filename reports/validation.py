"""The report of a validation: real and simulated side by side, the errors, where they come from, and the turns that the
simulation misses most; one HTML page and the same as Markdown.

It refuses to compute errors: they come with the result.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from reports import numbers
from reports.kinds import BY_NAME, KINDS
from reports.markdown import table
from reports.pages import page, write_pages
from reports.validation_plot import running, worst_turns
from testbed.validation.result import CACHED_LIMIT, STALENESS_LIMIT, Histogram, Row, Validation, causes, judged

GROUPS = {
    "steps": "Steps and throughput",
    "split": "Where a step's time goes: seconds per step and GPU, by cause",
    "turns": "Turns",
    "updates": "Weight updates: seconds per publication",
}
HEAD = ["Quantity", "real", "own work", "error", "full", "error", "of the work", "limit", ""]
VERDICTS = {"within": "within", "spread": "within the spread", "missed": "MISSED", "": ""}
LIMITS = (
    "Limits apply to the simulation with the run's own work. A quantity off by more passes within one standard "
    "deviation of the real runs: the scenario's own, or in a suite that pooled over all scenarios of as many engines "
    "where it is larger.",
    "Simulated times are those of the machine around each run (machine): closed loops of short requests on the same "
    "engines before and after it, in the time that the calibration predicts for them. A run without loops has the "
    "speed of the calibration.",
    "Repeats run on one set of servers, one after another: what another start of the servers would change is not in "
    "their spread.",
    "Journals hold prompts in blocks: a prefix that two prompts share within a block is unknown to the simulation.",
    "Engine and trainer of a real run on one machine slow each other down; the simulation knows by how much if the "
    "profile does. What driver and servers take from them it does not know.",
)


def write_validation(v: Validation, folder: Path) -> dict[str, Path]:
    """Write `index.html` and `report.md`; returns their paths by `index` and `report`."""
    return write_pages(folder, render(v), markdown(v))


# --- words ------------------------------------------------------------------------------------------------------------


def error_text(error: float | None) -> str:
    return "–" if error is None else numbers.signed_percent(error)


def headline(v: Validation) -> str:
    """The answer in one sentence."""
    said = judged(v)
    good = sum(verdict != "missed" for _, verdict in said)
    step = v.row("step_time")
    assert step is not None
    decided = "Every decision is repeated" if v.decided_alike else "The core decides differently"
    return (
        f"{decided}; step time is off by {error_text(step.timing_error)} with the run's own work and by "
        f"{error_text(step.full_error)} in full; {good} of {len(said)} limits are kept"
    )


def came_from(v: Validation) -> list[str]:
    """Which of decisions, times and work the error comes from."""
    said = []
    alike = sum(not d.difference for d in v.decisions)
    actions = numbers.grouped(sum(d.actions for d in v.decisions))
    if v.decided_alike:
        said.append(f"Decisions: none of the error. {actions} actions of {alike} journals are repeated exactly.")
    else:
        said.append(f"Decisions: {len(v.decisions) - alike} of {len(v.decisions)} journals are not repeated.")
    step = v.row("step_time")
    if step is not None and step.timing_error is not None and step.work_error is not None:
        said.append(
            f"Times: {error_text(step.timing_error)} of the step time. Work (lengths, turns, rewards): "
            f"{error_text(step.work_error)}. Together {error_text(step.full_error)}."
        )
    parts = [f"{cause} {numbers.points(of_times)}" for cause, of_times, _ in causes(v)[:4] if abs(of_times) >= 0.005]
    if parts:
        said.append(f"By cause, in points of a real step: {'; '.join(parts)}.")
    if v.speeds:
        factors, of_updates = (" and ".join(numbers.plain(s) for s in each) for each in (v.speeds, v.trainer_speeds))
        trainer = f", those of optimizer updates {of_updates} times" if of_updates else ""
        said.append(f"Machine: its times around the real runs were {factors} times those of the calibration{trainer}.")
    outside = [f"{k} {numbers.percent(share)}" for k, share in v.marks.items() if share > 0]
    if outside:
        said.append(f"Engine costs were asked outside their range in {', '.join(outside)} of the answers.")
    return said


def turn_words(v: Validation) -> str:
    m = v.turns
    return (
        f"{numbers.grouped(m.pairs)} of {numbers.grouped(m.turns)} turns have their counterpart. Cached tokens are "
        f"equal in {numbers.percent(m.same_cached, 1)} (limit {numbers.percent(CACHED_LIMIT)}), the engine in "
        f"{numbers.percent(m.same_engine, 1)}, output tokens in {numbers.percent(m.same_output, 1)}. Latency is off by "
        f"{numbers.signed_percent(m.latency_error_median)} in the median; without its sign by "
        f"{numbers.percent(m.latency_error_p50)} (p50) and {numbers.percent(m.latency_error_p95)} (p95)."
    )


def value_text(value: float, row: Row, spread: float | None = None) -> str:
    unit = row.quantity.unit
    text = numbers.plain(value) + (f" {numbers.plus_minus(spread)}" if spread and spread >= 0.005 else "")
    if spread and spread < 0.005:
        text = numbers.scientific(value, spread)
    return f"{text}{numbers.NBSP}{unit}" if unit else text


def cells(row: Row) -> list[str]:
    limit = row.quantity.limit
    return [
        row.quantity.label,
        value_text(fmean(row.real), row, row.spread),
        value_text(fmean(row.timing), row),
        error_text(row.timing_error),
        value_text(fmean(row.full), row),
        error_text(row.full_error),
        error_text(row.work_error),
        "" if limit is None else numbers.percent(limit),
        VERDICTS[row.verdict(row.timing, limit)],
    ]


def grouped_rows(v: Validation) -> list[tuple[str, list[Row]]]:
    found = [(title, [r for r in v.rows if r.quantity.group == group]) for group, title in GROUPS.items()]
    return [(title, rows) for title, rows in found if rows]


CAUSES_HEAD = ["Cause", "of the times", "of the work"]


def cause_rows(v: Validation) -> list[list[str]]:
    return [[cause, numbers.points(t), numbers.points(w)] for cause, t, w in causes(v) if abs(t) + abs(w) >= 0.0005]


def staleness_rows(h: Histogram) -> list[list[str]]:
    """Share of trajectories by value, real and simulated."""
    sides = [(side, sum(side.values()) or 1.0) for side in (h.real, h.timing, h.full)]
    known = sorted({value for side, _ in sides for value in side})
    return [[str(value), *(numbers.percent(side.get(value, 0) / n, 1) for side, n in sides)] for value in known]


STALENESS_HEAD = ["Staleness", "real", "own work", "full"]


def variation(h: Histogram) -> str:
    spread = "" if h.spread is None else f"; between one real run and the others up to {numbers.grouped(h.spread, 3)}"
    limit = f" (limit {STALENESS_LIMIT:g})" if h.event == "dequeue" else ""
    return (
        f"Total variation {numbers.grouped(h.timing_variation, 3)} with the run's own work{limit}, "
        f"{numbers.grouped(h.full_variation, 3)} in full{spread}."
    )


WORST_HEAD = ["Turn", "engine", "sent at", "queue", "prefill", "decode", "tokens", "cached", "latency"]


def worst_rows(v: Validation) -> list[list[list[str]]]:
    """Two rows a turn: real, simulated."""
    pairs = []
    for w in v.worst:
        rows = []
        for side, t in (("real", w.real), ("simulated", w.simulated)):
            task = f"task {w.real.task}, member {w.real.member}, turn {w.real.turn}"
            rows.append(
                [
                    f"{task}: {side}",
                    str(t.engine),
                    numbers.seconds(t.sent_t),
                    numbers.milliseconds(t.queue_s),
                    numbers.milliseconds(t.prefill_s),
                    numbers.milliseconds(t.decode_s),
                    str(t.output_tokens),
                    f"{t.cached_tokens} of {t.prompt_tokens}",
                    numbers.milliseconds(t.latency_s),
                ]
            )
        pairs.append(rows)
    return pairs


def facts(v: Validation) -> dict[str, str]:
    return {
        "real runs": ", ".join(v.runs),
        "measured steps": f"{v.steps} a run",
        "scenario": v.scenario,
        "real side": ", ".join(f"{k} {version}" for k, version in v.real_versions.items()),
        "simulator": ", ".join(f"{k} {version}" for k, version in v.versions.items()),
        "simulations": f"{numbers.seconds(v.seconds)} of CPU time",
    }


def rests_on(v: Validation) -> str:
    """What the simulated side's numbers rest on."""
    return ", ".join(f"{family.replace('_', ' ')} {kind}" for family, kind in v.kinds.items() if family != "price")


# --- pages ------------------------------------------------------------------------------------------------------------


def markdown(v: Validation) -> str:
    real, sim = BY_NAME["measured"].mark, BY_NAME["simulated"].mark
    lines = [f"# Validation of {v.name}", "", *([v.question, ""] if v.question else []), f"**{headline(v)}.**", ""]
    lines += ["## Where the error comes from", "", *(f"- {s}" for s in came_from(v)), ""]
    lines += [*table(CAUSES_HEAD, cause_rows(v)), ""]
    lines += [f"{f.difference}" for f in v.decisions if f.difference]
    lines += [f"Real {real} measured; simulated {sim}, resting on: {rests_on(v)}.", ""]
    for title, rows in grouped_rows(v):
        lines += [f"## {title}", "", *table(HEAD, [cells(r) for r in rows]), ""]
    lines += ["## Turn by turn", "", turn_words(v), ""]
    if v.worst:
        lines += [*table(WORST_HEAD, [row for pair in worst_rows(v) for row in pair]), ""]
    for h in v.staleness:
        lines += [f"## Staleness at {h.event} ({v.measure})", "", variation(h), ""]
        lines += [*table(STALENESS_HEAD, staleness_rows(h)), ""]
    lines += ["## Limits of this result", "", *(f"- {s}" for s in (*v.remarks, *LIMITS)), ""]
    lines += ["## Reproduce", "", "```", v.command, "```", "", *(f"- {k}: {said}" for k, said in facts(v).items()), ""]
    return "\n".join(lines)


def render(v: Validation) -> str:
    """The page."""
    return page(
        "validation.html.j2",
        {"cells": cells},
        v=v,
        headline=headline(v),
        came_from=came_from(v),
        causes_head=CAUSES_HEAD,
        causes=cause_rows(v),
        rests_on=rests_on(v),
        head=HEAD,
        groups=grouped_rows(v),
        differences=[d for d in v.decisions if d.difference],
        turn_words=turn_words(v),
        running=Markup(running(v)),
        worst_turns=Markup(worst_turns(v)) if v.worst else "",
        worst_head=WORST_HEAD,
        worst=worst_rows(v),
        staleness=[(h, variation(h), staleness_rows(h)) for h in v.staleness],
        staleness_head=STALENESS_HEAD,
        limits=(*v.remarks, *LIMITS),
        facts=facts(v),
        kinds=[k for k in KINDS if k.name in ("measured", "simulated")],
    )
