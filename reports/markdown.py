"""The report as Markdown: the same answer, table, findings, limits and definitions, without plots.

It refuses to compute figures and to phrase findings.
"""

from __future__ import annotations

from typing import Any

from reports import compared
from reports.answer import answer, price_of_it, rests_on
from reports.compared import NAVIGATION, all_numbers_text, checks, lane_table
from reports.comparison import Comparison
from reports.glossary import metric_terms
from reports.headings import gpu_worst, headings
from reports.held_out import held_out_table, held_out_words
from reports.kinds import BY_NAME, FAMILIES, KINDS
from reports.learning import learning_table, learning_words, terms
from reports.limits import limits
from reports.ratios import ratio_table
from reports.ratios import terms as ratio_terms
from reports.reward import reward_against_base, reward_margin, reward_table
from reports.sentences import Sentence, as_markdown
from reports.view import View, input_kinds, rewarded_view, used_kinds, view_of


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table; the first column is left, the others right."""
    clean = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = "|" + "|".join([":--"] + ["--:"] * (len(head) - 1)) + "|"
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in clean)]


def first_table(view: View) -> list[str]:
    best = compared.marked(view)
    head = ["Variant", *(f"{name} ({unit})" for name, unit in compared.COLUMNS.values())]
    rows = []
    for f in view.figures:
        cells = [f"**{f.letter}** {f.name}" + (f" ({f.note})" if f.note else "")]
        for metric in compared.COLUMNS:
            stale = metric == "staleness_dequeue_mean"
            text = compared.staleness_text(f) if stale else f.text(metric)
            if f.letter in best[metric]:
                text = f"**{text}**"
            small = "" if stale else compared.small_figures(view, f, metric)
            cells.append(f"{text} {BY_NAME[f.kinds[metric]].mark}" + (f" ({small})" if small not in ("", "–") else ""))
        rows.append(cells)
    return table(head, rows)


def gpu_table(view: View) -> list[str]:
    data = lane_table(view)
    rows = [
        [
            f"**{r['letter']}** {r['name']}",
            *(f"{v} {BY_NAME[r['kind']].mark}" if v else "·" for v in r["cells"]),
            f"{r['idle']} {BY_NAME[r['kind']].mark}",
        ]
        for r in data["rows"]
    ]
    return table(["seconds per step", *data["head"], "idle share"], rows)


def rewards(data: dict[str, Any], *words: Sentence) -> list[str]:
    """How far the reward rises: words and table."""
    rows = [
        [f"**{r['letter']}** {r['name']}", *(f"{v} {BY_NAME[r['kind']].mark}" for v in r["cells"])]
        for r in data["rows"]
    ]
    return [" ".join(as_markdown(s) for s in words if s), "", *table(["reward", *data["head"]], rows), ""]


def updates(view: View) -> list[str]:
    """What the updates did: the words, and the means of the last fifth."""
    words = as_markdown(learning_words(view)).strip()
    return [*([words, ""] if words else []), *by_variant("last fifth of the batches", learning_table(view)), ""]


def by_variant(corner: str, data: dict[str, Any]) -> list[str]:
    """A table whose cells have a kind each, or none."""
    rows = [
        [
            f"**{r['letter']}** {r['name']}",
            *(f"{text} {BY_NAME[kind].mark}" if kind else text for text, kind in r["cells"]),
        ]
        for r in data["rows"]
    ]
    return table([corner, *(f"{label} ({unit})" for label, unit, _ in data["head"])], rows)


def render(comparison: Comparison) -> str:
    """The whole report."""
    view = view_of(comparison)
    heads = headings(view)
    out = [
        f"# {comparison.study}",
        "",
        comparison.question,
        "",
        f"**{as_markdown(answer(view)).replace('**', '')}**",
        "",
    ]
    out += [as_markdown(price_of_it(view)), "", as_markdown(rests_on(view)), ""]
    out += ["Marks: " + ", ".join(f"{k.mark} {k.name}" for k in used_kinds(view)) + ".", "", *first_table(view), ""]
    out += [notes(view), ""]
    for name, head in heads.items():
        out += [f"## {NAVIGATION[name]}", "", as_markdown(head) + ".", ""]
        if name == "gpu":
            worst = gpu_worst(view)
            out += [*([as_markdown(worst), ""] if worst else []), *gpu_table(view), ""]
        if name == "reward":
            asking = rewarded_view(view)
            out += rewards(reward_table(asking), reward_margin(asking), reward_against_base(asking))
        if name == "held_out":
            out += rewards(held_out_table(view), held_out_words(view))
        if name == "learning":
            out += updates(view)
        if name == "ratios":
            out += [*by_variant("all batches", ratio_table(view)), ""]
    out += [
        "## All figures",
        "",
        *table(["mean over seeds", *(f.letter for f in view.figures)], all_numbers_text(view)),
        "",
    ]
    out += ["## Limits of this result", ""]
    out += [
        f"- **{as_markdown(what).strip().replace('**', '')}** {as_markdown(why).strip()}" for what, why in limits(view)
    ]
    out += ["", "## Reproduce", ""]
    if comparison.command:
        out += ["```", comparison.command, "```", ""]
    out += [f"- seeds: {', '.join(str(s) for s in comparison.seeds)}"]
    out += [f"- {k}: {v}" for k, v in checks(view)]
    out += [
        f"- {FAMILIES[f]}: {BY_NAME[k].mark} {comparison.facts.get(f, k)}" for f, k in input_kinds(comparison).items()
    ]
    out += [f"- {k}: {v}" for k, v in comparison.facts.items() if k not in FAMILIES]
    out += [f"- {k}: {v}" for k, v in comparison.versions.items()]
    out += ["", "## Glossary", ""]
    defined = terms(view) | ratio_terms(view)
    out += [f"- **{d.term}**: {d.text}" for d in metric_terms(comparison.rewarded, defined).values()]
    out += [f"- {k.mark} **{k.name}**: {k.definition}" for k in KINDS]
    return "\n".join(out) + "\n"


def notes(view: View) -> str:
    c = view.comparison
    words = "Bold: best of its column (none where more than two share it). " if view.ranked and not c.single else ""
    words += "" if c.single else f"In brackets: difference to {view.base.letter}; "
    if len(c.seeds) > 1:
        words += f"± one standard deviation over {len(c.seeds)} seeds{'' if c.single else '; ≈ within the spread'}. "
    elif not c.single:
        words += "one seed, no spread; ≈ under 5\u00a0%, not a difference. "
    return words + "Trained tokens are actor tokens that carried loss."
