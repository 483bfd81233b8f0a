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
        ("rollout.engine.weight_precision=fp8", "training.precision=fp8"),
        "weights.requantize",
        "real trainers send bf16 weights, and the engines serve fp8",
        ("weights.requantize=fp8",),
    ),
    (
        (
            "rollout.engine.weight_precision=fp8",
            "training.precision=fp8",
            "weights.requantize=fp8",
            "placement.rollout_num_gpus_per_engine=8",
            "model={type: preset, name: Qwen3-30B-A3B}",
        ),
        "placement.rollout_num_gpus_per_engine",
        "hold the 4 KV heads of Qwen3-30B-A3B several times",
        ("placement.rollout_num_gpus_per_engine=4",),
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
    (
        ("real.loss.loss_aggregation=seq-mean-token-sum-norm",),
        "real.loss.normal_length",
        "divides by a constant length, and none is given",
        ("real.loss.normal_length=1024",),
    ),
    (
        ("placement.pd_disaggregation={prefill_num_gpus: 4}",),
        "placement.pd_disaggregation",
        "simulated only",
        ("placement.pd_disaggregation=null",),
    ),
    (
        ("rollout.engine.hierarchical_cache={}",),
        "rollout.engine.hierarchical_cache",
        "simulated only",
        ("rollout.engine.hierarchical_cache=null",),
    ),
    (
        ("rollout.routing={type: mooncake, prefill_tokens_per_s: 1000, transfer_tokens_per_s: 1000}",),
        "rollout.routing.transfer_tokens_per_s",
        "simulated only",
        ("rollout.routing={type: mooncake, prefill_tokens_per_s: 1000, transfer_tokens_per_s: null}",),
    ),
    (
        ("rollout.engine.speculative={accept_length: 2.5}",),
        "rollout.engine.speculative",
        "SGLang's attention (torch_native) cannot",
        ("rollout.engine.speculative=null",),
    ),
    (
        ("real.loss.normal_length=1024",),
        "real.loss.normal_length",
        "`token-mean` divides by no constant length",
        ("real.loss.loss_aggregation=seq-mean-token-sum-norm",),
    ),
    (
        ("algorithm.advantage=distillation", "real.reward_model=checker"),
        "real.reward_model",
        "advantage `distillation` reads no reward",
        ("algorithm.advantage=group_with_distillation",),
    ),
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
