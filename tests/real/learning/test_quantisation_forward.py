"""Trainer and engine hold the same bits; gradients pass straight through; which precisions go together."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from real.errors import RealError
from real.learning.log_probs import token_log_probs
from real.learning.quantisation.forward import AsServed, quantise_forward
from real.learning.quantisation.pairs import pair_of
from real.learning.quantisation.report import Comparison, agreement, compare, cost
from real.learning.quantisation.rules import RULES
from real.weights.partition import checkpoint_tensors, engine_tensors, layout
from real.weights.quantize import requantize
from testbed.scenario.model import Precision
from testbed.scenario.precisions import ALLOWED, PLAIN, REFUSED, training_for

IDS = torch.tensor([[5, 9, 60, 3, 3, 41, 7, 22, 0, 17, 58, 30]])
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Any] = {
    # 4 x 12 = 48 query rows and 24 of K and V: no block and no group of any format ends where a part does
    "dense": Qwen3Config(**COMMON, hidden_size=56, intermediate_size=80, head_dim=12),
    "moe": Qwen3MoeConfig(
        **COMMON,
        hidden_size=40,
        intermediate_size=64,
        moe_intermediate_size=24,
        head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    yield built(request.param)


def built(kind: str, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa") -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = copy.deepcopy(CONFIGS[kind])
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    return model.to(dtype).eval()


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    return model.config.to_dict()


def engine_rank(model: PreTrainedModel, state: dict[str, Tensor], tp_size: int, rank: int) -> dict[str, Tensor]:
    """What one engine rank holds after the weights of `state` have arrived."""
    tensors = checkpoint_tensors(state, config_of(model))
    plan = layout(config_of(model), {n: t.shape for n, t in tensors.items()}, tp_size, rank)
    return engine_tensors(plan, tensors)


def parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters()}


def in_forward(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every parameter as the modules see it while they run."""
    seen = {}

    def look(prefix: str, module: torch.nn.Module) -> None:
        for name, _ in module.named_parameters(recurse=False):
            seen[f"{prefix}.{name}"] = getattr(module, name).detach().clone()

    owners = [(n, m) for n, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]
    hooks = [m.register_forward_pre_hook(lambda m, _, n=n: look(n, m)) for n, m in owners]
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_qm_06_trainer_and_engines_hold_the_same_bits(
    rule: str, dtype: torch.dtype, tp_size: int, model: PreTrainedModel
) -> None:
    """The engine: weights arrive, are fused and sharded, and its own copy is requantised in place. The trainer: what
    its modules see in a forward pass, laid out as that engine lays it out."""
    model = model.to(dtype)
    plain = parameters(model)
    quantise_forward(model, rule, tp_size)
    seen = in_forward(model)
    assert seen.keys() == plain.keys()
    for rank in range(tp_size):
        engine = engine_rank(model, plain, tp_size, rank)
        arrived = {n: t.clone() for n, t in engine.items()}
        changed = requantize(engine.items(), rule)
        assert changed == 4 * model.config.num_hidden_layers
        trainer = engine_rank(model, seen, tp_size, rank)
        assert trainer.keys() == engine.keys()
        assert all(torch.equal(trainer[n], engine[n]) for n in engine)
        assert sum(not torch.equal(trainer[n], arrived[n]) for n in engine) == changed


def written_over(model: PreTrainedModel, rule: str) -> PreTrainedModel:
    """A plain model whose projection weights are what an engine of one rank holds, with its fusion written out."""
    apply = RULES[rule].apply
    with torch.no_grad():
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            fused = [(a.q_proj, a.k_proj, a.v_proj), (a.o_proj,)]
            if hasattr(m, "experts"):
                for expert in range(model.config.num_experts):
                    for stacked in (m.experts.gate_up_proj, m.experts.down_proj):
                        stacked[expert] = apply(stacked[expert])
            else:
                fused += [(m.gate_proj, m.up_proj), (m.down_proj,)]
            for linears in fused:
                whole = apply(torch.cat([linear.weight for linear in linears]))
                for linear, rows in zip(linears, whole.split([f.weight.shape[0] for f in linears]), strict=True):
                    linear.weight.copy_(rows)
    return model


def scored(model: PreTrainedModel) -> Tensor:
    return token_log_probs(model(IDS).logits[0], IDS[0])


