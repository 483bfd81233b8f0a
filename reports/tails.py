"""What a tail rule does to the sample, in a few figures: the quarter of the trajectories with the shortest replies
against that with the longest, and easy tasks against hard ones.

The bins are those of the run (`testbed.metrics.bias`); a quarter is the fewest bins from one end that hold one. It
refuses to judge whether a bias is too large."""

from __future__ import annotations

from testbed.metrics.summary import BiasBin, RunSummary

QUARTER = 0.25


def end_of(run: RunSummary, by: str, high: bool) -> BiasBin:
    """About a quarter of the trajectories from one end of the bins `by`, as one bin."""
    bins = [b for b in run.bias if b.by == by]
    wanted = QUARTER * sum(b.trained + b.given_up for b in bins)
    total = BiasBin(by, 0.0, 0.0, 0, 0, 0.0, 0.0)
    for b in reversed(bins) if high else bins:
        total.delay_s += b.delay_s * b.trained
        total.delay_steps += b.delay_steps * b.trained
        total.trained += b.trained
        total.given_up += b.given_up
        if total.trained + total.given_up >= wanted:
            break
    n = max(total.trained, 1)
    total.delay_s /= n
    total.delay_steps /= n
    return total


def given_up(run: RunSummary, by: str, high: bool) -> float:
    """Share that ended without being trained; 0 if nothing began."""
    found = end_of(run, by, high)
    return found.given_up / max(found.trained + found.given_up, 1)


def delay_steps(run: RunSummary, by: str, high: bool) -> float:
    """Mean RL steps from the first call of a trained one's task to its batch."""
    return end_of(run, by, high).delay_steps
