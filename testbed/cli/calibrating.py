"""How deployments become a profile: what is measured on which of them, and what is written of it.

It refuses to know options, what is printed, and how measurements are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

PROFILE = "profile.json"
MEASURED = ("sglang", "torch")
"""Packages whose versions a profile is of."""
POINTS = "points.json"
"""The measurements that the profile was fitted to."""


@dataclass(frozen=True)
class Fitted:
    """`series`: what each fit was made from, by name."""

    profile: Any
    series: Any


def whole(scenario: Any, base_dir: Path, repeats: int, trainer: bool) -> Any:
    """The plan for a deployment's engines, its trainer if wanted, weight updates and phase switches. Engines side by
    side measure every experiment as many times as there are engines: `repeats` measurements of each, and more."""
    from testbed.calibration.design import (
        Plan,
        beside,
        controls,
        crowd,
        design,
        engine_size,
        short_run,
        traffic,
        update_sizes,
    )
    from testbed.scenario.layout import layout_of

    size = engine_size(scenario, base_dir)
    engines = len(layout_of(scenario).engines)
    times = -(-repeats // max(engines, 1))
    apart = scenario.placement.mode == "disaggregated"
    return Plan(
        list(design(*size, times)),
        crowd(*size, repeats) if engines > 1 else [],
        list(controls(*size, times)),
        traffic(*size),
        update_sizes(size[2], times) if trainer else [],
        beside(*size, times) if trainer and apart else [],
        short_run(scenario),
    )


def updates_only(scenario: Any, base_dir: Path) -> Any:
    """The plan for a deployment whose engines and trainer are known: weight updates and phase switches."""
    from testbed.calibration.design import Plan, engine_size, short_run, traffic

    return Plan([], [], [], traffic(*engine_size(scenario, base_dir)), [], [], short_run(scenario))


def on_the_way(scenarios: Sequence[tuple[Any, Path, Any]], repeats: int) -> dict[int, Any]:
    """Plans for deployments that are up anyway, by index of the first scenario on each: the first with so many engines
    wholly, others for update paths and placement modes that are new. `scenarios`: (scenario, base folder, deployment)
    each."""
    from testbed.scenario.layout import layout_of

    seen: set[Any] = set()
    known: dict[int, set[tuple[str, str]]] = {}
    plans: dict[int, Any] = {}
    for index, (scenario, base_dir, deployment) in enumerate(scenarios):
        if deployment in seen:
            continue
        seen.add(deployment)
        engines = len(layout_of(scenario).engines)
        ways = (scenario.placement.mode, scenario.weights.path.model_dump_json())
        if engines not in known:
            plans[index] = whole(scenario, base_dir, repeats, True)
        elif ways not in known[engines]:
            plans[index] = updates_only(scenario, base_dir)
        known.setdefault(engines, set()).add(ways)
    return plans


def fitted_to(measured: Sequence[Any], scenario: Any, base_dir: Path) -> Fitted:
    """`scenario`: of the first deployment, whose engines and trainer were measured; the others add weight updates and
    phase switches. Raises `CalibrationError` for an engine that was not measured enough."""
    from msgspec import structs

    from sim.serving.traffic import beyond_steps
    from testbed.calibration.make import make_profile, series_of
    from testbed.calibration.speed import longer
    from testbed.machine import machine
    from testbed.recording import versions_of

    first = measured[0]
    here = first.loops  # times of the short runs are brought to the machine's speed while the engine was measured
    phases = [_phases(run).times(longer(here.engine, m.loops.short_run)) for m in measured for run in m.runs]
    engine = scenario.rollout.engine
    one_batch = engine.max_prefill_tokens
    if engine.chunked_prefill_size > 0:
        one_batch = min(one_batch, engine.chunked_prefill_size)
    series = series_of(first.engine, first.updates, one_batch, first.padded, first.seen_late)
    profile = make_profile(
        series,
        first.engine,
        phases,
        first.controls,
        first.beside,
        first.crowd,
        first.padded,
        machine=machine(),
        model=getattr(scenario.model, "name", "") or getattr(scenario.model, "path", ""),
        versions={k: v for k, v in versions_of(MEASURED).items() if k in MEASURED},
        server=first.server,
        max_total_num_tokens=first.max_total_num_tokens,
        engines=first.engines,
        start_s=first.start_s,
        short_runs=len(first.runs),
        probe_s=median(here.updates_s) if here.updates_s else None,
    )
    traffic_s = beyond_steps(profile, scenario, base_dir, here.engine)
    return Fitted(structs.replace(profile, traffic_s=traffic_s), series)


def store(fitted: Fitted, measured: Any, folder: Path) -> Path:
    """Profile and measurements, in the folder; returns the profile's path. `measured`: on the first deployment."""
    from msgspec import to_builtins

    from testbed.calibration.profile import write_profile
    from testbed.commands import folders

    write_profile(folder / PROFILE, fitted.profile)
    parts = {name: getattr(measured, name) for name in ("engine", "crowd", "controls", "loops", "beside")}
    parts["series"] = fitted.series
    folders.write_json(folder / POINTS, {name: to_builtins(part) for name, part in parts.items()})
    return folder / PROFILE


def _phases(journal: Path) -> Any:
    from testbed.calibration.phases import Phases
    from testbed.commands.recorded import scenario_of
    from testbed.journal import read_journal
    from testbed.scenario.layout import layout_of

    header, records = read_journal(journal)
    scenario = scenario_of(journal, header)
    phases = Phases(scenario.training.max_tokens_per_gpu, layout_of(scenario).train_gpus)
    for record in records:
        phases.observe(record.event, record.actions)
    return phases
