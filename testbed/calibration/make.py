"""From measurements to a profile: which points a fit takes, its terms, and the ranges it holds in.

It refuses to know how things were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import Any

from msgspec import Struct, structs

from testbed.calibration.design import OUTPUTS, BesidePoint, ControlPoint, CrowdPoint, EnginePoint
from testbed.calibration.fit import Points, fit, medians, value
from testbed.calibration.phases import Phases, TrainPoint
from testbed.calibration.profile import (
    FORMAT,
    ArrivalFit,
    BesideFit,
    ControlTimes,
    CrowdFit,
    DecodeFit,
    FitRanges,
    PrefillFit,
    Profile,
    Quality,
    Range,
    Section,
    SwitchTimes,
    TrainerFit,
    UpdateTimes,
)

CONTEXT = "per_context_token_s"
ABOVE = "per_sequence_above_"
PREFILL = ("base_s", "per_token_s", "per_pair_s", "per_request_s")
ARRIVAL = ("base_s", "per_request_s")
TRAINER = ("fixed_s", "per_row_s", "per_token_s", "per_pair_s")
FEWEST_STEPS = 3
FEWEST_PREFILLS = 6


class CalibrationError(Exception):
    """Measurements that give no profile: what is lacking."""


class Series(Struct):
    """What one fit was made from: the terms' names, and (terms, measured seconds) of each point."""

    names: tuple[str, ...]
    points: Points


def series_of(
    engine: Sequence[EnginePoint],
    updates: Sequence[TrainPoint],
    one_batch_tokens: int,
    padded: bool = False,
    seen_late: bool = False,
) -> dict[str, Series]:
    """`decode`, `prefill`, `arrival` and `trainer`; what was measured several times is one point, its median.
    `one_batch_tokens`: prompt tokens that one prefill batch takes; points above it took several. `padded`: the engine's
    attention is (`PrefillFit.padded`). `seen_late`: forward passes run in the scheduler's own thread, under overlap
    scheduling: a batch is computed before the next one begins, and its result is looked at after the decode step that
    follows, which is taken off. Otherwise batches of one experiment overlap, and only single ones are taken.

    Raises `CalibrationError` as `make_profile`.
    """
    held = [p for p in engine if p.held]
    decode = _decode([p for p in held if p.decode_steps >= FEWEST_STEPS])
    step = _decode_step(decode) if seen_late else None
    prefill: list[tuple[Sequence[float], float]] = []
    for p in held:
        for batch in p.batches if seen_late or len(p.batches) == 1 else ():
            last = batch is p.batches[-1]
            seconds = batch.seconds - (step(p) if step is not None and last else 0.0)
            if seconds > 0 and batch.new_tokens <= one_batch_tokens:
                pairs = batch.padded_pairs if padded else batch.pairs
                prefill.append(((1.0, batch.new_tokens, pairs, batch.requests), seconds))
    way = [(p, p.makespan_s - p.prefill_s - p.decode_s) for p in engine if not p.held]
    arrival: Points = [((1.0, float(p.requests)), seconds) for p, seconds in way if seconds > 0]
    trainer: Points = [
        ((1.0, float(len(p.rows)), float(sum(p.rows)), float(sum(n * n for n in p.rows))), p.seconds) for p in updates
    ]
    return {
        "decode": decode,
        "prefill": Series(PREFILL, _medians(prefill)),
        "arrival": Series(ARRIVAL, _medians(arrival)),
        "trainer": Series(TRAINER, _medians(trainer)),
    }


def _decode(stepped: Sequence[EnginePoint]) -> Series:
    """What a further sequence adds is fitted between each two of the batch sizes that were measured, unless there are
    too few points for that: on CPUs the second costs twice what the sixteenth does."""
    sizes = sorted({p.requests for p in stepped})
    bends = sizes[1:-1] if len({(p.requests, p.context) for p in stepped}) > len(sizes) + 1 else []
    names = ("base_s", "per_sequence_s", *(f"{ABOVE}{n}_s" for n in bends), CONTEXT)
    edges = [0, *bends, inf]

    def terms(requests: int, context: float) -> tuple[float, ...]:
        return (1.0, *(max(min(requests, high) - low, 0.0) for low, high in pairwise(edges)), context)

    return Series(names, _medians([(terms(p.requests, p.context), p.decode_s / p.decode_steps) for p in stepped]))


