"""What came out of a validation: every quantity real and simulated, the error, the real side's own spread, and which
part of the simulation the error comes from.

The error of the full simulation is the sum of two: that of the times (the run's own work, simulated times, against the
real run) and that of the work (the scenario's own work model against the run's own work). Decisions have no size: they
are the same or not. It refuses to know how runs were made and how a report looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec
from msgspec import Struct, field

from testbed.metrics.turns import Turn, running
from testbed.validation.matched import Matched, Pair, matched, pairs, repeated, worst
from testbed.validation.observed import Observed
from testbed.validation.quantities import STEP_TIME, Quantity, total_variation, values

STALENESS_LIMIT = 0.02
"""Total variation of staleness at dequeue that is accepted."""
CACHED_LIMIT = 0.99
"""Share of turns whose cached tokens have to be equal."""
GATED = (STEP_TIME, "trained_tokens_per_s", "trajectories_per_s", "latency_p50", "latency_p95")
"""What `--max-error` reads."""
WORST = 10


class Decisions(Struct, frozen=True):
    """The decision replay of one real journal."""

    run: str
    events: int
    actions: int
    difference: str = ""
    """The first one; empty if every action is repeated."""
    truncated: str = ""


class Row(Struct):
    """One quantity. A value per real run, and per simulation of it: its own work with simulated times (`timing`), and
    the scenario's own work model (`full`)."""

    quantity: Quantity
    real: list[float]
    timing: list[float]
    full: list[float]
    pooled: float | None = None
    """Standard deviation / mean of real runs over the scenarios of a suite (module `spread`)."""

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the real runs; None for one."""
        return stdev(self.real) if len(self.real) > 1 else None

    def error(self, of: Sequence[float]) -> float | None:
        """(mean simulated - mean real) / mean real; None where the real one is 0 and the other is not."""
        real, simulated = fmean(self.real), fmean(of)
        if real:
            return (simulated - real) / real
        return None if simulated else 0.0

    @property
    def timing_error(self) -> float | None:
        return self.error(self.timing)

    @property
    def full_error(self) -> float | None:
        return self.error(self.full)

    @property
    def work_error(self) -> float | None:
        """The work model's part of the full error."""
        a, b = self.full_error, self.timing_error
        return None if a is None or b is None else a - b

    def within_spread(self, of: Sequence[float]) -> bool:
        """Whether the simulations' mean is within one standard deviation of the real runs' mean: the real runs' own, or
        the pooled one of a suite where that is larger."""
        if len(self.real) < 2:
            return False
        mean = fmean(self.real)
        return abs(fmean(of) - mean) <= max(stdev(self.real), (self.pooled or 0.0) * abs(mean))

    def verdict(self, of: Sequence[float], limit: float | None) -> str:
        """`within`, `spread` (not within, but within the real side's own spread), `missed`; empty if not judged."""
        error = self.error(of)
        if limit is None:
            return ""
        if error is not None and abs(error) <= limit:
            return "within"
        return "spread" if self.within_spread(of) else "missed"


class Histogram(Struct):
    """Staleness at one event, by the scenario's own measure: value -> trajectories, over all runs together."""

    event: str
    real: dict[int, float]
    timing: dict[int, float]
    full: dict[int, float]
    spread: float | None
    """Largest total variation between one real run and the others; None for one run."""

    @property
    def timing_variation(self) -> float:
        return total_variation(self.real, self.timing)

    @property
    def full_variation(self) -> float:
        return total_variation(self.real, self.full)


class WorstTurn(Struct):
    """A turn whose latency the simulation misses most. Times of each in seconds since the start of its own run."""

    run: str
    real: Turn
    simulated: Turn


