"""What the result does not say: one limit a line, only those that hold for these runs.

It refuses to know HTML, Markdown and colours.
"""

from __future__ import annotations

import re

from reports import numbers
from reports.comparison import Comparison
from reports.sentences import Letter, Mark, Number, Sentence, joined, say
from reports.view import View, fewer_tokens, input_kinds, letters, number, percent
from testbed.metrics.summary import RunSummary


def limits(view: View) -> list[tuple[Sentence, Sentence]]:
    """(what, why it matters), only what holds for these runs."""
    c, w = view.comparison, view.winner
    runs = c.runs
    simulated = any(r.backend == "simulated" for r in runs)
    out: list[tuple[Sentence, Sentence]] = []
    if simulated:
        stale = w.mean("staleness_dequeue_mean")
        worth = (
            say(
                "Whether 1,000 steps at staleness ",
                number(w, "staleness_dequeue_mean"),
                " are worth 1,000 steps at 0 is not known from here.",
            )
            if stale >= 0.05
            else say("Nothing here says what is learnt in a step.")
        )
        untrained = [v.letter for v in c.variants if any(r.backend == "simulated" for r in v.runs)]
        subject = (
            say("The model was not trained")
            if len(untrained) == len(c.variants)
            else say("In ", joined([(Letter(letter),) for letter in untrained]), " the model was not trained")
        )
        out.append((say("Time, not learning."), say(subject, ". ", worth)))
        out.append(
            (
                say("Nothing on mismatch."),
                say(
                    "Without log-probs there are no differences between engine and trainer, no ratios, no clipped or "
                    "masked shares of tokens: they are unknown, not 0."
                ),
            )
        )
    if "presets" in c.facts:
        out.append(
            (
                say("Settings, not frameworks."),
                say(
                    f"The schedules have the {c.facts['presets']}; engines and trainer are this testbed's. No "
                    "framework was run, and none is ranked."
                ),
            )
        )
    if c.real and re.search(r"\bCPU\b", c.facts.get("engine_step", "")):
        out.append(
            (
                say("The GPUs are stand-ins."),
                say(
                    "Each is a slot on the CPU, and all slots share the machine's cores: engines and trainer slow each "
                    "other down, and neither times nor shares of GPU time carry over to GPUs."
                ),
            )
        )
    free = [f for f in view.figures if c.rewarded and not any(r.rewarded for r in _runs(c, f.letter))]
    if free:
        verb = "asks" if len(free) == 1 else "ask"
        out.append((say(letters(free), f" {verb} for no rewards,"), say("so the section on rewards is without them.")))
    unrewarded = [f for f in view.figures if c.rewarded and f not in free and not _any_reward(c, f.letter)]
    if unrewarded:
        out.append(
            (
                say("The reward of ", letters(unrewarded), " is 0 in every batch,"),
                say("or the run's summary was written before rewards were kept."),
            )
        )
    for keys, changing in _changing_several(c).items():
        many = len(changing) > 1
        out.append(
            (
                say(
                    joined([(Letter(letter),) for letter in changing]),
                    f" change{'' if many else 's'} {numbers.counted(len(keys))} things at once",
                ),
                say(
                    f" ({numbers.listed(list(keys))}), so {'their differences' if many else 'its difference'} "
                    f"cannot be given to one of them."
                ),
            )
        )
    if len(c.seeds) == 1 and not c.single:
        out.append((say("One seed, no spread."), say("Only differences above 5\u00a0% are claimed.")))
    kinds = input_kinds(c)
    if kinds.get("trainer") in ("analytic", "assumed"):
        out.append((say("The trainer is a formula "), say(Mark(kinds["trainer"]), "and was not timed.")))
    if "reply_lengths" in kinds and kinds["reply_lengths"] != "measured":
        kind = kinds["reply_lengths"]
        capped = w.mean("capped_share") >= 0.0005
        cap = say(percent(w, "capped_share"), " of trajectories are ended by the length cap. ") if capped else ()
        out.append((say("Lengths are ", Mark(kind), kind, "."), say(cap, "They do not change as the policy learns.")))
    for model, share in _worst_marks(runs).items():
        out.append(
            (
                say(Number(numbers.percent(share), "simulated"), f" of {model} steps"),
                say(" lie outside the range of their cost tables and are extrapolated."),
            )
        )
    if any("stale" in r.waste.dropped_trajectories for r in runs):
        out.append(
            (
                say("Dropping is not neutral."),
                say("Long groups are dropped more often than short ones, which tilts the training data."),
            )
        )
    less = [(f.letter, fewer_tokens(view, f)) for f in view.figures if view.ranked]
    clauses = [say("of ", Letter(letter), " train ", fewer) for letter, fewer in less if fewer is not None]
    if clauses:
        why = say("Steps ", joined(clauses), " fewer tokens than those of ", Letter(view.base.letter), ".")
        out.append((say("Not every step trains as much."), why))
    if any(r.waste.corrected_trajectories for r in runs):
        out.append(
            (
                say("Corrections are counted, not judged."),
                say("What a correction costs in learning is not known from here."),
            )
        )
    if "gpus" in c.unequal:
        totals = ", ".join(f"{f.letter}: {f.gpus}" for f in view.figures)
        out.append((say("The variants have different numbers of GPUs"), say(f" ({totals}), as the study allows.")))
    if "workload" in c.unequal:
        out.append(
            (
                say("The variants do different work."),
                say("Steps of different batches or lengths are not the same thing."),
            )
        )
    if len({r.measured_steps for r in runs}) > 1:
        low, high = min(r.measured_steps for r in runs), max(r.measured_steps for r in runs)
        out.append((say("Not every run measured as many steps"), say(f" ({low} to {high}).")))
    if simulated:
        out.append(
            (say("No failures,"), say(" no slow machines, no other jobs on the network, unless the scenario has them."))
        )
    return out


def _runs(c: Comparison, letter: str) -> list[RunSummary]:
    return next(v.runs for v in c.variants if v.letter == letter)


def _any_reward(c: Comparison, letter: str) -> bool:
    return any(s.reward_mean for r in _runs(c, letter) for s in r.steps)


def _changing_several(c: Comparison) -> dict[tuple[str, ...], list[str]]:
    """What differs from the baseline together -> the letters in which it does."""
    base = c.variants[c.baseline].changes
    out: dict[tuple[str, ...], list[str]] = {}
    for v in c.variants:
        keys = tuple(k for k in dict.fromkeys((*base, *v.changes)) if _value(base, k) != _value(v.changes, k))
        if len(keys) > 1:
            out.setdefault(keys, []).append(v.letter)
    return out


def _value(changes: dict[str, object], key: str) -> tuple[object, ...]:
    """The value as a tuple of one, empty where the base scenario's stands."""
    return (changes[key],) if key in changes else ()


def _worst_marks(runs: list[RunSummary]) -> dict[str, float]:
    """Share of cost-model answers outside their range, the worst run's, by model."""
    worst: dict[str, float] = {}
    for r in runs:
        for model, share in r.marks.items():
            if share >= 0.001:
                worst[model] = max(share, worst.get(model, 0.0))
    return worst
