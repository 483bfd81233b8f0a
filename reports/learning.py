"""What the optimizer updates of real runs did, in words and numbers: findings, curves and the table of a report.

Only series that mean something in these runs: what was not measured, and what is at rest in every batch (nothing
clipped, all tokens weighing the same), has no curve. It refuses to know markup and geometry."""

from __future__ import annotations

from typing import Any

from reports import numbers
from reports.comparison import Comparison, Figures, VariantRuns
from reports.reward import Curve, curve_of
from reports.sentences import Letter, Number, Sentence, joined, say
from reports.series import NATS, SERIES
from reports.view import View, letters

KIND = "measured"
MOST_NAMED = 3
"""Up to so many variants the heading names the value of each."""


def curve(v: VariantRuns, name: str) -> Curve | None:
    """Mean, lowest and highest seed by batch; None if there is no batch in which every seed has it."""
    return curve_of(v, lambda s: s.learning.get(name))


def shown(comparison: Comparison) -> list[str]:
    """Series that some run has and that is not at rest in every batch of every run; of real runs only."""
    return [name for name in _measured(comparison) if not _rests(comparison, name)]


def at_rest(comparison: Comparison) -> list[str]:
    """Series that say the same in every batch: that nothing happened."""
    return [name for name in _measured(comparison) if _rests(comparison, name)]


def _measured(comparison: Comparison) -> list[str]:
    if not comparison.real:
        return []
    return [name for name in SERIES if any(curve(v, name) is not None for v in comparison.variants)]


def _rests(comparison: Comparison, name: str) -> bool:
    if name in ("engine_kl", "mismatch_kl"):
        return False  # no difference at all is a finding
    series = SERIES[name]
    found = [s.learning[name] for r in comparison.runs for s in r.steps if name in s.learning]
    return all(abs(x - series.rest) < series.still for x in found)


def _value(f: Figures, name: str, first: bool = False) -> Number:
    ends = f.learning[name]
    return Number(SERIES[name].write((ends.first if first else ends.last).mean, 0.0), KIND)


def learning_heading(view: View) -> Sentence:
    """How far student and teacher, or engine and trainer, are apart."""
    names = shown(view.comparison)
    for name, words in (("teacher_kl", "KL to the teacher"), ("reference_kl", "KL to the reference")):
        if name in names:
            return say(words, " goes ", _each(view, name, from_first=True))
    if "engine_kl" in names:
        head = say("Trainer and engine differ by ", _each(view, "engine_kl"), f" {NATS} before an update")
        return say(head, ", an update adds ", _each(view, "update_kl")) if "update_kl" in names else head
    if "mismatch_kl" in names:
        return say("The policies that train and that generated differ by ", _each(view, "mismatch_kl"), f" {NATS}")
    return say("What the updates did")


def _each(view: View, name: str, from_first: bool = False) -> Sentence:
    """The value of each variant at the end; of many, the smallest and the largest."""
    figures = [f for f in view.figures if name in f.learning]

    def one(f: Figures) -> Sentence:
        start = say("from ", _value(f, name, first=True), " to ") if from_first else ()
        return say(start, _value(f, name), () if view.comparison.single else say(" (", Letter(f.letter), ")"))

    if len(figures) <= MOST_NAMED:
        return joined([one(f) for f in figures])
    low, high = (pick(figures, key=lambda f: f.learning[name].last.mean) for pick in (min, max))
    return say("between ", one(low), " and ", one(high)) if not from_first else joined([one(low), one(high)])


def learning_words(view: View) -> Sentence:
    """What has no curve because nothing happened, and what the engine difference holds besides."""
    c = view.comparison
    quiet = [_inside(SERIES[name].label) for name in at_rest(c)]
    out: Sentence = ()
    if quiet:
        were, have = ("was", "has") if len(quiet) == 1 else ("were", "have")
        listed = numbers.listed(quiet)
        out = say(f"{listed[0].upper()}{listed[1:]} {were} at rest in every batch and {have} no curve. ")
    stale = [f for f in view.figures if "engine_kl" in f.learning and f.mean("staleness_dequeue_mean") > 0]
    if "engine_kl" in shown(c) and stale:
        whose = "The experience" if c.single else say("The experience of ", letters(stale))
        out = say(
            out,
            whose,
            " is older than the trainer: its engine difference also holds the updates since it was generated. ",
        )
    return out


def _inside(label: str) -> str:
    """A label in the middle of a sentence."""
    return label if label.startswith("KL") else label[0].lower() + label[1:]


def costs_shown(view: View) -> bool:
    """Whether what a format costs belongs beside how well engine and trainer agree: variants differ in it, or weights
    are converted."""
    sizes = {f.engine_weight_bytes for f in view.figures}
    return min(sizes) > 0 and (len(sizes) > 1 or any(f.mean("update_requantize_s") > 0 for f in view.figures))


def learning_table(view: View) -> dict[str, Any]:
    """The formats, means of the last fifth with their spread over seeds, and what the engines' format costs. Cells:
    (text, kind); no kind where there is no figure."""
    names = shown(view.comparison)
    head = [("Formats", "engine, trainer", "g-l-formats")] if (formats := all(f.formats for f in view.figures)) else []
    head += [(SERIES[n].label, SERIES[n].unit, SERIES[n].term) for n in names]
    costs = costs_shown(view)
    if costs:
        head += [("Weights of an engine", "in its format", "g-l-bytes"), ("Requantise", "s per update", "g-update")]
    rows = []
    for f in view.figures:
        cells: list[tuple[str, str]] = [(f.formats, "")] if formats else []
        for n in names:
            ends = f.learning.get(n)
            cells.append(("·", "") if ends is None else (SERIES[n].write(ends.last.mean, ends.last.sd), KIND))
        if costs:
            cells.append((numbers.size(f.engine_weight_bytes), "analytic"))
            cells.append((f.text("update_requantize_s"), f.kinds["update_requantize_s"]))
        rows.append({"letter": f.letter, "name": f.name, "cells": cells})
    return {"head": head, "rows": rows}


def terms(view: View) -> set[str]:
    """Glossary ids of the table's columns."""
    return {term for _, _, term in learning_table(view)["head"]} if shown(view.comparison) else set()
