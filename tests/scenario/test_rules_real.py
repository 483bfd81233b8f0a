"""What only a real run refuses, and that its suggestion works."""

from __future__ import annotations

import pytest

from testbed.scenario.load import with_overrides
from testbed.scenario.rules import check
from tests.scenario.test_rules import HERE, SPLIT, Scenario, build

REFUSED = [
    (
        ("real.loss.denominator=recomputed",),
        "real.loss.denominator",
        "nothing recomputes",
        ("algorithm.recompute_old_log_probs=true",),
    ),
    (
        ("rollout.engine.weight_precision=mxfp8", "weights.requantize=mxfp8", "cluster.gpu=B200"),
        "rollout.engine.weight_precision",
        "mxfp8",
        ("rollout.engine.weight_precision=bf16", "weights.requantize=none"),
    ),
    (
        ("real.loss.mismatch=tis",),
        "real.loss.mismatch",
        "has none",
        ("real.loss.denominator=decoupled", "algorithm.recompute_old_log_probs=true"),
    ),
    (
        ("real.use_rollout_routing_replay=true",),
        "real.use_rollout_routing_replay",
        "no experts",
        ("model={type: preset, name: tiny-qwen3-moe}",),
    ),
    (("training.tensor_parallel=2",), "training.tensor_parallel", "FSDP2", ("training.tensor_parallel=1",)),
]


@pytest.mark.parametrize(("overrides", "key", "what", "mended"), REFUSED)
def test_refused_for_real_runs_only(overrides: tuple[str, ...], key: str, what: str, mended: tuple[str, ...]) -> None:
    def faults(*more: str, simulated: bool) -> list[tuple[str, str]]:
        scenario = build(with_overrides(SPLIT, (*overrides, *more), Scenario), Scenario)
        return [(f.key, f.what) for f in check(scenario, HERE, simulated=simulated)]

    [(at, said)] = faults(simulated=False)
    assert at == key and what in said
    assert faults("simulation.engine_costs={type: analytic}", simulated=True) == []
    assert faults(*mended, simulated=False) == []
