"""How long an engine's steps take: one interface (`base.CostModel`), four sources, chosen by the scenario."""

from __future__ import annotations

from pathlib import Path

from sim.costs.analytic import AnalyticCostModel
from sim.costs.base import CostModel
from sim.costs.calibrated import CalibratedCostModel, read_profile
from sim.costs.errors import CostModelError
from sim.costs.linear import LinearCostModel
from sim.costs.measured import MeasuredCostModel
from sim.costs.overheads import NONE, fitted
from sim.costs.segments import SegmentCosts
from sim.costs.speculation import SpeculativeCosts
from sim.costs.tabulate import table_for
from testbed.scenario.catalogue import GpuSpec, ModelSpec, gpu_spec
from testbed.scenario.run import AnalyticCosts, CalibratedCosts, LinearCosts
from testbed.scenario.scenario import Scenario

__all__ = ["CostModel", "CostModelError", "cost_model"]


def cost_model(scenario: Scenario, model: ModelSpec, gpu: GpuSpec, base_dir: Path | None = None) -> CostModel:
    """Cost model of one engine of the scenario. `base_dir`: what the path of a calibration profile is relative to.

    Raises `CostModelError` if the chosen source has no numbers for this model, GPU, split or precision.
    """
    target = _target(scenario, model, gpu, base_dir)
    speculative = scenario.rollout.engine.speculative
    return target if speculative is None else SpeculativeCosts(target, speculative)


def _target(scenario: Scenario, model: ModelSpec, gpu: GpuSpec, base_dir: Path | None) -> SegmentCosts:
    """Without speculation."""
    costs = scenario.simulation.engine_costs
    engine = scenario.rollout.engine
    gpus = scenario.placement.rollout_num_gpus_per_engine
    precision, kv_dtype = engine.weight_precision, engine.kv_cache_dtype
    if isinstance(costs, LinearCosts):
        return LinearCostModel(costs)
    if isinstance(costs, CalibratedCosts):
        return CalibratedCostModel(read_profile((base_dir or Path()) / costs.profile))
    if isinstance(costs, AnalyticCosts):
        on = gpu if costs.gpu is None else gpu_spec(costs.gpu)
        return AnalyticCostModel(costs, model, on, gpus, precision, kv_dtype, scenario.cluster.gpus_per_node)
    table = table_for(model, gpu.name, gpus, precision, kv_dtype)
    overheads = fitted()["sglang"].overheads() if costs.overheads else NONE
    return MeasuredCostModel(model, gpu, gpus, precision, kv_dtype, table, overheads)