def _decode_step(series: Series) -> Callable[[EnginePoint], float]:
    """Seconds of the first decode step of a point's batch."""
    fit = _decode_fit(_fit("decode", series))
    return lambda p: fit.fixed_s(p.requests) + fit.per_context_token_s * (p.context - p.requests * (OUTPUTS - 1) / 2)


def _decode_fit(q: Quality) -> DecodeFit:
    above = (
        Section(float(name.removeprefix(ABOVE).removesuffix("_s")), c.value)
        for name, c in q.coefficients.items()
        if name.startswith(ABOVE)
    )
    return DecodeFit(value(q, "base_s"), value(q, "per_sequence_s"), value(q, CONTEXT), tuple(above))


def _medians(points: Points) -> Points:
    """One point for all that have the same terms: a pause of the machine in one of three does not count."""
    by_terms: dict[tuple[float, ...], list[float]] = {}
    for terms, seconds in points:
        by_terms.setdefault(tuple(terms), []).append(seconds)
    return [(terms, median(seconds)) for terms, seconds in by_terms.items()]


def make_profile(
    series: dict[str, Series],
    engine: Sequence[EnginePoint],
    phases: Sequence[Phases],
    controls: Sequence[ControlPoint] = (),
    beside: Sequence[BesidePoint] = (),
    crowd: Sequence[CrowdPoint] = (),
    padded: bool = False,
    short_runs: int = 1,
    **facts: Any,
) -> Profile:
    """`phases`: of each short run, those of the deployment whose trainer was measured (`short_runs`) first. `facts`:
    machine, model, versions, server, max_total_num_tokens, start_s. Raises `CalibrationError` for an engine that was
    not measured enough; what else was not is left out."""
    quality = {
        name: _fit(name, s)
        for name, s in series.items()
        if name in ("decode", "prefill") or len(s.points) >= len(s.names)
    }
    held = [p for p in engine if p.held]
    d, p = quality["decode"], quality["prefill"]
    arrival, trainer = quality.get("arrival"), quality.get("trainer")
    return Profile(
        format=FORMAT,
        decode=_decode_fit(d),
        prefill=PrefillFit(**{n: value(p, n) for n in PREFILL}, padded=padded),
        ranges=FitRanges(
            batch=_range([x.requests for x in held]),
            context_per_sequence=_range([x.context / x.requests for x in held]),
            new_tokens=_range([terms[1] for terms, _ in series["prefill"].points]),
        ),
        arrival=None if arrival is None else ArrivalFit(*(value(arrival, n) for n in ARRIVAL)),
        trainer=None if trainer is None else _trainer(trainer, series["trainer"], phases[:short_runs]),
        updates=_updates(phases),
        switch=_switch(phases),
        beside=_beside(beside),
        crowd=_crowd(crowd),
        controls=_controls(controls),
        quality=quality,
        **facts,
    )


def _trainer(q: Quality, series: Series, phases: Sequence[Phases]) -> TrainerFit:
    """Updates as fitted, and what one of a run takes beyond that (its records, the engines' reports), as the first
    deployment's short runs say (`phases`)."""
    fit = TrainerFit(**{n: value(q, n) for n in TRAINER}, tokens=_range([t[2] for t, _ in series.points]))
    beyond = [p.seconds - fit.seconds(p.rows) for run in phases for p in run.train[1:]]
    return structs.replace(fit, fixed_s=fit.fixed_s + max(median(beyond), 0.0)) if beyond else fit


def _fit(name: str, series: Series) -> Quality:
    try:
        return fit(series.names, series.points)
    except ValueError as error:
        raise CalibrationError(f"{name}: {error}") from None


def _range(values: Sequence[float]) -> Range:
    return float(min(values)), float(max(values))


PARTS = ("prepare_s", "pause_s", "copy_s", "requantize_s", "resume_s")
SIZED = {"prepare_s": "prepare_per_byte_s", "copy_s": "copy_per_byte_s", "requantize_s": "requantize_per_byte_s"}
"""Parts that move or look at all of a version's bytes."""


