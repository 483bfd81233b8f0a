"""Which runs may stand side by side, and their figures: variants, seeds, equal GPUs, equal workload.

It refuses to know how anything is printed, and to compare what differs in more than the variants say.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from reports.kinds import weakest
from reports.metrics import EVERY, kind_of, metrics_for
from reports.palette import IDLE, LETTERS
from reports.series import Ends, ends_of
from reports.spread import Stat
from testbed.metrics.summary import CAUSES, RunSummary


class ComparisonError(Exception):
    """These runs cannot be compared; the message has the two values that differ."""


class VariantRuns(Struct):
    """One variant: its runs, one per seed."""

    letter: str
    """`A` to `L`; `build_comparison` gives it, in the order of the study."""
    name: str
    note: str
    runs: list[RunSummary]
    changes: dict[str, object] = field(default_factory=dict)
    """What differs from the base scenario: dotted key -> value."""


class Comparison(Struct):
    study: str
    question: str
    variants: list[VariantRuns]
    baseline: int
    """Index of the variant that differences are against."""
    command: str
    versions: dict[str, str]
    seconds: float
    """Time to produce the runs: CPU time of simulated ones, wall time of real ones."""
    seeds: list[int]
    scenario_hashes: dict[str, str] = field(default_factory=dict)
    """Letter -> hash of the first seed's scenario."""
    facts: dict[str, str] = field(default_factory=dict)
    """Input family (`engine_step`, `price`, ...) or any other word -> what it is, for the page's last part."""
    alternatives: bool = True
    """Whether one variant may be named the best: they are layouts to choose from, not cases to look at."""
    unequal: list[str] = field(default_factory=list)
    """What really differs among `gpus` and `workload`, because the study allows it."""

    @property
    def single(self) -> bool:
        """One variant: a run report, without comparisons."""
        return len(self.variants) == 1

    @property
    def runs(self) -> list[RunSummary]:
        return [r for v in self.variants for r in v.runs]

    @property
    def real(self) -> bool:
        """Whether every run was made by actual engines and trainers."""
        return all(r.backend == "real" for r in self.runs)

    @property
    def rewarded(self) -> bool:
        """Whether rewards may be shown: every run is real, some ask for rewards, and their summaries hold them (old
        ones have 0 everywhere).

        A simulation learns nothing, its rewards are the workload's own draws.
        """
        runs = [r for r in self.runs if r.rewarded]
        return self.real and all(r.steps for r in runs) and any(s.reward_mean for r in runs for s in r.steps)

    @property
    def with_rewards(self) -> Comparison:
        """Of the variants that ask for rewards alone; the first is the baseline where the baseline asks for none."""
        asking = [v for v in self.variants if all(r.rewarded for r in v.runs)]
        base = self.variants[self.baseline]
        return replace(self, variants=asking, baseline=asking.index(base) if base in asking else 0)


def build_comparison(
    *,
    study: str,
    question: str,
    variants: Sequence[VariantRuns],
    baseline: int = 0,
    command: str = "",
    versions: Mapping[str, str] | None = None,
    seconds: float = 0.0,
    facts: Mapping[str, str] | None = None,
    allow_unequal: Collection[str] = (),
    alternatives: bool = True,
) -> Comparison:
    """Check that the runs may be compared. `allow_unequal` may hold `gpus`, `workload`, `batch`.

    Raises ComparisonError: no or too many variants, a variant without runs, different seeds, GPU totals or workloads,
    different staleness measures, a run without measured steps.
    """
    if not 1 <= len(variants) <= len(LETTERS):
        raise ComparisonError(f"a comparison has 1 to {len(LETTERS)} variants, not {len(variants)}")
    if not 0 <= baseline < len(variants):
        raise ComparisonError(f"baseline {baseline} is not one of {len(variants)} variants")
    named = [
        VariantRuns(letter, v.name, v.note, sorted(v.runs, key=lambda r: r.seed), dict(v.changes))
        for letter, v in zip(LETTERS, variants, strict=False)
    ]
    for v in named:
        if not v.runs:
            raise ComparisonError(f"{_called(v)} has no runs")
        for r in v.runs:
            if r.measured_steps < 1 or r.measured_s <= 0:
                raise ComparisonError(
                    f"{_called(v)}, seed {r.seed}: no measured steps ({r.measured_steps}); ended by: {r.finish_reason}"
                )
    base = named[baseline]
    seeds = [r.seed for r in base.runs]
    if len(set(seeds)) != len(seeds):
        raise ComparisonError(f"{_called(base)} has a seed twice: {seeds}")
    for v in named:
        _same("seeds", base, seeds, v, [r.seed for r in v.runs])
        for mine, theirs in zip(v.runs, base.runs, strict=True):
            where = f" (seed {mine.seed})"
            if not {"workload", "batch"} & set(allow_unequal):
                _same("workload hashes" + where, base, theirs.workload_hash, v, mine.workload_hash)
            _same("staleness measures" + where, base, theirs.staleness_measure, v, mine.staleness_measure)
            if "gpus" not in allow_unequal:
                _same("GPU totals" + where, base, theirs.num_gpus, v, mine.num_gpus)
            pools = sum(p.gpus for p in mine.pools)
            if pools != mine.num_gpus:
                raise ComparisonError(f"{_called(v)}{where}: its pools have {pools} GPUs, the run says {mine.num_gpus}")
    return Comparison(
        study=study,
        question=question,
        variants=named,
        baseline=baseline,
        command=command,
        versions=dict(versions or {}),
        seconds=seconds,
        seeds=seeds,
        scenario_hashes={v.letter: v.runs[0].scenario_hash for v in named},
        facts=dict(facts or {}),
        alternatives=alternatives,
        unequal=_unequal(named),
    )


