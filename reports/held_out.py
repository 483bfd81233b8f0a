"""What real runs get on tasks that they do not train on, before the first batch and after the last: words and table.

Of runs whose scenario asks for it (`real.eval_tasks`). It refuses to know markup and how tasks are answered."""

from __future__ import annotations

from typing import Any

from reports import numbers
from reports.comparison import Comparison, Figures
from reports.sentences import Letter, Number, Sentence, joined, say
from reports.spread import Stat
from reports.view import View

KIND = "measured"
MOST_NAMED = 3
"""Up to so many variants the heading names both ends of each."""


def held_out(comparison: Comparison) -> bool:
    """Whether every run was asked before and after."""
    return comparison.real and all(len(r.held_out) == 2 for r in comparison.runs)


def _ends(view: View, f: Figures) -> tuple[Stat, Stat]:
    """Mean reward before and after, one value a seed."""
    runs = next(v.runs for v in view.comparison.variants if v.letter == f.letter)
    first, last = (Stat(tuple(r.held_out[i].reward.mean for r in runs)) for i in (0, 1))
    return first, last


def _gain(first: Stat, last: Stat) -> Stat:
    return Stat(tuple(b - a for a, b in zip(first.values, last.values, strict=True)))


def _number(stat: Stat, spread: bool = False) -> Number:
    return Number(numbers.hundredths(stat.mean, stat.sd) if spread else numbers.hundredths(stat.mean), KIND)


def held_out_heading(view: View) -> Sentence:
    """From where to where; of many variants, where they end."""

    def letter(f: Figures) -> Sentence:
        return () if view.comparison.single else say(" (", Letter(f.letter), ")")

    ends = [(f, *_ends(view, f)) for f in view.figures]
    if len(ends) <= MOST_NAMED:
        each = [say("from ", _number(a), " to ", _number(b), letter(f)) for f, a, b in ends]
        return say("On held-out tasks the reward goes ", joined(each))
    low, high = (pick(ends, key=lambda e: e[2].mean) for pick in (min, max))
    return say(
        *("On held-out tasks the reward ends between ", _number(low[2]), letter(low[0])),
        *(" and ", _number(high[2]), letter(high[0])),
    )


def held_out_words(view: View) -> Sentence:
    """How many tasks, and the smallest gain of any seed."""
    c = view.comparison
    n = min(s.reward.n for r in c.runs for s in r.held_out)
    gains = [(f, _gain(*_ends(view, f))) for f in view.figures]
    f, least = min(gains, key=lambda g: min(g[1].values))
    who = () if c.single else say(", in ", Letter(f.letter))
    text = say(f"Each mean is over {numbers.grouped(n)} tasks that the run does not train on, one response each. ")
    smallest = Number(numbers.hundredths(min(least.values)), KIND)
    return say(text, "The smallest gain of any run is ", smallest, who, ".")


def held_out_table(view: View) -> dict[str, Any]:
    """Before, after and the gain with their spread over seeds, and the gain of each seed."""
    seeds = view.comparison.seeds
    head = ["before", "after", "gain", *([f"seed {s}" for s in seeds] if len(seeds) > 1 else [])]
    rows = []
    for f in view.figures:
        first, last = _ends(view, f)
        gain = _gain(first, last)
        cells = [numbers.hundredths(s.mean, s.sd) for s in (first, last, gain)]
        cells += [numbers.hundredths(x) for x in gain.values] if len(seeds) > 1 else []
        rows.append({"letter": f.letter, "name": f.name, "cells": cells, "kind": KIND})
    return {"head": head, "rows": rows}
