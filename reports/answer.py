"""The first sentences of the page: the answer, what it costs, what it rests on.

Nothing is claimed that lies within the spread (`reports.spread`); ties are said. It refuses to know HTML, Markdown and
colours.
"""

from __future__ import annotations

from reports import numbers
from reports.comparison import Figures
from reports.kinds import FAMILIES
from reports.sentences import Letter, Mark, Part, Sentence, Term, say
from reports.view import (
    COST,
    TIME,
    View,
    cost_note,
    derived,
    input_kinds,
    instruction,
    less,
    letters,
    number,
    percent,
    relative,
    staleness_words,
)


def answer(view: View) -> Sentence:
    """The first sentence of the page: layout, number, baseline, staleness, cost. Ties are said."""
    if view.comparison.single:
        return _run_answer(view)
    w, base = view.winner, view.base
    if len(view.best) == len(view.figures):
        return _all_tie(view)
    if len(view.best) > 1:
        return _some_tie(view)
    if w.letter == base.letter:
        rest = [f for f in view.figures if f.letter != w.letter]
        second = min(rest, key=lambda f: f.mean(view.measure))
        more = derived(numbers.percent(relative(second, w, view.measure)), view.measure, second, w)
        return say(
            "Stay with ",
            base.name,
            " (",
            Letter(w.letter),
            "): ",
            number(w, TIME),
            " per step",
            cost_note(w, view),
            ", ",
            staleness_words(w),
            "; the next, ",
            Letter(second.letter),
            f", {'costs' if view.measure == COST else 'takes'} ",
            more,
            " more.",
        )
    change = less(view, w)
    return say(
        instruction(view, w),
        ": ",
        number(w, TIME),
        " per step instead of ",
        number(base, TIME),
        " with ",
        base.name,
        " (",
        Letter(base.letter),
        ")",
        say(", ", change) if change else (),
        cost_note(w, view),
        ", ",
        staleness_words(w),
        ".",
    )


def _run_answer(view: View) -> Sentence:
    f = view.winner
    return say(
        "One step takes ",
        number(f, TIME),
        f" on {f.gpus} GPUs",
        cost_note(f, view),
        ", ",
        staleness_words(f),
        "; GPUs idle ",
        percent(f, "gpu_idle_share"),
        " of the time.",
    )


def _range(figures: list[Figures], metric: str) -> Sentence:
    """`between x and y`, or one number when they print the same."""
    low, high = (pick(figures, key=lambda f: f.mean(metric)) for pick in (min, max))
    if low.text(metric) == high.text(metric):
        return say(derived(low.text(metric), metric, *figures))
    return say("between ", number(low, metric), " and ", number(high, metric))


def spread_words(view: View) -> str:
    n = len(view.comparison.seeds)
    return (
        f"within the spread over {n} seeds"
        if n > 1
        else "and with one seed a difference under 5\u00a0% is not a difference"
    )


def _all_tie(view: View) -> Sentence:
    money = say(", ", _range(view.figures, COST), " per 1,000 steps") if view.measure == COST else ()
    return say(
        f"The {numbers.counted(len(view.figures))} variants tie: ",
        _range(view.figures, TIME),
        " per step",
        money,
        ", ",
        spread_words(view),
        ".",
    )


def _some_tie(view: View) -> Sentence:
    tied = [view.figures[i] for i in sorted(view.best)]
    money = say(" (", _range(tied, COST), " per 1,000 steps)") if view.measure == COST else ()
    head = say(letters(tied), " tie: ", _range(tied, TIME), " per step")
    if view.base_ties:
        others = [f for f in tied if f.letter != view.base.letter]
        return say(
            "Nothing beats ",
            view.base.name,
            " (",
            Letter(view.base.letter),
            ") by more than the spread: it ties with ",
            letters(others),
            " at ",
            _range(tied, TIME),
            " per step",
            money,
            ".",
        )
    change = less(view, view.winner)
    return say(
        head,
        " instead of ",
        number(view.base, TIME),
        " with ",
        view.base.name,
        " (",
        Letter(view.base.letter),
        ")",
        say(", ", change) if change else (),
        money,
        "; ",
        Letter(view.winner.letter),
        " runs ",
        staleness_words(view.winner),
        ".",
    )


def price_of_it(view: View) -> Sentence:
    """The second sentence: what the answer costs (drops, break-even) and that reward is not part of it."""
    w, base = view.winner, view.base
    waste = w.mean("waste_share")
    subject: Part = Letter(w.letter) if len(view.best) > 1 else "It"
    drops = (
        say(subject, " drops ", percent(w, "waste_share"), " of what it generates")
        if waste > 0
        else say(subject, " drops nothing it generates")
    )
    even: Sentence = ()
    if not view.comparison.single and not view.base_ties:
        ratio = derived(numbers.times(base.mean(view.measure) / w.mean(view.measure)), view.measure, w, base)
        word = "cheaper" if view.measure == COST else "faster"
        even = say(
            f", and stays the {word} run while it needs fewer than ",
            ratio,
            " the steps of ",
            Letter(base.letter),
            " (",
            Term("break-even", "g-even"),
            ")",
        )
    simulated = any(r.backend == "simulated" for v in view.comparison.variants for r in v.runs)
    return say(drops, even, ". Reward is not simulated." if simulated else ". Reward is not part of this report.")


def rests_on(view: View) -> Sentence:
    """What the results rest on: kind of the results, agreement of the seeds, kind of each input family."""
    seeds = view.comparison.seeds
    out: list[Sentence] = [say("Results ", Mark(view.winner.kind), view.winner.kind)]
    if len(seeds) == 1:
        out[0] = say(out[0], ", one seed, no spread")
    elif not view.comparison.single and len(view.best) == 1:
        wins = sum(
            min(view.figures, key=lambda f, i=i: f.stats[view.measure].values[i]).letter == view.winner.letter
            for i in range(len(seeds))
        )
        word = "cheapest" if view.measure == COST else "fastest"
        out[0] = say(out[0], ", ", Letter(view.winner.letter), f" {word} in {wins} of {len(seeds)} seeds")
    else:
        out[0] = say(out[0], f", {len(seeds)} seeds")
    by_kind: dict[str, list[str]] = {}
    for family, kind in input_kinds(view.comparison).items():
        by_kind.setdefault(kind, []).append(FAMILIES[family])
    for kind, words in by_kind.items():
        out.append(say(numbers.listed(words), " ", Mark(kind), kind))
    return say(*(part for i, s in enumerate(out) for part in (("; ",) if i else ()) + s), ".")