class Validation(Struct, kw_only=True):
    """Everything the report shows."""

    name: str
    question: str
    runs: list[str]
    measure: str
    """Of staleness."""
    steps: int
    """Measured steps of one real run."""
    engines: int
    decisions: list[Decisions]
    rows: list[Row]
    staleness: list[Histogram]
    turns: Matched
    """Of all runs together."""
    repeated: Matched | None
    """The first real run against the others: what the real side's own spread makes of turns; None for one run."""
    worst: list[WorstTurn]
    running: dict[str, list[tuple[float, int]]]
    """Turns in engines over time, of the first real run and its two simulations: `real`, `timing`, `full`."""
    kinds: dict[str, str]
    """What each family of the simulation's numbers rests on."""
    marks: dict[str, float]
    """Shares of engine-cost answers outside the model's range."""
    real_versions: dict[str, str]
    versions: dict[str, str]
    scenario: str
    """SHA-256 of it, 12 digits."""
    command: str = ""
    speeds: list[float] = field(default_factory=list)
    """How many times as long everything took around each real run as when its profile was made: closed loops on its
    engines. The simulations' times are multiplied by it. Empty where it was not measured."""
    trainer_speeds: list[float] = field(default_factory=list)
    """The same of optimizer updates, where they were probed."""
    seconds: float = 0.0
    """Of the simulations."""
    remarks: list[str] = field(default_factory=list)

    def row(self, name: str) -> Row | None:
        return next((r for r in self.rows if r.quantity.name == name), None)

    @property
    def decided_alike(self) -> bool:
        return not any(d.difference for d in self.decisions)


def rows_of(real: Sequence[Observed], timing: Sequence[Observed], full: Sequence[Observed]) -> list[Row]:
    """All quantities that one of the runs has; a cause or a phase that a run does not have took 0 s. What is 0
    everywhere is left out."""
    by_side = [[dict(values(run)) for run in side] for side in (real, timing, full)]
    known = dict.fromkeys(q for side in by_side for run in side for q in run)
    rows = []
    for q in known:
        in_real, in_timing, in_full = ([run.get(q, 0.0) for run in side] for side in by_side)
        rows.append(Row(q, in_real, in_timing, in_full))
    return [r for r in rows if any(r.real) or any(r.timing) or any(r.full)]


def staleness_of(
    measure: str, real: Sequence[Observed], timing: Sequence[Observed], full: Sequence[Observed]
) -> list[Histogram]:
    """At completion and at dequeue."""
    found = []
    for event in ("completion", "dequeue"):

        def counts(runs: Iterable[Observed], event: str = event) -> dict[int, float]:
            total: dict[int, float] = {}
            for run in runs:
                for value, n in getattr(run.summary.staleness[measure], event).histogram.items():
                    total[value] = total.get(value, 0.0) + n
            return dict(sorted(total.items()))

        spread = None
        if len(real) > 1:
            others = [[r for r in real if r is not one] for one in real]
            spread = max(total_variation(counts([one]), counts(rest)) for one, rest in zip(real, others, strict=True))
        found.append(Histogram(event, counts(real), counts(timing), counts(full), spread))
    return found


def turns_of(
    names: Sequence[str], real: Sequence[Observed], timing: Sequence[Observed]
) -> tuple[Matched, list[WorstTurn]]:
    """Turn by turn, over all runs; and the worst of them."""
    found: list[tuple[str, Pair]] = []
    turns = 0
    for name, run, simulated in zip(names, real, timing, strict=True):
        found += [(name, pair) for pair in pairs(run, simulated)]
        turns += len(run.measured)
    together = matched(turns, [pair for _, pair in found])
    of_run = {id(pair): name for name, pair in found}
    furthest = worst([pair for _, pair in found], WORST)
    return together, [WorstTurn(of_run[id(pair)], *pair) for pair in furthest]


def repeated_turns(real: Sequence[Observed]) -> Matched | None:
    """Turns of the first real run against those of the others; None for one run."""
    if len(real) < 2:
        return None
    return matched(len(real[0].measured) * (len(real) - 1), [p for other in real[1:] for p in repeated(real[0], other)])


def running_of(run: Observed) -> list[tuple[float, int]]:
    """Turns in engines over the measured steps, times since their start."""
    start, end = run.window
    inside = [(t - start, n) for t, n in running(run.turns) if start <= t <= end]
    return inside or [(0.0, 0)]


