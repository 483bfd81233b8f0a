"""How much longer closed loops on actual engines took than the same loops simulated with a profile.

It refuses to know how they were driven and what the answer is used for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from sim.costs.calibrated import CalibratedCostModel
from sim.engine_kind import engine_options
from sim.serving.closed_loop import sglang_loop
from testbed.calibration.design import Traffic, TrafficPoint
from testbed.calibration.profile import Profile
from testbed.scenario import Scenario
from testbed.scenario.catalogue import gpu_spec, model_spec


def in_traffic(profile: Profile, scenario: Scenario, base_dir: Path, points: Sequence[TrafficPoint]) -> float:
    """Seconds measured over seconds simulated, of one engine of the scenario; 1 without a measurement."""
    simulated = _simulated(profile, scenario, base_dir, {p.traffic for p in points})
    return sum(p.seconds for p in points) / sum(simulated[p.traffic] for p in points) if points else 1.0


def beyond_steps(profile: Profile, scenario: Scenario, base_dir: Path, points: Sequence[TrafficPoint]) -> float:
    """`Profile.traffic_s`: seconds measured (the median of equal loops) beyond those simulated, for each request; 0
    without a measurement."""
    measured: dict[Traffic, list[float]] = {}
    for p in points:
        measured.setdefault(p.traffic, []).append(p.seconds)
    simulated = _simulated(profile, scenario, base_dir, measured)
    more = sum(median(seconds) - simulated[loop] for loop, seconds in measured.items())
    return more / sum(len(loop.lengths) for loop in measured) if measured else 0.0


def _simulated(profile: Profile, scenario: Scenario, base_dir: Path, loops: Iterable[Traffic]) -> dict[Traffic, float]:
    """Seconds of each."""
    costs = CalibratedCostModel(profile)
    options = engine_options(scenario, model_spec(scenario.model, base_dir), gpu_spec(scenario.cluster.gpu))
    away_s = costs.arrival_base_s + costs.arrival_per_request_s
    return {
        loop: len(loop.lengths) / sglang_loop(options, costs, list(loop.lengths), loop.clients, away_s).requests_per_s
        for loop in loops
    }