@pytest.mark.parametrize("rule", RULES)
def test_qm_06_forward_and_gradients_are_those_of_the_quantised_weights(rule: str, model: PreTrainedModel) -> None:
    """Straight through: the gradient at the quantised weights, on the weights that are not. All of it bit for bit."""
    served = written_over(copy.deepcopy(model), rule)
    before = {n: p.clone() for n, p in parameters(model).items()}
    plain = scored(model).detach()
    remove = quantise_forward(model, rule)
    weight = torch.linspace(-1, 1, IDS.shape[1] - 1)
    for net in (model, served):
        (scored(net) * weight).sum().backward()
    assert torch.equal(scored(model), scored(served)) and not torch.equal(scored(model), plain)
    want = {n: p.grad for n, p in served.named_parameters()}
    assert want.keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), before[name]) and torch.equal(parameter.grad, want[name]), name
    remove()
    assert torch.equal(scored(model), plain)
    assert "weight" not in vars(model.model.layers[0].self_attn.q_proj)


def test_qm_06_column_shards_have_scales_of_their_own() -> None:
    """INT8 rows on two ranks: each rank of `o_proj` sees half of a row, with its own maximum. Written out."""
    weight = torch.arange(1.0, 56 * 48 + 1).reshape(56, 48)
    shapes = {"model.layers.0.self_attn.o_proj.weight": weight.shape}
    [(name, got)] = AsServed("int8", CONFIGS["dense"].to_dict(), shapes, tp_size=2)(
        {next(iter(shapes)): weight}
    ).items()
    assert name.endswith("o_proj.weight")
    halves = [torch.round(h / (h.amax(1, True) / 127)) * (h.amax(1, True) / 127) for h in weight.split(24, 1)]
    assert torch.equal(got, torch.cat(halves, 1))


def test_qm_06_heads_that_several_ranks_hold_are_refused_unless_rows_are_rounded_alone() -> None:
    model = built("dense")
    with pytest.raises(RealError, match="tp_size 4 several engine ranks hold one KV head, which fp8 rounds"):
        quantise_forward(model, "fp8", tp_size=4)
    remove = quantise_forward(model, "mxfp8", tp_size=4)
    seen = in_forward(model)
    remove()
    for rank in range(4):
        engine = engine_rank(model, parameters(model), 4, rank)
        requantize(engine.items(), "mxfp8")
        assert all(torch.equal(engine[n], t) for n, t in engine_rank(model, seen, 4, rank).items())


def test_qm_06_what_cannot_be_quantised_as_served_is_refused() -> None:
    with pytest.raises(RealError, match="no rule 'fp6'"):
        quantise_forward(built("dense"), "fp6")
    with pytest.raises(RealError, match=r"qkv_proj\.weight \[96, 56\] is not whole"):
        AsServed("fp8", CONFIGS["dense"].to_dict(), {"model.layers.0.self_attn.q_proj.weight": (48, 56)})


# --- cost and agreement -----------------------------------------------------------------------------------------------


def compared(rollout: str, training: str, rule: str | None) -> Comparison:
    """Engine weights in `rule`; a trainer whose forward is quantised only if `training` is that format too."""
    model = built("dense", torch.bfloat16)
    engine = written_over(copy.deepcopy(model), rule) if rule else model
    if training in RULES:
        quantise_forward(model, training)
    with torch.no_grad():
        generation, recomputed = scored(engine), scored(model)
    return compare(rollout, training, engine_rank(model, parameters(model), 1, 0).items(), generation, recomputed)


@pytest.mark.parametrize("rule", ["fp8", "mxfp8", "int8"])
def test_qm_07_a_bf16_forward_keeps_a_difference_that_a_shared_rule_does_not_have(rule: str) -> None:
    """Configuration A against B: the engine is a transformers forward here, so A's gap is not small but zero."""
    shared, mixed = compared(rule, rule, rule), compared(rule, "bf16", rule)
    plain = compared("bf16", "bf16", None)
    assert shared.agreement.k3 == 0 and shared.agreement.equal == 1 and shared.pair.shared
    assert mixed.agreement.k3 > 0 and mixed.agreement.mean_abs > 0 and not mixed.pair.shared
    assert mixed.cost.bytes < plain.cost.bytes == plain.cost.plain_bytes  # decoding reads fewer bytes a token
    assert mixed.cost.seconds > 0 and plain.cost.seconds == 0 and plain.cost.tensors == 0