# --- what it says -----------------------------------------------------------------------------------------------------


def judged(v: Validation) -> list[tuple[str, str]]:
    """(what, verdict) of everything that has a limit, of the simulation with the run's own work."""
    said = [("decisions", "within" if v.decided_alike else "missed")]
    said += [(r.quantity.name, r.verdict(r.timing, r.quantity.limit)) for r in v.rows if r.quantity.limit is not None]
    said.append(("cached_tokens_equal", _cached_verdict(v)))
    for h in v.staleness:
        if h.event == "dequeue":
            verdict = "within" if h.timing_variation <= STALENESS_LIMIT else "missed"
            if verdict == "missed" and h.spread is not None and h.timing_variation <= h.spread:
                verdict = "spread"
            said.append(("staleness_at_dequeue", verdict))
    return said


def _cached_verdict(v: Validation) -> str:
    if v.turns.same_cached >= CACHED_LIMIT:
        return "within"
    return "spread" if v.repeated is not None and v.turns.same_cached >= v.repeated.same_cached else "missed"


def beyond(v: Validation, max_error: float) -> list[Row]:
    """Gated quantities whose simulation with the run's own work is off by more than `max_error` (a share) and by more
    than the real side's own spread."""
    rows = [r for name in GATED if (r := v.row(name)) is not None]
    return [r for r in rows if r.verdict(r.timing, max_error) == "missed"]


def causes(v: Validation) -> list[tuple[str, float, float]]:
    """(cause, share of a step that the times add to it, that the work adds) of the lane that waits for the others: a
    shared pool or the trainer. The causes of a lane sum to the step time, so these sum to its error. Largest first."""
    step = v.row(STEP_TIME)
    lanes = [r for r in v.rows if r.quantity.group == "split"]
    if step is None or not lanes:
        return []
    lane = lanes[-1].quantity.name.split("/")[1]  # the trainer's is the last one, a shared pool's the only one
    real = fmean(step.real)
    found = []
    for r in lanes:
        if r.quantity.name.split("/")[1] == lane:
            of_times = (fmean(r.timing) - fmean(r.real)) / real
            of_work = (fmean(r.full) - fmean(r.timing)) / real
            found.append((r.quantity.label, of_times, of_work))
    return sorted(found, key=lambda c: -abs(c[1]) - abs(c[2]))


def figures_of(v: Validation) -> dict[str, Any]:
    """Everything but the timelines as plain data, for `--json`."""
    return {
        "name": v.name,
        "runs": v.runs,
        "measured_steps": v.steps,
        "engines": v.engines,
        "decisions": msgspec.to_builtins(v.decisions),
        "quantities": [
            {
                "name": r.quantity.name,
                "unit": r.quantity.unit,
                "real": r.real,
                "timing": r.timing,
                "full": r.full,
                "real_mean": fmean(r.real),
                "real_std": r.spread,
                "real_pooled": r.pooled,
                "timing_error": r.timing_error,
                "full_error": r.full_error,
                "work_error": r.work_error,
                "limit": r.quantity.limit,
                "verdict": r.verdict(r.timing, r.quantity.limit),
            }
            for r in v.rows
        ],
        "staleness_measure": v.measure,
        "staleness": [
            {
                **msgspec.to_builtins(h, str_keys=True),
                "timing_variation": h.timing_variation,
                "full_variation": h.full_variation,
            }
            for h in v.staleness
        ],
        "turns": msgspec.to_builtins(v.turns),
        "turns_between_real_runs": None if v.repeated is None else msgspec.to_builtins(v.repeated),
        "worst_turns": msgspec.to_builtins(v.worst),
        "causes": [{"cause": c, "of_times": t, "of_work": w} for c, t, w in causes(v)],
        "verdicts": dict(judged(v)),
        "kinds": v.kinds,
        "outside_range": v.marks,
        "real_versions": v.real_versions,
        "machine_speeds": v.speeds,
        "trainer_speeds": v.trainer_speeds,
        "scenario_hash": v.scenario,
        "remarks": v.remarks,
    }
