"""The first sentences of the page: the answer, what it costs, what it rests on.

Nothing is claimed that lies within the spread (`reports.spread`); ties are said. It refuses to know HTML, Markdown and
colours.
"""

from __future__ import annotations

from reports import numbers
from reports.comparison import Figures
from reports.kinds import FAMILIES
from reports.sentences import Letter, Mark, Sentence, Term, joined, say
from reports.view import (
    COST,
    TIME,
    View,
    cost_note,
    derived,
    differs,
    fewer_tokens,
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
    if not view.ranked:
        return _cases(view)
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
        *_but_fewer_tokens(view, w),
        ".",
    )


def _but_fewer_tokens(view: View, f: Figures) -> Sentence:
    """A step that trains less is not the same step for less: said in the same breath."""
    fewer = fewer_tokens(view, f)
    return () if fewer is None else say("; but each of its steps trains ", fewer, " fewer tokens")


def _cases(view: View) -> Sentence:
    low, high = (pick(view.figures, key=lambda f: f.mean(TIME)) for pick in (min, max))
    different = "workload" in view.comparison.unequal
    return say(
        "The variants do different work" if different else "The variants are cases to look at",
        ", so none is recommended: a step takes between ",
        number(low, TIME),
        " (",
        Letter(low.letter),
        ") and ",
        number(high, TIME),
        " (",
        Letter(high.letter),
        ").",
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
            f") by more than {'the spread' if len(view.comparison.seeds) > 1 else f'5{numbers.NBSP}%'}: it ties with ",
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
    """The second sentence: what the answer costs (drops, fewer tokens, break-even).

    Reward is no part of it; where there is none, that is said.
    """
    w, base = view.winner, view.base
    even: Sentence = ()
    if view.ranked and not view.comparison.single and not view.base_ties:
        ratio = derived(numbers.times(base.mean(view.measure) / w.mean(view.measure)), view.measure, w, base)
        even = say(
            ", and ",
            say(Letter(w.letter), " ") if len(view.best) > 1 else (),
            f"stays the {'cheaper' if view.measure == COST else 'faster'} run while it needs fewer than ",
            ratio,
            " the steps of ",
            Letter(base.letter),
            " (",
            Term("break-even", "g-even"),
            ")",
        )
    c = view.comparison
    simulated = any(r.backend == "simulated" for r in c.runs)
    absent = " Reward is not simulated." if simulated else "" if c.rewarded else " Reward is not part of this report."
    return say(_waste(view), even, _fewer_tokens(view), _most_tokens(view), "." + absent)


def _waste(view: View) -> Sentence:
    """What every variant that is called best (or every one, if none is) throws away."""
    chosen = [view.figures[i] for i in sorted(view.best)] if view.ranked else view.figures
    shares = [percent(f, "waste_share") if f.mean("waste_share") > 0 else "nothing" for f in chosen]
    if len(chosen) == 1:
        return say("It ", _verb(chosen[0]), " ", shares[0], " of what" * (shares[0] != "nothing"), " it generates")
    if set(shares) == {"nothing"}:
        return say(letters(chosen), " drop nothing they generate")
    each = [say(Letter(f.letter), f" {_verb(f)} ", share) for f, share in zip(chosen, shares, strict=True)]
    return say("Of what they generate, ", joined(each))


def _verb(f: Figures) -> str:
    """What is aborted and generated again is wasted without a trajectory being dropped."""
    return "drops" if f.mean("dropped_trajectories_share") > 0 or f.mean("waste_share") == 0 else "wastes"


def _fewer_tokens(view: View) -> Sentence:
    """Which of several that tie train less a step than the baseline."""
    if len(view.best) < 2:
        return ()
    less = [(f.letter, fewer_tokens(view, f)) for f in (view.figures[i] for i in sorted(view.best))]
    clauses = [say(Letter(letter), "’s steps train ", fewer, " fewer tokens") for letter, fewer in less if fewer]
    return say("; ", joined(clauses)) if clauses else ()


def _most_tokens(view: View) -> Sentence:
    """Whoever trains clearly more tokens a second than the answer: then the step is the wrong unit to choose by."""
    w, rate = view.winner, "trained_tokens_per_s_per_gpu"
    most = max(view.figures, key=lambda f: f.mean(rate))
    if not view.ranked or most in (view.figures[i] for i in view.best) or not differs(most, w, rate):
        return ()
    return say(
        ". ",
        Letter(most.letter),
        " trains more tokens: ",
        number(most, rate),
        " against ",
        number(w, rate),
        " per s per GPU",
    )


def _best_of_seed(view: View, i: int) -> str:
    """Its letter."""
    return min(view.figures, key=lambda f: f.stats[view.measure].values[i]).letter


def rests_on(view: View) -> Sentence:
    """What the results rest on: kind of the results, agreement of the seeds, kind of each input family."""
    seeds = view.comparison.seeds
    out: list[Sentence] = [say("Results ", Mark(view.winner.kind), view.winner.kind)]
    if len(seeds) == 1:
        out[0] = say(out[0], ", one seed, no spread")
    elif not view.comparison.single and view.ranked and len(view.best) == 1:
        wins = sum(_best_of_seed(view, i) == view.winner.letter for i in range(len(seeds)))
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
