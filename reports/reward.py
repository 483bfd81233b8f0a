"""What the rewards of real runs say: how far they rise from the first fifth of the batches to the last, over seeds.

Simulated runs learn nothing and have no place here (`Comparison.rewarded`). It refuses to know markup and geometry.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from msgspec import Struct

from reports import numbers
from reports.comparison import Figures, VariantRuns
from reports.sentences import Letter, Number, Sentence, joined, say
from reports.spread import separated
from reports.view import View, derived, differs, letters
from testbed.metrics.summary import StepRecord

FIRST, LAST, RISE = "reward_first", "reward_last", "reward_rise"
MOST_NAMED = 3
"""Up to so many variants the heading gives both ends of each."""


class Curve(Struct, frozen=True):
    """A figure by batch: mean, lowest and highest over seeds, of the batches that every seed has."""

    batches: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve(v: VariantRuns) -> Curve:
    """Of the mean reward. Raises ValueError if no batch is common to the seeds."""
    found = curve_of(v, lambda s: s.reward_mean)
    if found is None:
        raise ValueError(f"the seeds of {v.name} have no batch in common")
    return found


def curve_of(v: VariantRuns, read: Callable[[StepRecord], float | None]) -> Curve | None:
    """Of any figure; None if there is no batch in which every seed has it."""
    by_seed = [{s.batch: x for s in r.steps if (x := read(s)) is not None} for r in v.runs]
    batches = sorted(set.intersection(*(set(seed) for seed in by_seed)))
    values = [[seed[b] for seed in by_seed] for b in batches]
    if not batches:
        return None
    return Curve(batches, [fmean(x) for x in values], [min(x) for x in values], [max(x) for x in values])


def _plain(f: Figures, metric: str) -> Number:
    """The mean without its spread."""
    return Number(numbers.hundredths(f.mean(metric)), f.kinds[metric])


def _direction(f: Figures) -> int:
    """1: it rises, −1: it falls, 0: the two fifths do not differ by more than the spread, or print the same."""
    first, last = f.stats[FIRST], f.stats[LAST]
    if not separated(first, last) or numbers.hundredths(first.mean) == numbers.hundredths(last.mean):
        return 0
    return 1 if last.mean > first.mean else -1


def reward_heading(view: View) -> Sentence:
    """From where to where the reward goes in each variant; of many variants, how many rise and where they end."""
    if len(view.figures) > MOST_NAMED:
        return _of_many(view)
    clauses: list[Sentence] = []
    for direction, verb in ((1, "rises "), (-1, "falls ")):
        moved = [f for f in view.figures if _direction(f) == direction]
        if moved:
            ends = [say("from ", _plain(f, FIRST), " to ", _plain(f, LAST), _in(view, f)) for f in moved]
            clauses.append(say(verb, joined(ends)))
    still = [f for f in view.figures if _direction(f) == 0]
    if still:
        each = [
            say(Letter(f.letter), " (", _plain(f, FIRST), " to ", _plain(f, LAST), ")")
            if not view.comparison.single
            else say("from ", _plain(f, FIRST), " to ", _plain(f, LAST))
            for f in still
        ]
        if view.comparison.single:
            clauses.append(say("does not clearly change: ", joined(each)))
        else:
            clauses.append(say("does not clearly change in ", joined(each)))
    return say("Reward ", joined(clauses, ", and "))


def _in(view: View, f: Figures) -> Sentence:
    return () if view.comparison.single else say(" in ", Letter(f.letter))


def _of_many(view: View) -> Sentence:
    figures = view.figures
    risen, fallen = (sum(_direction(f) == d for f in figures) for d in (1, -1))
    all_of = f"{numbers.counted(len(figures))} variants"
    where = "every variant" if risen == len(figures) else f"{numbers.counted(risen)} of {all_of}"
    falls = f", falls in {numbers.counted(fallen)}" if fallen else ""
    low, high = (pick(figures, key=lambda f: f.mean(LAST)) for pick in (min, max))
    ends = say(
        _plain(low, LAST), " (", Letter(low.letter), ") and ", _plain(high, LAST), " (", Letter(high.letter), ")"
    )
    return say(f"Reward rises in {where}{falls}, and ends between ", ends)


def reward_margin(view: View) -> Sentence:
    """The rise of every variant (of many: the largest and the smallest), and over seeds its spread and its least."""
    seeds, figures = len(view.comparison.seeds), view.figures
    over = f" in each of {seeds} seeds" if seeds > 1 else ""
    tail = "." if seeds > 1 else "; with one seed it is not known how much of it is chance."
    head = f"The rise, last fifth minus first{over}"
    if len(figures) > MOST_NAMED:
        low, high = (pick(figures, key=lambda f: f.mean(RISE)) for pick in (min, max))
        return say(
            head, ", is largest in ", _rise(view, high, ": "), ", and smallest in ", _rise(view, low, ": "), tail
        )
    return say(head, ": ", joined([_rise(view, f) for f in figures], ", "), tail)


def _rise(view: View, f: Figures, link: str = " ") -> Sentence:
    """`A 0.41 ± 0.02 (at least 0.39)`."""
    rise = f.stats[RISE]
    value = Number(numbers.hundredths(rise.mean, rise.sd), f.kinds[RISE])
    least = Number(numbers.hundredths(min(rise.values)), f.kinds[RISE])
    return say(
        () if view.comparison.single else say(Letter(f.letter), link),
        value,
        say(" (at least ", least, ")") if len(rise.values) > 1 else (),
    )


def reward_against_base(view: View) -> Sentence:
    """Where the others end against the baseline; nothing of a single run."""
    if view.comparison.single:
        return ()
    base = view.base
    apart = [f for f in view.figures if differs(f, base, LAST)]
    close = [f for f in view.figures if f.letter != base.letter and f not in apart]
    clauses: list[Sentence] = []
    for side, word in ((1, "above"), (-1, "below")):
        there = [f for f in apart if side * (f.mean(LAST) - base.mean(LAST)) > 0]
        if there:
            gaps = sorted(abs(f.mean(LAST) - base.mean(LAST)) for f in there)
            low, high = (derived(numbers.hundredths(gaps[i]), LAST, base, *there) for i in (0, -1))
            gap = say(low) if low == high else say("between ", low, " and ", high)
            verb = "is" if len(there) == 1 else "are"
            clauses.append(say(letters(there), f" {verb} ", gap, f" {word} ", Letter(base.letter)))
    if close:
        verb = "does" if len(close) == 1 else "do"
        least = "the spread" if len(view.comparison.seeds) > 1 else f"5{numbers.NBSP}%"
        clauses.append(say(letters(close), f" {verb} not differ from ", Letter(base.letter), f" by more than {least}"))
    return say("In the last fifth ", joined(clauses, "; "), ".")


def reward_table(view: View) -> dict[str, Any]:
    """Both ends and the rise with their spread over seeds, the smallest rise, and the rise of each seed."""
    seeds = view.comparison.seeds
    several = len(seeds) > 1
    head = ["first fifth", "last fifth", "rise"]
    if several:
        head += ["smallest rise", *(f"seed {s}" for s in seeds)]
    rows = []
    for f in view.figures:
        rises = f.stats[RISE].values
        per_seed = [numbers.hundredths(x) for x in (min(rises), *rises)] if several else []
        cells = [*(f.text(m) for m in (FIRST, LAST, RISE)), *per_seed]
        rows.append({"letter": f.letter, "name": f.name, "cells": cells, "kind": f.kinds[RISE]})
    return {"head": head, "rows": rows}
