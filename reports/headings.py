"""One heading per result that states the finding, from templates with a threshold each.

A template that has nothing to say falls back to a plain statement. It refuses to know HTML, Markdown and colours.
"""

from __future__ import annotations

from collections.abc import Mapping

from reports import numbers
from reports.comparison import Figures
from reports.held_out import held_out, held_out_heading
from reports.learning import learning_heading, shown
from reports.palette import GPU_TIME, IDLE, TRAJECTORY
from reports.ratios import ratio_heading
from reports.ratios import shown as ratios_shown
from reports.reward import reward_heading
from reports.sentences import Letter, Number, Sentence, Term, joined, say
from reports.view import NOTICEABLE, View, derived, differs, number, overlapped, percent, rewarded_view, with_updates


def gpu_heading(view: View) -> Sentence:
    """Hidden generation, idle GPU time, and what the trainer waits for."""
    w, base = view.winner, view.base
    clauses: list[Sentence] = []
    hidden, idle = "hidden_generation_share", "gpu_idle_share"
    if (
        w.mean(hidden) > 0.05
        and (view.comparison.single or differs(w, base, hidden))
        and w.mean(hidden) > base.mean(hidden) - NOTICEABLE
    ):
        clauses.append(
            say(
                Letter(w.letter),
                " ",
                Term("hides", "g-over"),
                " ",
                percent(w, hidden),
                " of generation behind training",
            )
        )
    if differs(w, base, idle) and abs(w.mean(idle) - base.mean(idle)) > NOTICEABLE:
        word = "falls" if w.mean(idle) < base.mean(idle) else "rises"
        clauses.append(say(f"idle GPU time {word} from ", percent(base, idle), " to ", percent(w, idle)))
    wait = "trainer_idle_share"
    if clauses and w.mean(wait) > NOTICEABLE:
        clauses.append(say("its trainer waits for data ", percent(w, wait), " of the time"))
    if clauses:
        if clauses[0][0] != Letter(w.letter):
            clauses[0] = say("With ", Letter(w.letter), " ", clauses[0])
        first = say(clauses[0], "; ") if len(clauses) == 3 else ()
        return say(first, joined(clauses[-2:], ", and "))
    lazy = _most_idle(view)
    if lazy is not None:
        return say(
            Letter(lazy.letter),
            " leaves ",
            percent(lazy, idle),
            " of its GPU time idle, ",
            Letter(w.letter),
            " ",
            percent(w, idle),
        )
    if view.comparison.single:
        return say("GPUs idle ", percent(w, idle), " of the time")
    low, high = (pick(view.figures, key=lambda f: f.mean(idle)) for pick in (min, max))
    if differs(low, high, idle):
        return say(
            Letter(high.letter),
            " leaves ",
            percent(high, idle),
            " of its GPU time idle, ",
            Letter(low.letter),
            " ",
            percent(low, idle),
        )
    return say("Idle GPU time is ", _shares(view.figures, idle), " and does not tell the variants apart")


def _shares(figures: list[Figures], metric: str) -> Sentence:
    low, high = (pick(figures, key=lambda f: f.mean(metric)) for pick in (min, max))
    return say("between ", percent(low, metric), " and ", percent(high, metric))


def _most_idle(view: View) -> Figures | None:
    """The variant with the most idle GPU time, if that is clear of the winner's."""
    worst = max(view.figures, key=lambda f: f.mean("gpu_idle_share"))
    return worst if differs(worst, view.winner, "gpu_idle_share") and worst.mean("gpu_idle_share") > 0.05 else None


def gpu_reading(view: View) -> str:
    """How to read the plot."""
    gpus = {f.gpus for f in view.figures}
    every = f"{gpus.pop()} GPUs" if len(gpus) == 1 else "its GPUs"
    return f"Length is step time, height is GPUs, so area is GPU time and cost. Every bar sums to wall time × {every}."


def gpu_worst(view: View) -> Sentence:
    """The variant that wastes the most GPU time, if it is clear of the winner; else nothing."""
    worst = _most_idle(view)
    if worst is None or view.comparison.single:
        return ()
    idle = {c: sum(lane.seconds.get(c, 0.0) * lane.gpus for lane in worst.lanes) for c in IDLE}
    cause = max(idle, key=lambda c: idle[c])
    return say(
        Letter(worst.letter),
        " is idle the most: ",
        percent(worst, "gpu_idle_share"),
        f" of its GPU time, first of all “{GPU_TIME[cause].label}”.",
    )


