"""The page of a comparison: places figures, findings and plots into the template.

It refuses to compute figures and to phrase findings.
"""

from __future__ import annotations

from typing import Any

from markupsafe import Markup, escape

from reports import compared, learning_plot, numbers, palette, plots, ratio_plot, ratios, reward_plot
from reports.answer import answer, price_of_it, rests_on
from reports.comparison import Comparison, Figures
from reports.glossary import groups
from reports.headings import gpu_reading, gpu_worst, headings
from reports.held_out import held_out_table, held_out_words
from reports.kinds import BY_NAME, FAMILIES
from reports.learning import learning_table, learning_words, terms
from reports.limits import limits
from reports.metrics import EVERY, METRICS
from reports.pages import mark, numbered, page
from reports.reward import LAST, reward_against_base, reward_margin, reward_table
from reports.sentences import Letter, Mark, Number, Sentence, Term, say
from reports.view import View, input_kinds, rewarded_view, update_parts, used_kinds, view_of, with_updates

MINI_WIDTH, MINI_HEIGHT = 540.0, 28.0


def chip(letter: str) -> Markup:
    return Markup(f'<b class="chip v{escape(letter)}">{escape(letter)}</b>')


def sentence(parts: Sentence) -> Markup:
    out = []
    for p in parts:
        if isinstance(p, str):
            out.append(escape(p))
        elif isinstance(p, Number):
            out.append(numbered(p.text, p.kind))
        elif isinstance(p, Letter):
            out.append(chip(p.letter))
        elif isinstance(p, Mark):
            out.append(Markup(f'<span class="ki">{mark(p.kind)}</span>'))
        elif isinstance(p, Term):
            out.append(Markup(f'<a class="def" href="#{escape(p.id)}">{escape(p.text)}</a>'))
    return Markup("").join(out)


def swatch(role: str) -> Markup:
    return Markup(
        f'<svg class="sw" viewBox="0 0 14 10" aria-hidden="true">'
        f'<rect width="14" height="10" class="c-{escape(role)}"/></svg>'
    )


def mini(view: View, f: Figures) -> Markup:
    """The bar of the table: length = step time, strips = lanes by their GPUs. Stretches with its cell."""
    longest = max(lane.length for g in view.figures for lane in g.lanes)
    most = max(g.gpus for g in view.figures)
    gap = 2.0 * (len(f.lanes) - 1)
    out, y = [], 0.0
    for lane in f.lanes:
        x, h = 0.0, (MINI_HEIGHT - gap) * lane.gpus / most
        for cause, s in lane.seconds.items():
            w = s / longest * MINI_WIDTH
            what = palette.GPU_TIME[cause].label
            title = f"{what}: {numbers.seconds(s)} of {numbers.seconds(lane.length)}, {lane.gpus} GPUs"
            out.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" class="c-{cause}" '
                f'data-gpus="{lane.gpus}" data-seconds="{s:.6g}"><title>{escape(title)}</title></rect>'
            )
            x += w
        y += h + 2
    label = f"step time {f.text('step_time_s')} by cause"
    return Markup(
        f'<svg class="mini" viewBox="0 0 {MINI_WIDTH:g} {MINI_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">' + "".join(out) + "</svg>"
    )


def spark(f: Figures, bins: int) -> Markup:
    """Staleness at dequeue as a histogram of a few pixels."""
    pitch = 44 / bins
    out = []
    for value in range(bins):
        share = sum(s for v, s in f.dequeue.items() if v == value or (value == bins - 1 and v > value))
        x = value * pitch
        out.append(f'<rect x="{x:.1f}" y="15.5" width="{pitch - 2:.1f}" height="1" class="c-line2"/>')
        if share > 0:
            h = max(15 * share, 1.0)
            out.append(
                f'<rect x="{x:.1f}" y="{15 - h:.1f}" width="{pitch - 2:.1f}" height="{h:.1f}" class="c-v{f.letter}"/>'
            )
    label = f"distribution of staleness at dequeue, 0 to {bins - 1}"
    return Markup(f'<svg class="spark" viewBox="0 0 44 17" role="img" aria-label="{label}">' + "".join(out) + "</svg>")


