"""Cost models: closed forms against plain sums, table points, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sim.costs import CostModel, CostModelError, cost_model
from sim.costs.analytic import AnalyticCostModel
from sim.costs.calibrated import CalibratedCostModel, read_profile
from sim.costs.linear import LinearCostModel
from sim.costs.measured import MeasuredCostModel
from sim.costs.speculation import SpeculativeCosts
from sim.costs.tables import step_tables
from testbed.calibration.profile import BesideFit, CrowdFit, DecodeFit, PrefillFit, Profile, Section
from testbed.scenario.catalogue import gpu_spec, model_preset
from testbed.scenario.rollout import Speculative
from testbed.scenario.run import AnalyticCosts, LinearCosts
from tests.support.scenarios import scenario

H100 = gpu_spec("H100")
PROFILE = {
    "format": 1,
    "decode": {"base_s": 0.01, "per_sequence_s": 1e-4, "per_context_token_s": 1e-7},
    "prefill": {"base_s": 0.02, "per_token_s": 1e-5, "per_pair_s": 1e-9, "per_request_s": 1e-3},
    "ranges": {"batch": [1, 16], "context_per_sequence": [0, 4096], "new_tokens": [1, 8192]},
}


def models() -> list[CostModel]:
    analytic = AnalyticCosts(compute_efficiency=0.02)  # so low that the compute-bound part is met
    return [
        LinearCostModel(LinearCosts(per_context_token_s=3e-8)),
        AnalyticCostModel(AnalyticCosts(), model_preset("Qwen3-8B"), H100, 1),
        AnalyticCostModel(analytic, model_preset("Qwen3-30B-A3B"), H100, 4),
        MeasuredCostModel(model_preset("Qwen3-8B"), H100, 1),
        MeasuredCostModel(model_preset("Qwen3-30B-A3B"), gpu_spec("H200"), 4),
        SpeculativeCosts(LinearCostModel(LinearCosts(per_context_token_s=3e-8)), Speculative(accept_rate=0.7)),
        SpeculativeCosts(
            AnalyticCostModel(analytic, model_preset("Qwen3-30B-A3B"), H100, 4), Speculative(accept_length=2.5)
        ),
        SpeculativeCosts(MeasuredCostModel(model_preset("Qwen3-8B"), H100, 1), Speculative(accept_length=2.5)),
    ]


MODELS = models()
AnyModel = st.sampled_from(MODELS)
Batch = st.integers(1, 700)
PerSequence = st.integers(1, 70_000)
Steps = st.integers(1, 3000)


@settings(max_examples=60, deadline=None)
@given(AnyModel, Batch, PerSequence, st.integers(0, 699), Steps)
def test_a_run_is_the_sum_of_its_steps(model: CostModel, batch: int, per: int, extra: int, steps: int) -> None:
    context = batch * per + extra % batch
    total = sum(model.decode_time(batch, context + i * batch) for i in range(steps))
    assert model.run_time(batch, context, steps) == pytest.approx(total, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(AnyModel, Batch, PerSequence, st.integers(0, 699), Steps, st.floats(0, 1))
def test_steps_within_is_the_exact_inverse(
    model: CostModel, batch: int, per: int, extra: int, steps: int, share: float
) -> None:
    context = batch * per + extra % batch
    exact = model.run_time(batch, context, steps)
    assert model.steps_within(batch, context, exact) == steps
    between = exact + share * (model.run_time(batch, context, steps + 1) - exact)
    k = model.steps_within(batch, context, between)
    assert model.run_time(batch, context, k) <= between < model.run_time(batch, context, k + 1)


@settings(max_examples=60, deadline=None)
@given(AnyModel, Batch, PerSequence, Steps)
def test_longer_runs_take_longer(model: CostModel, batch: int, per: int, steps: int) -> None:
    assert model.run_time(batch, batch * per, steps) < model.run_time(batch, batch * per, steps + 1)
    assert model.steps_within(batch, batch * per, 0.0) == 0
    assert model.steps_within(batch, batch * per, model.decode_time(batch, batch * per) * 0.999) == 0


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(MODELS[:3]), Batch, PerSequence, st.integers(1, 8192), st.integers(0, 8192))
def test_models_without_measurement_noise_are_monotone(
    model: CostModel, batch: int, per: int, new: int, cached: int
) -> None:
    here = model.decode_time(batch, batch * per)
    assert here <= model.decode_time(batch, batch * (per + 1))
    assert here <= model.decode_time(batch + 1, (batch + 1) * per) * (1 + 1e-12)
    pairs = new * (cached + new / 2)
    assert model.prefill_time(new, pairs, 1) <= model.prefill_time(new + 1, pairs, 1)
    assert model.prefill_time(new, pairs, 1) <= model.prefill_time(new, pairs + new, 1)


def test_linear_is_its_formula() -> None:
    c = LinearCosts(
        base_s=0.004, per_sequence_s=1e-5, per_context_token_s=2e-8, prefill_base_s=0.001, prefill_per_token_s=3e-6
    )
    m = LinearCostModel(c)
    assert m.decode_time(10, 5000) == pytest.approx(0.004 + 1e-4 + 1e-4)
    assert m.run_time(10, 5000, 4) == pytest.approx(4 * 0.0041 + 2e-8 * (5000 + 5010 + 5020 + 5030))
    assert m.prefill_time(1000, 1e6, 3) == pytest.approx(0.004)
    with pytest.raises(ValueError, match="must take time"):
        LinearCostModel(LinearCosts(base_s=0, per_sequence_s=0))


# --- analytic ---------------------------------------------------------------------------------------------------------


def test_analytic_decode_step_by_hand() -> None:
    """Llama-3.1-8B on one H100, 32 sequences of 1,000: weights without the embedding table, and 131,072 B of KV a
    token."""
    m = AnalyticCostModel(AnalyticCosts(), model_preset("Llama-3.1-8B"), H100, 1)
    read = 2 * (8_030_261_248 - 128_256 * 4096) + 32_000 * 131_072
    assert m.decode_time(32, 32_000) == pytest.approx(0.6e-3 + read / (0.8 * 3.35e12), rel=1e-9)


def test_analytic_large_batch_of_short_contexts_is_bound_by_compute() -> None:
    m = AnalyticCostModel(AnalyticCosts(compute_efficiency=0.1), model_preset("Llama-3.1-8B"), H100, 1)
    flops = 2 * (8_030_261_248 - 128_256 * 4096) * 512
    assert m.decode_time(512, 512) == pytest.approx(0.6e-3 + flops / (0.1 * 989e12), rel=1e-9)


def test_analytic_prefill_by_hand_and_the_cached_prefix_adds_attention_alone() -> None:
    m = AnalyticCostModel(AnalyticCosts(), model_preset("Llama-3.1-8B"), H100, 1)
    head = 128_256 * 4096
    body = 8_030_261_248 - 2 * head
    p, c = 4096, 8192
    peak = 0.45 * 989e12
    alone = (2 * body * p + 2 * head + 4 * 32 * 4096 * p * p / 2) / peak
    assert m.prefill_time(p, p * p / 2, 1) == pytest.approx(0.6e-3 + alone, rel=1e-9)
    cached = m.prefill_time(p, p * (c + p / 2), 1) - m.prefill_time(p, p * p / 2, 1)
    assert cached == pytest.approx(4 * 32 * 4096 * p * c / peak, rel=1e-9)


def test_one_prefill_batch_reads_the_weights_once() -> None:
    """Two small prompts in one batch cost less than two batches by about one reading of the weights."""
    m = AnalyticCostModel(AnalyticCosts(), model_preset("Llama-3.1-8B"), H100, 1)
    together = m.prefill_time(32, 2 * 16 * 8, 2)
    assert together == pytest.approx(m.prefill_time(16, 16 * 8, 1), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "batch", "experts"),
    [
        ("DeepSeek-V3", 8, 57),
        ("DeepSeek-V3", 32, 163),
        ("DeepSeek-V3", 64, 222),
        ("DeepSeek-V3", 128, 252),
        ("Qwen3-30B-A3B", 16, 82),
        ("Qwen3-30B-A3B", 32, 112),
        ("Qwen3-30B-A3B", 64, 126),
    ],
)
def test_experts_touched(model: str, batch: int, experts: int) -> None:
    spec = model_preset(model)
    m = AnalyticCostModel(AnalyticCosts(), spec, H100, 8)
    routed = m.weight_bytes_touched(batch) - m.weight_bytes_touched(0)
    assert routed / (2 * spec.routed_expert_params) * spec.experts == pytest.approx(experts, abs=0.5)


def test_all_reduce_has_a_floor_and_a_bandwidth() -> None:
    m = AnalyticCostModel(AnalyticCosts(), model_preset("Llama-3.1-8B"), H100, 8)
    assert m.all_reduce_time(1) == pytest.approx(2 * 32 * 4e-6)
    # 2 GB all-reduce on 8 H100 measured with NCCL: 8,448 us; the formula is a lower bound not far from it.
    one = m.all_reduce_time(262_144) / 64
    assert 0.5 * 8.448e-3 * (262_144 * 8192 / 2**31) < one < 1.4 * 8.448e-3 * (262_144 * 8192 / 2**31)


def test_analytic_is_near_the_measured_table_where_both_answer() -> None:
    """Roofline against kernels, no fit: within a factor of 1.6 for a dense model in the range of RL rollouts."""
    spec = model_preset("Qwen3-8B")
    roofline, table = AnalyticCostModel(AnalyticCosts(), spec, H100, 1), MeasuredCostModel(spec, H100, 1)
    for batch in (1, 16, 64, 256):
        for per in (1024, 4096, 16_384):
            ratio = roofline.decode_time(batch, batch * per) / table.decode_time(batch, batch * per)
            assert 1 / 1.6 < ratio < 1.6, (batch, per)


# --- measured ---------------------------------------------------------------------------------------------------------

PUBLISHED = {
    ("Qwen3-8B", 1): ([13.5, 46.3, 211, 1226], [6.8, 10.0, 19.8, 34.0], [7.0, 19.2, 56.6, 107.7]),
    ("Qwen3-32B", 4): ([21.7, 67.3, 286, 1447], [8.1, 10.3, 16.0, 23.7], [8.2, 14.5, 32.5, 57.1]),
    ("Qwen3-30B-A3B", 1): ([29.3, 44.7, 149, 1063], [4.5, 21.4, 31.6, 42.1], [4.6, 27.6, 56.6, 92.4]),
    ("Qwen3-30B-A3B", 4): ([15.8, 29.9, 99, 528], [3.3, 8.3, 12.0, 15.9], [3.4, 10.2, 18.3, 28.8]),
}
"""Milliseconds on H100: prefill of 512, 2,048, 8,192, 32,768 tokens; decode at batch 1, 32, 128, 256 with context 2,048
and 8,192."""


@pytest.mark.parametrize(("name", "tp"), PUBLISHED)
def test_measured_meets_the_rows_of_the_published_table(name: str, tp: int) -> None:
    prefill, at_2k, at_8k = PUBLISHED[name, tp]
    m = MeasuredCostModel(model_preset(name), H100, tp)
    tolerance = {"rel": 0.005, "abs": 0.051}
    for tokens, ms in zip((512, 2048, 8192, 32_768), prefill, strict=True):
        assert m.prefill_time(tokens, tokens**2 / 2, 1) * 1e3 == pytest.approx(ms, **tolerance)
    for per, row in ((2048, at_2k), (8192, at_8k)):
        for batch, ms in zip((1, 32, 128, 256), row, strict=True):
            assert m.decode_time(batch, batch * per) * 1e3 == pytest.approx(ms, **tolerance)


def test_measured_meets_every_decode_point_and_every_single_prompt() -> None:
    for (gpu, name, tp), table in step_tables().items():
        m = MeasuredCostModel(model_preset(name), gpu_spec(gpu), tp, "fp8" if name == "DeepSeek-V3" else "bf16")
        for (context, batch), seconds in table.decode.items():
            assert m.decode_time(batch, batch * context) == pytest.approx(seconds, rel=1e-12)
        for (prompts, tokens), seconds in table.prefill.items():
            predicted = m.prefill_time(prompts * tokens, prompts * tokens**2 / 2, prompts)
            rel = 1e-9 if prompts == 1 else 0.35 if name == "Qwen3-0.6B" else 0.15
            assert predicted == pytest.approx(seconds, rel=rel), (gpu, name, tp, prompts, tokens)


def test_measured_lies_between_table_points_on_a_line() -> None:
    m = MeasuredCostModel(model_preset("Qwen3-8B"), H100, 1)
    # batch 48 between 32 and 64, context 3,072 between 2,048 and 4,096: bilinear, by hand from four rows
    corners = (10.0185, 13.4505, 13.0886, 19.5475)
    assert m.decode_time(48, 48 * 3072) * 1e3 == pytest.approx(sum(corners) / 4, rel=1e-6)


def test_measured_counts_answers_outside_its_range() -> None:
    m = MeasuredCostModel(model_preset("Qwen3-8B"), H100, 1)
    for _ in range(3):
        m.run_time(8, 8 * 1000, 10)
    assert m.outside_share == {"decode": 0.0, "prefill": 0.0}
    m.run_time(8, 8 * 65_530, 10)  # its end lies beyond 65,536
    assert m.outside_share["decode"] == pytest.approx(1 / 4)
    m.run_time(600, 600 * 1000, 10)  # the table ends at 512 sequences
    assert m.outside_share["decode"] == pytest.approx(2 / 5)
    m.prefill_time(512, 512 * 256, 1)
    m.prefill_time(10**6, 1e9, 1)
    assert m.outside_share["prefill"] == pytest.approx(1 / 2)


def test_measured_goes_on_linearly_beyond_the_edges() -> None:
    m = MeasuredCostModel(model_preset("Qwen3-8B"), H100, 1)
    at = [m.decode_time(256, 256 * c) for c in (32_768, 65_536, 98_304)]
    assert at[2] - at[1] == pytest.approx(at[1] - at[0], rel=1e-9)
    by = [m.decode_time(b, b * 8192) for b in (256, 512, 768)]
    assert by[2] - by[1] == pytest.approx(by[1] - by[0], rel=1e-9)


def test_measured_cached_prefix_costs_attention_and_nothing_else() -> None:
    m = MeasuredCostModel(model_preset("Qwen3-8B"), H100, 1)
    new, cached = 1000, 20_000
    alone, with_prefix = m.prefill_time(new, new**2 / 2, 1), m.prefill_time(new, new * (cached + new / 2), 1)
    whole = m.prefill_time(new + cached, (new + cached) ** 2 / 2, 1)
    assert alone < with_prefix < whole
    # the roofline's attention term at 45 % of peak is of the same size
    roofline = 4 * 36 * 4096 * new * cached / (0.45 * 989e12)
    assert 1 / 2 < (with_prefix - alone) / roofline < 2


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "precision", "nearest"),
    [
        ("Llama-3.1-8B", "H100", 1, "bf16", "Qwen3-8B in bf16 with bf16 KV on H100, TP 1"),
        ("Qwen3-32B", "H100", 1, "bf16", "Qwen3-32B in bf16 with bf16 KV on H100, TP 2"),
        ("Qwen3-8B", "A100", 2, "bf16", "TP 2"),
        ("Qwen3-8B", "H100", 1, "fp8", "Qwen3-8B in bf16"),
        ("DeepSeek-V3", "H200", 8, "bf16", "DeepSeek-V3 in fp8 with bf16 KV on H200, TP 8"),
    ],
)
def test_measured_refuses_what_the_table_lacks_and_names_the_nearest(
    model: str, gpu: str, tp: int, precision: str, nearest: str
) -> None:
    with pytest.raises(CostModelError, match="no .*" + model) as e:
        MeasuredCostModel(model_preset(model), gpu_spec(gpu), tp, precision)
    assert nearest in e.value.nearest


# --- calibrated, factory ----------------------------------------------------------------------------------------------


def test_calibrated_reads_a_profile_and_marks_its_range(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    m = CalibratedCostModel(read_profile(path))
    assert m.decode_time(4, 400) == pytest.approx(0.01 + 4e-4 + 4e-5)
    assert m.prefill_time(100, 5000, 2) == pytest.approx(0.02 + 1e-3 + 5e-6 + 2e-3)
    m.decode_time(17, 170)
    assert m.outside_share == {"decode": 0.5, "prefill": 0.0}


@pytest.mark.parametrize("text", [None, "{}", "nonsense"])
def test_calibrated_says_which_profile_is_missing_or_broken(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    with pytest.raises(CostModelError, match=r"profile\.json.*testbed calibrate"):
        read_profile(tmp_path / "profile.json")


def test_calibrated_refuses_negative_coefficients(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    below = {"above": [{"sequences": 4, "per_sequence_s": -1e-6}]}
    for decode in ({"base_s": 0.01, "per_sequence_s": -1e-6}, {"base_s": 0.01, **below}, {"base_s": -0.01}):
        path.write_text(json.dumps({**PROFILE, "decode": decode}))
        with pytest.raises(CostModelError, match="negative"):
            CalibratedCostModel(read_profile(path))


def test_factory_chooses_by_type(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    kinds = {
        "linear": {"type": "linear"},
        "analytic": {"type": "analytic", "gpu": "B200"},
        "measured": {"type": "measured"},
        "calibrated": {"type": "calibrated", "profile": "p.json"},
    }
    for kind, costs in kinds.items():
        s = scenario(simulation={"engine_costs": costs})
        assert cost_model(s, model_preset("Qwen3-8B"), H100, tmp_path).kind == kind


def test_a_decode_step_needs_a_sequence() -> None:
    for m in MODELS:
        with pytest.raises(ValueError, match="at least one sequence"):
            m.decode_time(0, 0)


def test_an_engine_among_others_that_work_and_beside_a_trainer() -> None:
    """Fitted while all worked: 20 ms + 2 ms a sequence, 6 and 0.5 of which are the others' doing. Prefill 0.1 s, and 20
    ms of traffic for the one request, 1.25 times what it takes alone. Beside a trainer decode takes 1.5 and prefill 2
    times as long."""
    profile = Profile(
        format=1,
        decode=DecodeFit(0.02, 0.002),
        prefill=PrefillFit(0.1, 0.0),
        crowd=CrowdFit(0.006, 0.0005, 1.25),
        beside=BesideFit(1.5, 2.0, 1.0),
        traffic_s=0.02,
    )
    other = structs.replace(profile, decode=DecodeFit(0.02, 0.002, 0.0, (Section(3, 0.001),)))
    assert CalibratedCostModel(other).decode_time(4, 100) == pytest.approx(0.02 + 3 * 0.002 + 0.001)
    alone = CalibratedCostModel(other).among(False, 0.0)
    assert alone.decode_time(4, 100) == pytest.approx(0.014 + 3 * 0.0015 + 0.0005)
    all_work = CalibratedCostModel(profile)
    assert all_work.shared and all_work.among(False, 1.0) is all_work
    assert all_work.among(False, 0.5) is all_work.among(False, 0.5)
    for trainer, others, step, prefill in (
        (False, 1.0, 0.02 + 4 * 0.002, 0.1),
        (False, 0.5, 0.017 + 4 * 0.00175, 0.09),
        (False, 0.0, 0.014 + 4 * 0.0015, 0.08),
        (True, 0.0, 1.5 * (0.014 + 4 * 0.0015), 2 * 0.08),
        (True, 1.0, 1.5 * (0.02 + 4 * 0.002), 2 * 0.1),
    ):
        m = all_work.among(trainer, others)
        assert m.decode_time(4, 100) == pytest.approx(step)
        assert m.prefill_time(10, 50.0, 1) == pytest.approx(1.2 * prefill)
    assert not CalibratedCostModel(structs.replace(profile, crowd=None, beside=None)).shared
