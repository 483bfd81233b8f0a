"""The trainer's seconds against Megatron-Bridge's published FLOPs and against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.trainer import TrainerModel, flops_per_token
from testbed.scenario.catalogue import gpu_spec, model_preset
from testbed.scenario.layout import layout_of
from tests.support.scenarios import scenario


def trainer(model: str = "Llama-3.1-8B", gpus: int = 8, **training: Any) -> TrainerModel:
    s = scenario(
        cluster={"gpu": "H100", "nodes": 4, "gpus_per_node": 8},
        placement={"mode": "disaggregated", "rollout_num_gpus": 2, "actor_num_gpus": gpus},
        training=training,
    )
    return TrainerModel(s, layout_of(s), model_preset(model), gpu_spec("H100"))


@pytest.mark.parametrize(
    ("model", "length", "tokens_per_s_per_gpu", "tflops"),
    [
        ("Llama-3.1-8B", 8192, 14_451, 744),
        ("Llama-3.1-70B", 8192, 1602, 719),
        ("Llama-3.1-405B", 8192, 292, 737),
        ("Llama-3.1-8B", 8192, 30_624, 1576),
        ("Qwen3-30B-A3B", 4096, 28_934, 666),
        ("Qwen3-235B-A22B", 4096, 4916, 728),
    ],
)
def test_flops_per_token_agree_with_megatron_bridge(
    model: str, length: int, tokens_per_s_per_gpu: float, tflops: float
) -> None:
    published = tflops * 1e12 / tokens_per_s_per_gpu
    assert flops_per_token(model_preset(model), length) == pytest.approx(published, rel=0.003)


def test_step_time_at_megatrons_own_mfu_gives_its_throughput() -> None:
    """8 H100 in BF16-peak terms: 744 TFLOPS per GPU is 75.2 % of 989; then 14,451 tokens/s per GPU follow."""
    cost = {"type": "analytic", "mfu": 744 / 989, "imbalance": 1.0, "fixed_s": 0.0}
    t = trainer(recompute="none", cost=cost)
    lengths = [8192] * 128
    seconds = t.update_seconds(lengths, 1)[0] - t.optimizer_seconds()
    assert sum(lengths) / seconds / 8 == pytest.approx(14_451, rel=0.003)


def test_attention_counts_the_sum_of_squares() -> None:
    t = trainer()
    same_tokens = t.flops([4096] * 4), t.flops([16_384])
    assert same_tokens[1] - same_tokens[0] == pytest.approx(6 * 32 * 4096 * (16_384**2 - 4 * 4096**2))
    assert t.flops([4096]) == pytest.approx(4096 * flops_per_token(model_preset("Llama-3.1-8B"), 4096))


@pytest.mark.parametrize(("recompute", "factor"), [("none", 1.0), ("full", 4 / 3)])
def test_recompute_is_paid_on_the_clock(recompute: str, factor: float) -> None:
    cost = {"type": "analytic", "mfu": 0.4, "imbalance": 1.05, "exposed_communication": 0.1, "fixed_s": 0.5}
    t = trainer(recompute=recompute, cost=cost)
    ideal = t.flops([2000] * 64) / (8 * 989e12 * 0.4)
    optimizer = 2 * 12 * 8_030_261_248 / 8 / (0.8 * 3.35e12)
    assert t.update_seconds([2000] * 64, 1) == [pytest.approx(ideal * 1.05 * 1.1 * factor + optimizer + 0.5)]


def test_pipeline_bubble() -> None:
    """PP 4 on 8 GPUs: 2 ranks; 64 x 8,192 tokens in micro-batches of 32,768 are 8 a rank, a bubble of 3/8."""
    t = trainer(pipeline_parallel=4)
    assert t.data_parallel == 2
    assert t.bubble(64 * 8192) == pytest.approx(3 / 8)
    assert trainer().bubble(64 * 8192) == 0.0


def test_a_batch_is_cut_into_consecutive_parts() -> None:
    t = trainer(cost={"type": "rate", "samples_per_s": 1.0, "fixed_s": 0.25})
    assert t.update_seconds([10] * 7, 3) == [3.25, 2.25, 2.25]
    assert sum(t.update_seconds([10] * 7, 1)) == 7.25


def test_rate_trainer_by_tokens() -> None:
    t = trainer(cost={"type": "rate", "tokens_per_s": 1000.0})
    assert t.update_seconds([500, 1500], 1) == [2.0]
    assert t.forward_seconds([500, 1500]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="samples_per_s or tokens_per_s"):
        trainer(cost={"type": "rate"})


def test_forward_alone_is_a_third_without_optimizer_recompute_and_fixed_part() -> None:
    cost = {"type": "analytic", "mfu": 0.5, "imbalance": 1.0, "fixed_s": 3.0}
    t = trainer(recompute="full", cost=cost)
    assert t.forward_seconds([1000] * 8) == pytest.approx(t.flops([1000] * 8) / 3 / (8 * 989e12 * 0.5))
    assert t.forward_seconds([]) == 0.0


def test_nemo_rl_train_and_log_probs_take_22_s_at_40_percent() -> None:
    """NeMo RL 0.4, Llama-3.1-8B, 16 H100, 2,048 samples of 1,060 tokens: ideal training plus log-probs about 22 s."""
    cost = {"type": "analytic", "mfu": 0.40, "imbalance": 1.0, "fixed_s": 0.0}
    t = trainer(gpus=16, recompute="none", cost=cost)
    lengths = [1060] * 2048
    total = t.update_seconds(lengths, 1)[0] + t.forward_seconds(lengths)
    assert total == pytest.approx(22, rel=0.1)