def rows(view: View) -> list[dict[str, Any]]:
    """The first table, a row per variant."""
    best = compared.marked(view)
    bins = max(3, min(9, 1 + max([0, *(v for f in view.figures for v in f.dequeue)])))
    out = []
    for i, f in enumerate(view.figures):
        cells = []
        for metric in compared.COLUMNS:
            stale = metric == "staleness_dequeue_mean"
            text = Markup(compared.staleness_text(f, "<i>/</i>")) if stale else escape(f.text(metric))
            if f.letter in best[metric]:
                text = Markup(f'<span class="best">{text}<span class="vh"> (best)</span></span>')
            under = spark(f, bins) if stale else compared.small_figures(view, f, metric)
            cells.append(
                {
                    "metric": metric,
                    "value": numbered(text, f.kinds[metric]),
                    "sort": f.mean(metric),
                    "under": under,
                    "stale": stale,
                }
            )
        out.append({"index": i, "figures": f, "cells": cells, "mini": mini(view, f)})
    return out


def all_numbers(view: View) -> list[dict[str, Any]]:
    """Every metric, variants across."""
    return [
        {
            "label": EVERY[name].label,
            "unit": EVERY[name].unit,
            "term": EVERY[name].term,
            "cells": [
                numbered(f.text(name), f.kinds[name]) if name in f.stats else compared.NONE for f in view.figures
            ],
        }
        for name in compared.metrics_of(view)
    ]


def render(comparison: Comparison) -> str:
    """The whole page."""
    view = view_of(comparison)
    heads = headings(view)
    draw = {
        "gpu": plots.gpu_time,
        "reward": reward_plot.reward,
        "learning": learning_plot.learning,
        "ratios": ratio_plot.ratios,
        "staleness": plots.staleness,
        "trajectory": plots.trajectory,
        "update": plots.update,
    }
    figures = {name: Markup(draw[name](view).both) for name in heads if name in draw}
    rewarded = rewarded_view(view) if comparison.rewarded else None
    kinds = input_kinds(comparison)
    return page(
        "page.html.j2",
        {"chip": chip, "sentence": sentence, "swatch": swatch},
        c=comparison,
        view=view,
        answer=answer(view),
        basis=(price_of_it(view), rests_on(view)),
        columns=[(m, METRICS[m].term, METRICS[m].better > 0, *compared.COLUMNS[m]) for m in compared.COLUMNS],
        rows=rows(view),
        legend=compared.legend(view),
        heads=heads,
        plots=figures,
        gpu_lead=say(gpu_reading(view), " ", gpu_worst(view), " "),
        lane_table=compared.lane_table(view),
        reward_words=say(reward_margin(rewarded), " ", reward_against_base(rewarded)) if rewarded else (),
        reward_table=reward_table(rewarded) if rewarded else None,
        reward_kind=rewarded.base.kinds[LAST] if rewarded else "",
        held_out_words=held_out_words(view) if "held_out" in heads else (),
        held_out_table=held_out_table(view) if "held_out" in heads else None,
        learning_words=learning_words(view) if "learning" in heads else (),
        learning_table=learning_table(view) if "learning" in heads else None,
        ratio_table=ratios.ratio_table(view) if "ratios" in heads else None,
        all_numbers=all_numbers(view),
        trajectory_key=[
            (p.label, p.role)
            for n, p in palette.TRAJECTORY.items()
            if any(f.mean(f"trajectory_{n}_s") > 0 for f in view.figures)
        ],
        update_key=[
            (p.label, p.role)
            for n, p in palette.UPDATE.items()
            if any(n in update_parts(f) for f in with_updates(view))
        ],
        limits=limits(view),
        checks=compared.checks(view),
        input_kinds={FAMILIES[f]: (kind, comparison.facts.get(f, kind)) for f, kind in kinds.items()},
        other_facts={k: v for k, v in comparison.facts.items() if k not in FAMILIES},
        kinds=used_kinds(view),
        by_name=BY_NAME,
        glossary=groups(comparison.rewarded, terms(view) | ratios.terms(view)),
        navigation={
            k: v for k, v in compared.NAVIGATION.items() if k in heads or k in ("limits", "reproduce", "glossary")
        },
        measure=compared.measured_by(comparison),
        many=len(view.figures) > 5,
        dense=len(view.figures) > 6,
        counted=numbers.counted,
    )