def test_qm_05_the_gap_of_one_set_of_weights_is_reported_per_precision() -> None:
    """The same weights by two attention kernels: what is left is rounding, most of it in BF16 and none is negative."""
    gaps = {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            sides = [scored(built("dense", dtype, kernel)) for kernel in ("eager", "sdpa")]
        gaps[dtype] = agreement(*sides)
    for rule in RULES:
        engine = written_over(built("dense"), rule)
        with torch.no_grad():
            gaps[rule] = agreement(scored(engine), scored(built("dense")))
    assert all(gap.k3 >= 0 and gap.tokens == IDS.shape[1] - 1 for gap in gaps.values())
    assert gaps[torch.float32].mean_abs < gaps[torch.bfloat16].mean_abs
    assert gaps[torch.float32].k3 < gaps["int8"].k3 < gaps["fp8"].k3 < gaps["nvfp4"].k3


def test_qm_09_cost_counts_projections_in_the_format_and_the_rest_as_it_is() -> None:
    """One layer written out: qkv 96 x 56, o 56 x 48, gate_up 160 x 56, down 56 x 80; NVFP4 has 9 bits for each 2 values
    of a full block, the last block of 56 is padded in its scales alone."""
    model = built("dense", torch.bfloat16)
    engine = engine_rank(model, parameters(model), 1, 0)
    shapes = [(96, 56), (56, 48), (160, 56), (56, 80)]
    plain = sum(2 * t.numel() for t in engine.values())
    stored = sum(n * (k // 2 + math.ceil(k / 16)) + 4 for n, k in shapes)
    got = cost(engine.items(), "nvfp4")
    assert (got.tensors, got.plain_bytes) == (8, plain)
    assert got.bytes == plain - 2 * sum(2 * n * k for n, k in shapes) + 2 * stored


def test_qm_05_agreement_by_hand() -> None:
    """p = 0.50 at the engine and 0.52 in training: d = ln 0.50 - ln 0.52, k3 = exp(-d) - 1 + d."""
    got = agreement(torch.tensor([0.5, 0.25]).log(), torch.tensor([0.52, 0.25]).log())
    d = math.log(0.5 / 0.52)
    assert got.k3 == pytest.approx((0.04 + d) / 2, rel=1e-4)
    assert (got.tokens, got.equal) == (2, 0.5) and got.mean_abs == pytest.approx(0.0392 / 2, abs=1e-4)
    with pytest.raises(ValueError, match="same tokens"):
        agreement(torch.zeros(2), torch.zeros(3))


# --- which precisions go together -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "training"),
    [("bf16", ("bf16",)), ("fp8", ("bf16", "fp8")), ("mxfp8", ("bf16", "mxfp8")), ("nvfp4", ("nvfp4",))],
)
def test_qm_08_miles_matrix(rollout: str, training: tuple[str, ...]) -> None:
    assert training_for(rollout) == training
    for other in ("bf16", "fp8", "mxfp8", "nvfp4"):
        if other in training:
            assert pair_of(rollout, other).reason
        else:
            with pytest.raises(RealError, match=f"{rollout} engines with {other} training: .*; {rollout} goes with"):
                pair_of(rollout, other)


def test_qm_08_nvfp4_generation_with_bf16_training_is_not_the_nvfp4_recipe() -> None:
    with pytest.raises(RealError, match=r"not the NVFP4 recipe.*NVFP4 too; nvfp4 goes with nvfp4$"):
        pair_of("nvfp4", "bf16")
    with pytest.raises(RealError, match="not the NVFP4 recipe"):
        compare("nvfp4", "bf16", [], torch.zeros(1), torch.zeros(1))
    with pytest.raises(RealError, match="no engine weights 'fp6'; there are bf16, fp16"):
        pair_of("fp6", "bf16")
    assert not REFUSED.keys() & {(p.rollout, p.training) for p in ALLOWED}


def test_qm_08_every_format_of_a_scenario_has_a_rule_and_int4_goes_with_int4_alone() -> None:
    """Nothing documents INT4 engines with a BF16 training forward: Miles' recipe quantises that forward too."""
    assert {p.rollout for p in ALLOWED} - set(PLAIN) <= set(RULES)
    assert set(get_args(Precision)) == {p.rollout for p in ALLOWED}
    assert training_for("int4") == ("int4",)
    with pytest.raises(RealError, match="quantisation-aware training, whose forward is INT4 too; int4 goes with int4"):
        pair_of("int4", "bf16")
