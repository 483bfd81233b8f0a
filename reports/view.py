"""A comparison seen with its figures: which variant is best, which differ, and the parts that sentences are made of.

It refuses to phrase whole sentences: `reports.answer`, `reports.headings` and `reports.limits` do.
"""

from __future__ import annotations

from msgspec import Struct

from reports import numbers
from reports.comparison import Comparison, Figures, all_figures
from reports.kinds import FAMILIES, KINDS, Kind, weakest
from reports.palette import UPDATE
from reports.sentences import Letter, Number, Sentence, joined, say
from reports.spread import best_of, separated

COST, TIME, TOKENS = "cost_usd_per_1000_steps", "step_time_s", "trained_tokens_per_step"
NOTICEABLE = 0.01
"""Shares below 1 % are not worth a claim."""


class View(Struct):
    """A comparison with its figures, and which variants are the best."""

    comparison: Comparison
    figures: list[Figures]
    measure: str
    """Metric that decides: cost, or step time where GPU hours are free."""
    best: list[int]
    """The variant that the page speaks of first, then those that tie with it: the baseline where it ties, else the
    cheapest. Of variants that do different work none is best, and the page speaks of the baseline."""

    @property
    def base(self) -> Figures:
        return self.figures[self.comparison.baseline]

    @property
    def winner(self) -> Figures:
        return self.figures[self.best[0]]

    @property
    def base_ties(self) -> bool:
        return self.comparison.baseline in self.best

    @property
    def ranked(self) -> bool:
        """Whether a best variant may be named: they do the same work, and are there to choose from."""
        return self.comparison.alternatives and "workload" not in self.comparison.unequal


def view_of(comparison: Comparison) -> View:
    figures = all_figures(comparison)
    measure = COST if all(f.mean(COST) > 0 for f in figures) else TIME
    view = View(comparison, figures, measure, [comparison.baseline])
    if view.ranked:
        tied = best_of([f.stats[measure] for f in figures], -1)
        first = (
            comparison.baseline if comparison.baseline in tied else min(tied, key=lambda i: figures[i].mean(measure))
        )
        view.best = [first, *(i for i in tied if i != first)]
    return view


def rewarded_view(view: View) -> View:
    """Of the variants that ask for rewards alone; the same where all do."""
    asking = view.comparison.with_rewards
    return view if len(asking.variants) == len(view.figures) else view_of(asking)


def differs(a: Figures, b: Figures, metric: str) -> bool:
    """Whether one metric of two variants is separated by more than the spread."""
    return a.letter != b.letter and separated(a.stats[metric], b.stats[metric])


def input_kinds(comparison: Comparison) -> dict[str, str]:
    """Weakest kind of each input family over all runs; families that no run names are left out."""
    found: dict[str, list[str]] = {}
    for v in comparison.variants:
        for r in v.runs:
            for family, kind in r.kinds.items():
                if family in FAMILIES:
                    found.setdefault(family, []).append(kind)
    return {family: weakest(found[family]) for family in FAMILIES if family in found}


def used_kinds(view: View) -> list[Kind]:
    """Kinds that a figure or an input of these runs has, strongest first."""
    used = {kind for f in view.figures for kind in f.kinds.values()} | set(input_kinds(view.comparison).values())
    return [k for k in KINDS if k.name in used]


def with_updates(view: View) -> list[Figures]:
    return [f for f in view.figures if f.mean("update_total_s") > 0]


def update_parts(f: Figures) -> dict[str, float]:
    """Seconds of one update by part; `rest` is what the parts leave of the total (waves, waiting between steps)."""
    parts = {name: f.mean(f"update_{name}") for name in UPDATE}
    rest = f.mean("update_total_s") - sum(parts.values())
    if rest > 0.02 * f.mean("update_total_s"):
        parts["rest"] = rest
    return {name: s for name, s in parts.items() if s > 0}


