"""How much longer closed loops on actual engines took than the same loops simulated with a profile.

It refuses to know how they were driven and what the answer is used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sim.costs.calibrated import CalibratedCostModel
from sim.engine_kind import engine_options
from sim.serving.closed_loop import sglang_loop
from testbed.calibration.design import Traffic, TrafficPoint
from testbed.calibration.profile import Profile
from testbed.scenario import Scenario
from testbed.scenario.catalogue import gpu_spec, model_spec


def in_traffic(profile: Profile, scenario: Scenario, base_dir: Path, points: Sequence[TrafficPoint]) -> float:
    """Seconds measured over seconds simulated, of one engine of the scenario; 1 without a measurement."""
    simulated = _simulated(profile, scenario, base_dir, points)
    return sum(p.seconds for p in points) / simulated if simulated else 1.0


def beyond_steps(profile: Profile, scenario: Scenario, base_dir: Path, points: Sequence[TrafficPoint]) -> float:
    """`Profile.traffic_s`: seconds measured beyond those simulated, for each request; 0 without a measurement."""
    requests = sum(len(p.traffic.lengths) for p in points)
    more = sum(p.seconds for p in points) - _simulated(profile, scenario, base_dir, points)
    return more / requests if requests else 0.0


def _simulated(profile: Profile, scenario: Scenario, base_dir: Path, points: Sequence[TrafficPoint]) -> float:
    """Seconds of all of them."""
    costs = CalibratedCostModel(profile)
    options = engine_options(scenario, model_spec(scenario.model, base_dir), gpu_spec(scenario.cluster.gpu))
    away_s = costs.arrival_base_s + costs.arrival_per_request_s
    known: dict[Traffic, float] = {}
    for p in points:
        if p.traffic not in known:
            asked = list(p.traffic.lengths)
            known[p.traffic] = len(asked) / sglang_loop(options, costs, asked, p.traffic.clients, away_s).requests_per_s
    return sum(known[p.traffic] for p in points)