def staleness_heading(view: View) -> Sentence:
    """How much the buffer adds, and whether a looser bound bought anything."""
    if all(f.mean("staleness_dequeue_max") == 0 for f in view.figures):
        return say("No experience is stale when a batch takes it")
    w = view.winner
    if w.mean("staleness_dequeue_max") == 0:
        stale = max(view.figures, key=lambda f: f.mean("staleness_dequeue_mean"))
        return say(
            Letter(w.letter),
            " trains on fresh experience; ",
            Letter(stale.letter),
            "’s is up to ",
            number(stale, "staleness_dequeue_max"),
            " versions old",
        )
    added = w.mean("staleness_in_buffer")
    if added >= 0.05 and added > w.stats["staleness_in_buffer"].sd:
        head = say(
            "The buffer adds ", number(w, "staleness_in_buffer"), " versions to ", Letter(w.letter), "’s experience"
        )
    else:
        head = say(
            Letter(w.letter),
            "’s experience is ",
            number(w, "staleness_dequeue_mean"),
            " versions old when a batch takes it",
        )
    looser = [
        f for f in view.figures if view.ranked and f.bound is not None and w.bound is not None and f.bound > w.bound
    ]
    if not looser:
        return head
    loosest = max(looser, key=lambda f: (f.bound or 0, -f.mean(view.measure)))
    return say(
        head,
        f"; η = {loosest.bound} (",
        Letter(loosest.letter),
        ") is used up to ",
        number(loosest, "staleness_dequeue_max"),
        ", at no gain",
    )


def trajectory_heading(view: View) -> Sentence:
    """Where the winner's trajectories spend their life."""
    w = view.winner
    total = w.mean("trajectory_total_s")
    kind = w.kinds["trajectory_total_s"]
    waiting = w.mean("trajectory_waits_for_group_s") + w.mean("trajectory_in_buffer_s")
    subject = say("In ", Letter(w.letter), " a trajectory spends ")
    if waiting >= 0.1 * total:
        return say(
            subject,
            Number(numbers.percent(waiting / total), kind),
            " of its life waiting for its group or in the buffer",
        )
    part = max(TRAJECTORY, key=lambda p: w.mean(f"trajectory_{p}_s"))
    share = w.mean(f"trajectory_{part}_s") / total
    return say(subject, Number(numbers.percent(share), kind), f" of its life in “{TRAJECTORY[part].label}”")


def update_heading(view: View) -> Sentence:
    """Total and pause of the winner's path against another path (WS-04, WS-10).

    Of the variants on another path the quickest speaks for it: a longer update than that is not the path's doing
    (draining under `finish`, waves). Of several paths the one that differs most is named.
    """
    figures = with_updates(view)
    w = view.winner if view.winner in figures else figures[0]
    others = [f for f in figures if f.path != w.path and differs(f, w, "update_total_s")]
    if not others:
        overlap = max(0.0, w.mean("update_total_s") - w.mean("update_pause_s"))
        tail: Sentence = ()
        if overlap > 0.01 * w.mean("update_total_s") and overlapped(w):
            tail = say(
                "; ",
                Number(numbers.percent(overlap / w.mean("update_total_s")), w.kinds["update_pause_s"]),
                " of it overlaps generation",
            )
        return say(
            "A weight update of ",
            Letter(w.letter),
            " takes ",
            number(w, "update_total_s"),
            " and pauses its engines for ",
            number(w, "update_pause_s"),
            tail,
        )
    quickest: dict[str, Figures] = {}
    for f in sorted(others, key=lambda f: f.mean("update_total_s")):
        quickest.setdefault(f.path, f)
    o = max(quickest.values(), key=lambda f: abs(f.mean("update_total_s") - w.mean("update_total_s")))
    slow, quick = (o, w) if o.mean("update_total_s") > w.mean("update_total_s") else (w, o)
    ratio = derived(numbers.times(slow.mean("update_total_s") / quick.mean("update_total_s")), "update_total_s", o, w)
    head = say(
        slow.path,
        " (",
        Letter(slow.letter),
        ") takes ",
        ratio,
        " as long as ",
        quick.path,
        " (",
        Letter(quick.letter),
        ")",
    )
    if not differs(slow, quick, "update_pause_s"):
        return head
    link = ", but" if slow.mean("update_pause_s") < quick.mean("update_pause_s") else ", and"
    return say(
        head,
        link,
        " pauses engines for ",
        number(slow, "update_pause_s"),
        " instead of ",
        number(quick, "update_pause_s"),
    )


def headings(view: View) -> Mapping[str, Sentence]:
    """Section -> its heading; sections without data are left out."""
    out = {"gpu": gpu_heading(view)}
    if view.comparison.rewarded:
        out["reward"] = reward_heading(rewarded_view(view))
    if held_out(view.comparison):
        out["held_out"] = held_out_heading(view)
    if shown(view.comparison):
        out["learning"] = learning_heading(view)
    if ratios_shown(view.comparison):
        out["ratios"] = ratio_heading(view)
    if any(f.dequeue for f in view.figures):
        out["staleness"] = staleness_heading(view)
    if view.winner.mean("trajectory_total_s") > 0:
        out["trajectory"] = trajectory_heading(view)
    if with_updates(view):
        out["update"] = update_heading(view)
    return out