def _updates(phases: Sequence[Phases]) -> dict[str, UpdateTimes]:
    """By path: means of the first model's publications, slopes over those of all models. A step's time is a sum, in
    which a long tail counts; the longest and the shortest tenth are left out, among which is the machine's pause."""
    points: dict[str, dict[str, dict[int, list[float]]]] = {}
    engines: dict[str, int] = {}
    for run in phases:
        for path, parts in run.updates.items():
            engines[path] = max(engines.get(path, 0), run.engines[path])
            for part, taken in parts.items():
                for size, seconds in taken[1:] or taken:
                    points.setdefault(path, {}).setdefault(part, {}).setdefault(size, []).append(seconds)
    found = {}
    for path, by_part in points.items():
        if not {"prepare_s", "copy_s", "resume_s"} <= by_part.keys():
            continue
        size = next(iter(by_part["copy_s"]))
        times = {part: _mean(by_part[part][size]) if part in by_part else 0.0 for part in PARTS}
        slopes = {name: _slope(by_part.get(part, {})) for part, name in SIZED.items()}
        found[path] = UpdateTimes(**times, engines=engines[path], bytes=size, **slopes)
    return found


def _mean(seconds: Sequence[float]) -> float:
    cut = -(-len(seconds) // 10) if len(seconds) > 2 else 0
    return fmean(sorted(seconds)[cut : len(seconds) - cut])


def _slope(by_size: dict[int, list[float]]) -> float:
    """Seconds that another byte takes; 0 where one size was measured."""
    if len(by_size) < 2:
        return 0.0
    points: Points = [((1.0, float(size)), _mean(seconds)) for size, seconds in by_size.items()]
    return value(fit(("fixed_s", "per_byte_s"), points), "per_byte_s")


def _controls(points: Sequence[ControlPoint]) -> dict[str, ControlTimes]:
    found = {}
    for mode in dict.fromkeys(p.mode for p in points):
        idle = [p for p in points if p.mode == mode and not p.running]
        busy = [p for p in points if p.mode == mode and p.running]
        if idle and busy:
            found[mode] = ControlTimes(
                idle_s=median(p.pause_s for p in idle),
                running_s=median(p.pause_s for p in busy),
                running=busy[0].running,
                flush_s=median(p.flush_s for p in idle),
                resume_s=median(p.resume_s for p in (*idle, *busy)),
            )
    return found


def _beside(points: Sequence[BesidePoint]) -> BesideFit | None:
    """Medians of ratios; nothing is faster in company. Where few prefill batches held the same requests both times,
    they are slowed as decode steps are."""
    ratios = {
        what: [p.beside_s / p.alone_s for p in points if p.what == what] for what in ("decode", "prefill", "train")
    }
    if not ratios["decode"] or not ratios["train"]:
        return None
    if len(ratios["prefill"]) < FEWEST_PREFILLS:
        ratios["prefill"] = ratios["decode"]
    return BesideFit(**{what: max(median(found), 1.0) for what, found in ratios.items()})


def _crowd(points: Sequence[CrowdPoint]) -> CrowdFit | None:
    """The difference of two fits to the same experiments: seconds of a decode step = base + per sequence. Nothing is
    faster in company."""
    if len({p.requests for p in points}) < 2:
        return None
    steps = [p.decode_alone_s for p in points], [p.decode_together_s for p in points]
    terms = [(1.0, float(p.requests)) for p in points]
    alone, together = (
        _fit("crowd", Series(("base_s", "per_sequence_s"), list(zip(terms, seconds, strict=True)))) for seconds in steps
    )
    base, each = (max(value(together, n) - value(alone, n), 0.0) for n in ("base_s", "per_sequence_s"))
    return CrowdFit(base, each, max(median(p.prefill_together_s / p.prefill_alone_s for p in points), 1.0))


def _switch(phases: Sequence[Phases]) -> SwitchTimes | None:
    found = medians(
        {phase: [s for run in phases for s in run.switches.get(phase, ())[1:]] for phase in ("train", "generate")}
    )
    return SwitchTimes(found["train"], found["generate"]) if len(found) == 2 else None