def _called(v: VariantRuns) -> str:
    return f"variant {v.letter} ({v.name})"


def _unequal(variants: list[VariantRuns]) -> list[str]:
    """What differs although comparisons normally forbid it."""
    gpus = {r.num_gpus for v in variants for r in v.runs}
    workloads = {tuple(r.workload_hash for r in v.runs) for v in variants}
    return [word for word, values in (("gpus", gpus), ("workload", workloads)) if len(values) > 1]


def _same(what: str, a: VariantRuns, left: object, b: VariantRuns, right: object) -> None:
    if left != right:
        raise ComparisonError(f"different {what}: {_called(a)} has {left}, {_called(b)} has {right}")


class Lane(Struct, frozen=True):
    """GPU time of one lane, mean over seeds.

    `seconds`: seconds per step by cause (GPU-seconds / GPUs / steps); only causes that occur.
    """

    name: str
    lane: str
    gpus: int
    seconds: dict[str, float]

    @property
    def length(self) -> float:
        """Seconds per step: the sum over causes."""
        return math.fsum(self.seconds.values())

    @property
    def idle_share(self) -> float:
        return math.fsum(self.seconds.get(c, 0.0) for c in IDLE) / self.length if self.length else 0.0


class Figures(Struct, frozen=True):
    """Everything a report prints of one variant."""

    letter: str
    name: str
    note: str
    changes: dict[str, object]
    stats: dict[str, Stat]
    """By metric, in the order of the tables; the same metrics in every variant of a comparison, but for rewards where
    one asks for none."""
    kinds: dict[str, str]
    """Of each metric: the weakest over seeds."""
    kind: str
    """Of the run itself."""
    lanes: tuple[Lane, ...]
    completion: dict[int, float]
    """Staleness at completion -> share of what was completed, all seeds together."""
    dequeue: dict[int, float]
    bound: int | None
    path: str
    gpus: int
    learning: dict[str, Ends]
    """What the updates did, by series (`reports.series`)."""
    engine_weight_bytes: float
    formats: str
    """Of the engines' weights and of training; empty where the summary does not say."""

    def mean(self, metric: str) -> float:
        return self.stats[metric].mean

    def text(self, metric: str) -> str:
        """The mean, written with the digits its spread allows."""
        stat = self.stats[metric]
        return EVERY[metric].write(stat.mean, stat.sd)

    @property
    def causes(self) -> tuple[str, ...]:
        """Causes that occur in any lane, in the order of the table of causes."""
        return tuple(c for c in CAUSES if any(c in lane.seconds for lane in self.lanes))


def figures_of(v: VariantRuns, rewarded: bool = False) -> Figures:
    """Reduce a variant's runs to its figures, with those of the rewards if the comparison is `rewarded`."""
    first = v.runs[0]
    metrics = metrics_for(v.runs, rewarded)
    stats = {name: Stat(tuple(float(m.read(r)) for r in v.runs)) for name, m in metrics.items()}
    kinds = {name: weakest(kind_of(m, r) for r in v.runs) for name, m in metrics.items()}
    return Figures(
        letter=v.letter,
        name=v.name,
        note=v.note,
        changes=v.changes,
        stats=stats,
        kinds=kinds,
        kind=kinds["step_time_s"],
        lanes=tuple(_lane(v.runs, i) for i in range(len(first.pools))),
        completion=_histogram([r.staleness[r.staleness_measure].completion.histogram for r in v.runs]),
        dequeue=_histogram([r.staleness[r.staleness_measure].dequeue.histogram for r in v.runs]),
        bound=first.staleness_bound,
        path=first.weight_update.path,
        gpus=first.num_gpus,
        learning=ends_of(v.runs) if first.backend == "real" else {},
        engine_weight_bytes=first.engine_weight_bytes,
        formats=f"{first.engine_precision}, {first.training_precision}" if first.engine_precision else "",
    )


def _lane(runs: list[RunSummary], index: int) -> Lane:
    pool = runs[0].pools[index]
    seconds = {}
    for cause in CAUSES:
        mean = math.fsum(
            r.pools[index].gpu_seconds.get(cause, 0.0) / (r.pools[index].gpus * r.measured_steps) for r in runs
        ) / len(runs)
        if mean > 0:
            seconds[cause] = mean
    return Lane(pool.name, pool.lane, pool.gpus, seconds)


def _histogram(histograms: list[dict[int, int]]) -> dict[int, float]:
    counts: dict[int, int] = {}
    for h in histograms:
        for value, n in h.items():
            counts[value] = counts.get(value, 0) + n
    total = sum(counts.values())
    return {value: n / total for value, n in sorted(counts.items())} if total else {}


def closure(comparison: Comparison) -> float:
    """Largest relative gap between the sum of causes and GPUs × measured time, over all pools of all runs."""
    return max(
        abs(math.fsum(p.gpu_seconds.values()) / (p.gpus * r.measured_s) - 1)
        for v in comparison.variants
        for r in v.runs
        for p in r.pools
    )


def all_figures(comparison: Comparison) -> list[Figures]:
    return [figures_of(v, comparison.rewarded) for v in comparison.variants]
