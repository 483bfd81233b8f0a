"""What is known of the optimizer updates of real runs: one table of series by batch, and the means at a run's ends.

It refuses to know variants, comparisons and words."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from msgspec import Struct

from reports import numbers
from reports.spread import Stat
from testbed.metrics.scores import fifth
from testbed.metrics.summary import RunSummary

Write = Callable[[float, float], str]


def _share(value: float, spread: float) -> str:
    """`2.6 %`, `98.5 % ± 0.4 %`; a spread that prints as nothing is left out."""
    if spread < 5e-4:
        return numbers.percent(value, 1)
    return f"{numbers.percent(value, 1)}{numbers.NBSP}±{numbers.NBSP}{numbers.percent(spread, 1)}"


class Series(Struct, frozen=True):
    """One figure per batch: the mean over the batch's updates."""

    label: str
    unit: str
    term: str
    """Glossary id."""
    write: Write = numbers.scientific
    rest: float = 0.0
    """Its value where nothing happens."""
    still: float = 1e-9
    """So close to it is at rest."""


NATS = "nats per token"
SERIES: dict[str, Series] = {
    "engine_kl": Series("Engine difference, k3", NATS, "g-l-engine"),
    "update_kl": Series("Update difference, k3", NATS, "g-l-update"),
    "mismatch_kl": Series("Engine and update difference together, k3", NATS, "g-l-mismatch"),
    "teacher_kl": Series("KL to the teacher, k1", NATS, "g-l-teacher"),
    "teacher_kl_k3": Series("KL to the teacher, k3", NATS, "g-l-teacher"),
    "reference_kl": Series("KL to the reference", NATS, "g-l-reference"),
    "clip_share": Series("Clipped", "of trained tokens", "g-l-clip", _share),
    "truncated_share": Series("Truncated weights", "of trained tokens", "g-l-truncated", _share),
    "masked_share": Series("Masked by limits", "of trained tokens", "g-l-limited", _share),
    "effective_sample_size": Series("Effective sample size", "of trained tokens", "g-l-ess", _share, 1.0, 5e-4),
    "grad_norm": Series("Gradient norm", "before clipping", "g-l-norm"),
    "value_loss": Series("Value loss", "of the critic", "g-l-value"),
    "value_grad_norm": Series("Critic’s gradient norm", "before clipping", "g-l-norm"),
    "explained_variance": Series("Explained variance", "of returns, by the critic", "g-l-explained"),
    "fallback_share": Series("Routed without a record", "of positions to replay", "g-l-fallback", _share),
}
"""Name in `StepRecord.learning` -> what it is, in the order of page and tables."""


class Ends(Struct, frozen=True):
    """Means of the first and of the last fifth of the batches (one at least), one per seed."""

    first: Stat
    last: Stat


def ends_of(runs: list[RunSummary]) -> dict[str, Ends]:
    """Of every series that each of these runs has at both ends."""
    found = {}
    for name in SERIES:
        both = [_ends(run, name) for run in runs]
        whole = [x for x in both if x is not None]
        if both and len(whole) == len(both):
            first, last = zip(*whole, strict=True)
            found[name] = Ends(Stat(first), Stat(last))
    return found


def _ends(run: RunSummary, name: str) -> tuple[float, float] | None:
    n = fifth(len(run.steps))
    first, last = ([s.learning[name] for s in steps if name in s.learning] for steps in (run.steps[:n], run.steps[-n:]))
    return (fmean(first), fmean(last)) if first and last else None