def number(f: Figures, metric: str, text: str | None = None) -> Number:
    return Number(f.text(metric) if text is None else text, f.kinds[metric])


def percent(f: Figures, metric: str) -> Number:
    return Number(numbers.percent(f.mean(metric)), f.kinds[metric])


def derived(text: str, metric: str, *figures: Figures) -> Number:
    """A number made of one metric of several variants."""
    return Number(text, weakest(f.kinds[metric] for f in figures))


def relative(f: Figures, to: Figures, metric: str) -> float:
    """Relative difference of means; 0 where the base is 0."""
    base = to.mean(metric)
    return f.mean(metric) / base - 1 if base else 0.0


def fewer_tokens(view: View, f: Figures) -> Number | None:
    """By how much a step trains fewer tokens than the baseline's, if that is a difference; else None."""
    if f.mean(TOKENS) < view.base.mean(TOKENS) and differs(f, view.base, TOKENS):
        return derived(numbers.percent(-relative(f, view.base, TOKENS)), TOKENS, f, view.base)
    return None


def overlapped(f: Figures) -> bool:
    """Whether generation and training overlap at all."""
    return f.mean("hidden_generation_share") > NOTICEABLE


def layout_words(f: Figures) -> str:
    """The placement and its asynchrony, as an instruction."""
    by_lane = {lane.lane: lane.gpus for lane in f.lanes}
    if set(by_lane) == {"shared"}:
        words = f"Colocate on all {f.gpus} GPUs"
    elif "shared" in by_lane:
        words = f"Give {by_lane.get('engines', 0)} GPUs to engines and share {by_lane['shared']}"
    else:
        words = f"Split the GPUs {by_lane.get('engines', 0)} + {by_lane.get('trainer', 0)}"
    if not overlapped(f):
        return words + " and generate and train in turns"
    return words + (f" and run async with η = {f.bound}" if f.bound is not None else " and run async without a bound")


def instruction(view: View, f: Figures) -> Sentence:
    """What to do, in words if they tell this variant from the others, else by its name; with its letter."""
    words = layout_words(f)
    alone = sum(layout_words(g) == words for g in view.figures) == 1
    return say(words if alone else f"Run {f.name}", " (", Letter(f.letter), ")")


def letters(figures: list[Figures]) -> Sentence:
    return joined([(Letter(f.letter),) for f in figures])


def staleness_words(f: Figures) -> Sentence:
    if f.mean("staleness_dequeue_max") == 0:
        return say("at a staleness of ", number(f, "staleness_dequeue_max", "0"))
    return say(
        "at a staleness of ",
        number(f, "staleness_dequeue_mean"),
        " on average and ",
        number(f, "staleness_dequeue_max"),
        " at most",
    )


def less(view: View, f: Figures) -> Sentence:
    """How much less (or more) time and money than the baseline. Says nothing of a difference within the spread."""
    time, money = relative(f, view.base, TIME), relative(f, view.base, COST)
    parts: list[Sentence] = []
    if separated(f.stats[TIME], view.base.stats[TIME]):
        parts.append(_less(time, "time", TIME, f, view.base))
    if view.measure == COST and separated(f.stats[COST], view.base.stats[COST]):
        same = parts and numbers.percent(abs(time)) == numbers.percent(abs(money)) and time * money > 0
        if same:
            word = "less time and money" if time < 0 else "more time and money"
            return say(derived(numbers.percent(abs(money)), COST, f, view.base), " " + word)
        parts.append(_less(money, "money", COST, f, view.base))
    return joined(parts)


def _less(change: float, what: str, metric: str, f: Figures, base: Figures) -> Sentence:
    return say(derived(numbers.percent(abs(change)), metric, f, base), f" {'less' if change < 0 else 'more'} {what}")


def cost_note(f: Figures, view: View) -> Sentence:
    return say(" (", number(f, COST), " per 1,000 steps)") if view.measure == COST else ()
