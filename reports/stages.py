"""The report of a graph of stages: the graph, what each stage did, what was measured on held-out tasks; one HTML page
and the same as Markdown.

It refuses to compute figures: they come with the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from reports import numbers
from reports.markdown import table
from reports.pages import SYMBOLS, page, write_pages
from reports.stages_curves import write_curves
from reports.stages_plot import FILLS, graph
from testbed.metrics.scores import Mean, Score
from testbed.metrics.stages import StagePlan, StageResult, StagesResult

KINDS = {
    "pretrain": "supervised, from random weights",
    "sft": "supervised, on demonstrations",
    "rl": "reinforcement learning from rewards",
    "opd": "on-policy distillation from teachers",
    "reward_model": "a model that scores responses",
}


def write_stages_report(result: StagesResult, folder: Path) -> dict[str, Path]:
    """Write `index.html`, `report.md` and the curves' `figures/` into the folder of the graph; returns the paths of the
    first two by `index` and `report`."""
    reports = {p.name for p in result.graph if (folder / p.name / "report" / "index.html").is_file()}
    curves = [name for name in write_curves(result, folder) if name.endswith(".svg")]
    return write_pages(folder, render(result, reports, curves), markdown(result))


# --- words ------------------------------------------------------------------------------------------------------------


def interval(m: Mean) -> str:
    """`0.81 [0.78, 0.84]` in three digits; of one value the value alone."""
    if m.n < 2:
        return numbers.grouped(m.mean, 3)
    return f"{numbers.grouped(m.mean, 3)} [{numbers.grouped(m.low, 3)}, {numbers.grouped(m.high, 3)}]"


def headline(result: StagesResult) -> str:
    """What came out, in one sentence."""
    measured = [r for r in result.results if r.scores]
    if measured:
        parts = [f"{r.model} {numbers.grouped(r.scores[0].reward.mean, 2)}" for r in measured]
        return f"Mean reward on held-out tasks: {', '.join(parts)}"
    learned = [r for r in result.results if r.first is not None and r.last is not None]
    if learned:
        r = learned[-1]
        assert r.first is not None and r.last is not None
        ends = f"{numbers.grouped(r.first.mean, 2)} to {numbers.grouped(r.last.mean, 2)}"
        return f"{r.name}: mean reward from {ends} in {r.steps} batches"
    return f"{len(result.results)} of {len(result.graph)} stages are finished"


def whom_rl_trains(plan: list[StagePlan]) -> list[str]:
    """For each rl stage, what its model is to the distilled ones."""
    opd = {p.name: p for p in plan if p.kind == "opd"}
    said = []
    for p in plan:
        if p.kind != "rl":
            continue
        taught = [o.name for o in opd.values() if p.name in o.teachers.values()]
        gone_on = [n for n in p.lineage if n in opd]
        if taught:
            said.append(f"RL trains {p.name}, a teacher of {numbers.listed(taught)}; the student itself gets no RL")
        elif gone_on:
            said.append(f"RL trains {p.name}: the model that distillation made ({numbers.listed(gone_on)}) goes on")
        else:
            said.append(f"RL trains {p.name}")
    return said


def box_lines(result: StagesResult) -> dict[str, list[str]]:
    """Model -> what its training and its evaluation say, for its box."""
    lines: dict[str, list[str]] = {p.name: [p.kind] for p in result.graph if p.kind != "evaluate"}
    for r in result.results:
        if r.name in lines:
            lines[r.name] = [" · ".join(filter(None, (r.kind, training_figure(r))))]
    for r in result.results:
        if r.scores:
            said = f"held out {numbers.grouped(r.scores[0].reward.mean, 2)}"
            lines[r.model] = [*lines.get(r.model, [])[:1], said]
    return lines


def training_figure(r: StageResult) -> str:
    """How far its training came, in a few words; empty where nothing says."""
    if r.first is not None and r.last is not None:
        return f"reward {numbers.grouped(r.first.mean, 2)} → {numbers.grouped(r.last.mean, 2)}"
    if r.first_kl is not None and r.last_kl is not None:
        return f"KL {numbers.grouped(r.first_kl.mean, 2)} → {numbers.grouped(r.last_kl.mean, 2)}"
    if r.answer_probability is not None:
        return f"p(answer) {numbers.grouped(r.answer_probability, 2)}"
    if r.accuracy is not None:
        return f"pairs right {numbers.percent(r.accuracy)}"
    return ""


# --- tables -----------------------------------------------------------------------------------------------------------

HEAD = ["Stage", "kind", "starts from", "reads only", "steps", "first fifth", "last fifth", "seconds"]


def stage_rows(result: StagesResult) -> list[list[str]]:
    """A row per stage of the graph, done or not; figures are marked with `●`."""
    done = {r.name: r for r in result.results}
    return [_row(p, done.get(p.name)) for p in result.graph]


def _row(p: StagePlan, r: StageResult | None) -> list[str]:
    teachers = [t if kind.isdigit() or kind == t else f"{t} ({kind})" for kind, t in p.teachers.items()]
    reads = ", ".join([*teachers, *([p.reward_model] if p.reward_model else [])]) or "–"
    if r is None:
        return [p.name, p.kind, p.model, reads, "not run", "", "", ""]
    first, last = _ends(r)
    if r.answer_probability is not None:
        last = f"p(answer) {numbers.grouped(r.answer_probability, 3)}"
    elif r.accuracy is not None:
        last = f"pairs right {numbers.percent(r.accuracy)}"
    elif r.scores:
        last = f"held out: {interval(r.scores[0].reward)}"
    return [
        p.name,
        p.kind,
        p.model,
        reads,
        str(r.steps) if r.steps else "–",
        first,
        last,
        numbers.grouped(r.seconds, 1),
    ]


def _ends(r: StageResult) -> tuple[str, str]:
    """Reward and KL of the first and of the last fifth of the batches."""
    reward, kl = (r.first, r.last), (r.first_kl, r.last_kl)
    first, last = (
        "; ".join([*([interval(m)] if m else []), *([f"KL {interval(k)}"] if k else [])]) or "–"
        for m, k in zip(reward, kl, strict=True)
    )
    return first, last


def score_table(result: StagesResult) -> tuple[list[str], list[list[str]]] | None:
    """(head, rows) of everything that was measured on held-out tasks: a row per model, a column per kind."""
    measured = [r for r in result.results if r.scores]
    if not measured:
        return None
    kinds = list(dict.fromkeys(s.kind for r in measured for s in r.scores))
    kl = any(s.kl is not None for r in measured for s in r.scores)
    head = ["Model", "tasks"]
    for kind in kinds:
        head += [kind or "all kinds", *([f"KL, {kind or 'all'}"] if kl else [])]
    rows = []
    for r in measured:
        by_kind: dict[str, Score] = {s.kind: s for s in r.scores}
        row = [r.model, str(r.scores[0].reward.n)]
        for kind in kinds:
            s = by_kind.get(kind)
            row.append(interval(s.reward) if s else "–")
            if kl:
                row.append("–" if s is None or s.kl is None else numbers.grouped(s.kl, 4))
        rows.append(row)
    return head, rows


def unchanged(result: StagesResult) -> list[str]:
    """For each stage that read a model without training it: that its files are the same as before."""
    said = []
    for r in result.results:
        named = ", ".join(f"{name} {digest[:12]}" for name, digest in r.inputs.items())
        said.append(f"{r.name}: {named}")
    return said


CHECKPOINTS_SAID = "The checkpoint of a stage that trains is the folder `checkpoints/STAGE` beside this report."
LIMITS = (
    "Intervals are 95 %: of held-out rewards over tasks (Wilson's where every reward is 0 or 1), of training rewards "
    "over the batches of a fifth, in which the policy still changes.",
    "Held-out tasks are another stream of the same generator; where it has few different tasks, training saw the same.",
    "One run of the graph is one draw: repeat it with other seeds before believing a small difference.",
)


# --- pages ------------------------------------------------------------------------------------------------------------


def render(result: StagesResult, reports: set[str], curves: Sequence[str] = ()) -> str:
    """The page. `reports`: stages with a report of their own beside it; `curves`: files in `figures/`."""
    done = {r.name: r for r in result.results}
    rows = [
        {"cells": row, "linked": row[0] in reports, "note": _note(p, done.get(p.name))}
        for p, row in zip(result.graph, stage_rows(result), strict=True)
    ]
    drawing, width = graph(result.graph, box_lines(result))
    used = [k for k in FILLS if any(p.kind == k for p in result.graph)]
    return page(
        "stages.html.j2",
        r=result,
        headline=headline(result),
        drawing=Markup(drawing),
        width=round(width),
        legend=[(kind, FILLS[kind], KINDS[kind]) for kind in used],
        rl=whom_rl_trains(result.graph),
        head=HEAD,
        rows=rows,
        curves=curves,
        scores=score_table(result),
        has_kl=any(s.kl is not None for r in result.results for s in r.scores),
        unchanged=unchanged(result),
        limits=LIMITS,
        symbols={"measured": Markup(SYMBOLS["measured"])},
    )


def _note(p: StagePlan, r: StageResult | None) -> str:
    return r.note if r is not None else p.note


def markdown(result: StagesResult) -> str:
    """The same without the drawing."""
    lines = [f"# {result.name}", "", *([result.question, ""] if result.question else []), f"**{headline(result)}**", ""]
    lines += [*(f"- {s}." for s in whom_rl_trains(result.graph)), ""]
    lines += [*table(HEAD, stage_rows(result)), "", CHECKPOINTS_SAID, ""]
    scores = score_table(result)
    if scores is not None:
        lines += ["## Measured on held-out tasks", "", *table(*scores), ""]
    lines += ["## Only read", "", "SHA-256 of every model that a stage read, the same before and after it:", ""]
    lines += [*(f"- {s}" for s in unchanged(result)), "", "## Limits", "", *(f"- {s}" for s in LIMITS), ""]
    lines += ["## Reproduce", "", "```", result.command, "```", "", f"Seed {result.seed}. "]
    lines[-1] += ", ".join(f"{k} {v}" for k, v in result.versions.items())
    return "\n".join(lines) + "\n"
