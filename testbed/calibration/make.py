"""From measurements to a profile: which points a fit takes, its terms, and the ranges it holds in.

It refuses to know how things were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from msgspec import Struct

from testbed.calibration.design import EnginePoint
from testbed.calibration.fit import Points, fit, medians, value
from testbed.calibration.phases import Phases
from testbed.calibration.profile import (
    FORMAT,
    ArrivalFit,
    DecodeFit,
    FitRanges,
    PrefillFit,
    Profile,
    Quality,
    Range,
    SwitchTimes,
    TrainerFit,
    UpdateTimes,
)

DECODE = ("base_s", "per_sequence_s", "per_context_token_s")
PREFILL = ("base_s", "per_token_s", "per_pair_s", "per_request_s")
ARRIVAL = ("base_s", "per_request_s")
TRAINER = ("fixed_s", "per_trajectory_s", "per_token_s")
FEWEST_STEPS = 3


class CalibrationError(Exception):
    """Measurements that give no profile: what is lacking."""


class Series(Struct):
    """What one fit was made from: the terms' names, and (terms, measured seconds) of each point."""

    names: tuple[str, ...]
    points: Points


def series_of(engine: Sequence[EnginePoint], phases: Sequence[Phases], one_batch_tokens: int) -> dict[str, Series]:
    """`decode`, `prefill`, `arrival` and `trainer`; what was measured several times is one point, its median.
    `one_batch_tokens`: prompt tokens that one prefill batch takes; points above it took several."""
    held = [p for p in engine if p.held]
    stepped = [p for p in held if p.decode_steps >= FEWEST_STEPS]
    decode: Points = [((1.0, p.requests, p.context), p.decode_s / p.decode_steps) for p in stepped]
    prefill: Points = [
        ((1.0, p.new_tokens, p.pairs, p.requests), p.prefill_s)
        for p in held
        if p.prefill_s > 0 and p.new_tokens <= one_batch_tokens
    ]
    way = [(p, p.makespan_s - p.prefill_s - p.decode_s) for p in engine if not p.held]
    arrival: Points = [((1.0, float(p.requests)), seconds) for p, seconds in way if seconds > 0]
    trained = [p for run in phases for p in run.train[1:]]
    trainer: Points = [((1.0, float(p.trajectories), float(p.tokens)), p.seconds) for p in trained]
    return {
        "decode": Series(DECODE, _medians(decode)),
        "prefill": Series(PREFILL, _medians(prefill)),
        "arrival": Series(ARRIVAL, _medians(arrival)),
        "trainer": Series(TRAINER, _medians(trainer)),
    }


def _medians(points: Points) -> Points:
    """One point for all that have the same terms: a pause of the machine in one of three does not count."""
    by_terms: dict[tuple[float, ...], list[float]] = {}
    for terms, seconds in points:
        by_terms.setdefault(tuple(terms), []).append(seconds)
    return [(terms, median(seconds)) for terms, seconds in by_terms.items()]


def make_profile(
    series: dict[str, Series], engine: Sequence[EnginePoint], phases: Sequence[Phases], **facts: Any
) -> Profile:
    """`facts`: machine, model, versions, server, max_total_num_tokens. Raises `CalibrationError` for an engine that was
    not measured enough; what else was not is left out."""
    quality = {name: _fit(name, s) for name, s in series.items() if name in ("decode", "prefill") or s.points}
    held = [p for p in engine if p.held]
    d, p = quality["decode"], quality["prefill"]
    arrival, trainer = quality.get("arrival"), quality.get("trainer")
    return Profile(
        format=FORMAT,
        decode=DecodeFit(*(value(d, n) for n in DECODE)),
        prefill=PrefillFit(*(value(p, n) for n in PREFILL)),
        ranges=FitRanges(
            batch=_range([x.requests for x in held]),
            context_per_sequence=_range([x.context / x.requests for x in held]),
            new_tokens=_range([terms[1] for terms, _ in series["prefill"].points]),
        ),
        arrival=None if arrival is None else ArrivalFit(*(value(arrival, n) for n in ARRIVAL)),
        trainer=None
        if trainer is None
        else TrainerFit(
            **{n: value(trainer, n) for n in TRAINER}, tokens=_range([t[2] for t, _ in series["trainer"].points])
        ),
        updates=_updates(phases),
        switch=_switch(phases),
        quality=quality,
        **facts,
    )


def _fit(name: str, series: Series) -> Quality:
    try:
        return fit(series.names, series.points)
    except ValueError as error:
        raise CalibrationError(f"{name}: {error}") from None


def _range(values: Sequence[float]) -> Range:
    return float(min(values)), float(max(values))


def _updates(phases: Sequence[Phases]) -> dict[str, UpdateTimes]:
    together: dict[str, dict[str, list[float]]] = {}
    engines: dict[str, int] = {}
    for run in phases:
        for path, parts in run.updates.items():
            engines[path] = max(engines.get(path, 0), run.engines[path])
            for part, seconds in parts.items():
                together.setdefault(path, {}).setdefault(part, []).extend(seconds[1:] or seconds)
    complete = {path: medians(parts) for path, parts in together.items()}
    return {
        path: UpdateTimes(
            prepare_s=m["prepare_s"],
            pause_s=m.get("pause_s", 0.0),
            copy_s=m["copy_s"],
            requantize_s=m.get("requantize_s", 0.0),
            resume_s=m["resume_s"],
            engines=engines[path],
        )
        for path, m in complete.items()
        if {"prepare_s", "copy_s", "resume_s"} <= m.keys()
    }


def _switch(phases: Sequence[Phases]) -> SwitchTimes | None:
    found = medians(
        {phase: [s for run in phases for s in run.switches.get(phase, ())[1:]] for phase in ("train", "generate")}
    )
    return SwitchTimes(found["train"], found["generate"]) if len(found) == 2 else None
