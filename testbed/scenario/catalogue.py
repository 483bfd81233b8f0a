"""GPUs and models by name: peak rates, architecture numbers, and what follows from them (parameters, bytes, KV pool).

It reads the bundled tables and a user's `config.json`, and does sums. It refuses to know how long anything takes
(`sim.costs`, `sim.trainer`) and which combinations make sense (`testbed.scenario.rules`).
"""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgspec import Struct

from testbed.scenario.model import ConfigJsonModel, InlineModel, ModelConfig, PresetModel
from testbed.scenario.placement import Placement
from testbed.scenario.rollout import EngineOptions
from testbed.scenario.scenario import Scenario
from testbed.scenario.training import Training

BYTES_PER_WEIGHT: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "mxfp8": 1.0 + 1 / 32,  # one scale byte per 32 values (OCP MX)
    "nvfp4": 0.5 + 1 / 16,  # one scale byte per 16 values
    "int4": 0.5 + 2 / 128,  # one bf16 scale per 128 values
}
"""Bytes of one weight in storage, scales included. Embeddings, norms and the LM head stay in 2 bytes below 16 bits."""

BYTES_PER_KV_VALUE: dict[str, int] = {"bf16": 2, "fp8": 1}


class CatalogueError(ValueError):
    """A name or a file that the catalogue can't read. `nearest`: the closest thing that would work, or empty."""

    def __init__(self, message: str, nearest: str = "") -> None:
        super().__init__(f"{message}; nearest: {nearest}" if nearest else message)
        self.message = message
        self.nearest = nearest


class GpuSpec(Struct, frozen=True):
    """Peak rates of one GPU. Dense FLOP/s; bandwidths of one direction, per GPU.

    Compute, HBM and NVLink: published (data sheets). PCIe and IB: usable rates, commonly measured.
    """

    name: str
    bf16_tflops: float
    fp8_tflops: float | None
    """null: no FP8 units."""
    hbm_tb_per_s: float
    hbm_gb: float
    """1e9 bytes, nominal."""
    nvlink_gb_per_s: float
    pcie_gb_per_s: float
    ib_gb_per_s: float

    def peak_flops(self, precision: str) -> float:
        """Dense FLOP/s of matrix products. Formats under 16 bits count at the FP8 rate where there is one."""
        if precision in ("fp8", "mxfp8", "nvfp4", "int8") and self.fp8_tflops is not None:
            return self.fp8_tflops * 1e12
        return self.bf16_tflops * 1e12

    @property
    def hbm_bytes(self) -> float:
        return self.hbm_gb * 1e9

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.hbm_tb_per_s * 1e12


class ModelSpec(Struct, frozen=True):
    """Architecture of a decoder-only transformer, in numbers. `experts` = 0: dense."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of one query head (MLA: query-key width, rope part included)."""
    intermediate: int
    vocab: int
    tied: bool = False
    """The LM head is the embedding matrix."""
    experts: int = 0
    topk: int = 0
    moe_intermediate: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    """Leading layers of an MoE model that have a dense MLP."""
    attention_bias: bool = False
    qk_norm: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """> 0: multi-head latent attention (MLA)."""
    rope_head_dim: int = 0
    """MLA: the decoupled rope part of a key, cached once per token."""
    v_head_dim: int = 0
    """MLA: width of one value head; 0: as `head_dim`."""

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.is_moe else 0

    @property
    def attention_width(self) -> float:
        """q x d_h of the attention FLOPs: heads x head_dim; MLA: the mean of the query-key and the value width."""
        return self.heads * (self.head_dim + (self.v_head_dim or self.head_dim)) / 2

    @property
    def embedding_params(self) -> int:
        """Input embedding: looked up, not multiplied."""
        return self.vocab * self.hidden

    @property
    def lm_head_params(self) -> int:
        """Matrix of the output projection, whether or not it is stored twice."""
        return self.vocab * self.hidden

    @property
    def attention_params_per_layer(self) -> int:
        h = self.hidden
        if self.is_mla:
            nope = self.head_dim - self.rope_head_dim
            v = self.v_head_dim or self.head_dim
            q_out = self.heads * self.head_dim
            query = (
                h * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * q_out if self.q_lora_rank else h * q_out
            )
            kv = h * (self.kv_lora_rank + self.rope_head_dim) + self.kv_lora_rank
            return query + kv + self.kv_lora_rank * self.heads * (nope + v) + self.heads * v * h
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = q + 2 * k if self.attention_bias else 0
        norm = 2 * self.head_dim if self.qk_norm else 0
        return h * q + 2 * h * k + q * h + bias + norm

    @property
    def expert_params(self) -> int:
        """One routed expert of one layer: gate, up, down."""
        return 3 * self.hidden * self.moe_intermediate

    @property
    def routed_expert_params(self) -> int:
        """All routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_params

    @property
    def params(self) -> int:
        """All parameters, embeddings included."""
        dense = (self.layers - self.moe_layers) * 3 * self.hidden * self.intermediate
        always = self.moe_layers * (self.shared_experts * self.expert_params + self.experts * self.hidden)
        layers = self.layers * (self.attention_params_per_layer + 2 * self.hidden)
        heads = self.embedding_params + (0 if self.tied else self.lm_head_params)
        return layers + dense + always + self.routed_expert_params + heads + self.hidden

    @property
    def active_params(self) -> int:
        """Parameters that one token uses, input embedding included: `params` with `topk` of the routed experts."""
        return self.params - self.moe_layers * (self.experts - self.topk) * self.expert_params

    @property
    def matmul_params(self) -> int:
        """N_active - N_emb of the FLOP formulas: what every token is multiplied with, LM head included."""
        return self.active_params - (0 if self.tied else self.embedding_params)

    def kv_bytes_per_token(self, kv_dtype: str = "bf16", tensor_parallel: int = 1) -> float:
        """Bytes of KV of one token, summed over the engine's GPUs.

        GQA: 2 L kv d_h b; with more ranks than KV heads each rank keeps one (copies are counted).
        MLA: L (kv_lora_rank + rope) b on every rank, not divided by TP.
        """
        b = BYTES_PER_KV_VALUE[kv_dtype]
        if self.is_mla:
            return float(self.layers * (self.kv_lora_rank + self.rope_head_dim) * b * tensor_parallel)
        return float(2 * self.layers * max(self.kv_heads, tensor_parallel) * self.head_dim * b)

    def weight_bytes(self, precision: str = "bf16") -> float:
        """Bytes of all weights. Below 16 bits, embeddings and LM head stay in 2 bytes."""
        b = BYTES_PER_WEIGHT[precision]
        if b >= 2:
            return self.params * b
        wide = self.embedding_params + (0 if self.tied else self.lm_head_params)
        return (self.params - wide) * b + wide * 2

    @property
    def num_tensors(self) -> int:
        """Tensors of a Hugging Face checkpoint without scales: every projection, norm and expert matrix by itself."""
        attention = 7 if self.is_mla else 4 + (3 if self.attention_bias else 0) + (2 if self.qk_norm else 0)
        moe = 3 * self.experts + 1 + (3 if self.shared_experts else 0)
        dense_layers = self.layers - self.moe_layers
        return self.layers * (attention + 2) + dense_layers * 3 + self.moe_layers * moe + 2 + (0 if self.tied else 1)


class EngineMemory(Struct, frozen=True):
    """How one engine's GPU memory divides. Bytes over all its GPUs."""

    static_bytes: float
    """mem_fraction_static x HBM: weights and KV pool together."""
    weight_bytes: float
    kv_bytes_per_token: float
    kv_tokens: int
    """Slots of the KV pool; zero or negative: the weights alone do not fit."""


@lru_cache(maxsize=1)
def _gpus() -> dict[str, GpuSpec]:
    raw: dict[str, dict[str, Any]] = json.loads((files("testbed") / "data" / "gpus.json").read_text("utf-8"))
    return {name: GpuSpec(name=name, **fields) for name, fields in raw.items()}


@lru_cache(maxsize=1)
def _models() -> dict[str, ModelSpec]:
    raw: dict[str, dict[str, Any]] = json.loads((files("testbed") / "data" / "models.json").read_text("utf-8"))
    return {(name := hub.split("/")[-1]): _from_hf(fields, name) for hub, fields in raw.items()}


def gpu_names() -> list[str]:
    return list(_gpus())


def model_names() -> list[str]:
    """Names of the bundled models."""
    return list(_models())


def gpu_spec(name: str) -> GpuSpec:
    """Raises `CatalogueError` for a name that is not in the catalogue."""
    try:
        return _gpus()[name]
    except KeyError:
        raise CatalogueError(f"no GPU is called {name!r}", _nearest(name, gpu_names())) from None


def model_spec(config: ModelConfig, base_dir: Path | None = None) -> ModelSpec:
    """Architecture of the scenario's model. `base_dir`: what a `config.json` path is relative to (null: here).

    Raises `CatalogueError` for an unknown preset, a missing file, or a config without the numbers needed.
    """
    if isinstance(config, PresetModel):
        return _preset(config.name)
    if isinstance(config, InlineModel):
        return _from_inline(config)
    return _from_file(config, base_dir)


def model_preset(name: str) -> ModelSpec:
    """A bundled model by name; the hub's organisation prefix and upper or lower case don't matter."""
    return _preset(name)


def engine_memory(
    model: ModelSpec,
    gpu: GpuSpec,
    gpus: int,
    mem_fraction_static: float,
    precision: str = "bf16",
    kv_dtype: str = "bf16",
) -> EngineMemory:
    """KV pool = (mem_fraction_static x HBM x GPUs - weights) / KV bytes per token. `gpus`: of one engine."""
    static = mem_fraction_static * gpu.hbm_bytes * gpus
    weights = model.weight_bytes(precision)
    per_token = model.kv_bytes_per_token(kv_dtype, gpus)
    return EngineMemory(static, weights, per_token, int((static - weights) // per_token))


def engine_memory_of(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> EngineMemory:
    """`engine_memory` with the options of a scenario."""
    e: EngineOptions = scenario.rollout.engine
    p: Placement = scenario.placement
    return engine_memory(
        model, gpu, p.rollout_num_gpus_per_engine, e.mem_fraction_static, e.weight_precision, e.kv_cache_dtype
    )


def kv_pool_tokens(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> int:
    """KV slots of one engine, in whole pages. `max_total_num_tokens` can lower them but not raise them (as in SGLang).

    Raises `CatalogueError` if the weights leave no room for a single page.
    """
    options = scenario.rollout.engine
    memory = engine_memory_of(scenario, model, gpu)
    tokens = memory.kv_tokens
    if options.max_total_num_tokens is not None:
        tokens = min(tokens, options.max_total_num_tokens)
    tokens -= tokens % options.page_size
    if memory.kv_tokens <= 0 or tokens <= 0:
        gpus = scenario.placement.rollout_num_gpus_per_engine
        raise CatalogueError(
            f"{model.name} in {options.weight_precision} takes {memory.weight_bytes / 1e9:.0f} GB; "
            f"an engine of {gpus} {gpu.name} has {memory.static_bytes / 1e9:.0f} GB for weights and KV",
            f"rollout_num_gpus_per_engine: {_gpus_needed(scenario, model, gpu)}",
        )
    return tokens


def host_kv_tokens(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> int:
    """KV slots of one engine in host memory, in whole pages; 0 without a hierarchical cache."""
    options = scenario.rollout.engine
    tier = options.hierarchical_cache
    if tier is None:
        return 0
    gpus = scenario.placement.rollout_num_gpus_per_engine
    if tier.hicache_size is not None:
        tokens = int(tier.hicache_size * 1e9 * gpus // engine_memory_of(scenario, model, gpu).kv_bytes_per_token)
    else:
        tokens = int(tier.hicache_ratio * kv_pool_tokens(scenario, model, gpu))
    return tokens - tokens % options.page_size


def trainer_state_bytes_per_gpu(model: ModelSpec, training: Training, gpus: int) -> float:
    """Weights, gradients and optimizer states on one trainer GPU, bytes (activations not counted).

    Mixed-precision Adam: weights 2 B (4 in fp32), gradients 4 B where they are accumulated in fp32 (zero1, zero2) or
    2 B (zero3), states `optimizer_bytes_per_param`: 16 to 18 B per parameter in all. zero1 spreads states over all
    GPUs, zero2 gradients too, zero3 everything; the rest is split by tensor and pipeline (experts: also by expert)
    parallelism.
    """
    weight = BYTES_PER_WEIGHT["fp32" if training.precision == "fp32" else "bf16"]
    gradient = weight if training.sharding == "zero3" else 4.0
    split = min(gpus, training.tensor_parallel * training.pipeline_parallel)
    expert_split = min(gpus, max(training.tensor_parallel, training.expert_parallel) * training.pipeline_parallel)
    routed = model.routed_expert_params
    local = (model.params - routed) / split + routed / expert_split
    spread = model.params / gpus
    states = training.optimizer_bytes_per_param * spread
    if training.sharding == "zero1":
        return (weight + gradient) * local + states
    if training.sharding == "zero2":
        return weight * local + gradient * spread + states
    return (weight + gradient) * spread + states


def _gpus_needed(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> int:
    """Smallest power of two of GPUs that keeps a tenth of the static memory for KV."""
    options = scenario.rollout.engine
    gpus = 1
    while model.weight_bytes(options.weight_precision) > 0.9 * options.mem_fraction_static * gpu.hbm_bytes * gpus:
        gpus *= 2
    return gpus


def _preset(name: str) -> ModelSpec:
    wanted = name.split("/")[-1].lower()
    for known, spec in _models().items():
        if known.lower() == wanted:
            return spec
    raise CatalogueError(f"no model of the catalogue is called {name!r}", _nearest(name.split("/")[-1], model_names()))


def _from_inline(c: InlineModel) -> ModelSpec:
    if c.num_experts is not None and (c.num_experts_per_tok is None or c.moe_intermediate_size is None):
        raise CatalogueError(
            f"model {c.name!r} has num_experts but not num_experts_per_tok and moe_intermediate_size",
            "write all three, or none for a dense model",
        )
    if c.head_dim is None and c.hidden_size % c.num_attention_heads:
        raise CatalogueError(f"hidden_size of model {c.name!r} is no multiple of num_attention_heads", "write head_dim")
    return _from_hf(c.model_dump(exclude={"type", "name"}, exclude_none=True), c.name)


def _from_file(c: ConfigJsonModel, base_dir: Path | None) -> ModelSpec:
    path = (base_dir or Path()) / c.path
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise CatalogueError(
            f"can't read the model's config {path}: {e.strerror}", "a preset: " + ", ".join(model_names()[:4])
        ) from e
    except json.JSONDecodeError as e:
        raise CatalogueError(f"{path} is not JSON: {e}") from e
    return _from_hf(_with_implied(raw), c.name or path.parent.name)


_QK_NORM_TYPES = frozenset({"qwen3", "qwen3_moe"})
_BIAS_TYPES = frozenset({"qwen2", "qwen2_moe"})


def _with_implied(raw: dict[str, Any]) -> dict[str, Any]:
    """Facts that a model type implies and its `config.json` does not say."""
    text = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else dict(raw)
    kind = text.get("model_type", "")
    text.setdefault("qk_norm", bool(text.get("use_qk_norm", kind in _QK_NORM_TYPES)))
    if kind in _BIAS_TYPES:
        text["attention_bias"] = True
    return text


def _from_hf(c: dict[str, Any], name: str) -> ModelSpec:
    """Numbers under Hugging Face names -> `ModelSpec`. Raises `CatalogueError` naming the key that is missing."""
    try:
        heads, hidden = c["num_attention_heads"], c["hidden_size"]
        experts = c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts") or 0
        mla = bool(c.get("kv_lora_rank"))
        head_dim = c["qk_nope_head_dim"] + c["qk_rope_head_dim"] if mla else c.get("head_dim") or hidden // heads
        return ModelSpec(
            name=name,
            layers=c["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate=c.get("intermediate_size") or c["moe_intermediate_size"],
            vocab=c["vocab_size"],
            tied=bool(c.get("tie_word_embeddings", False)),
            experts=experts,
            topk=c["num_experts_per_tok"] if experts else 0,
            moe_intermediate=(c.get("moe_intermediate_size") or c["intermediate_size"]) if experts else 0,
            shared_experts=(c.get("n_shared_experts") or 0) if experts else 0,
            dense_layers=(c.get("first_k_dense_replace") or 0) if experts else 0,
            attention_bias=bool(c.get("attention_bias", False)),
            qk_norm=bool(c.get("qk_norm", False)),
            q_lora_rank=(c.get("q_lora_rank") or 0) if mla else 0,
            kv_lora_rank=c["kv_lora_rank"] if mla else 0,
            rope_head_dim=c["qk_rope_head_dim"] if mla else 0,
            v_head_dim=c["v_head_dim"] if mla else 0,
        )
    except KeyError as e:
        raise CatalogueError(f"the config of model {name!r} lacks {e.args[0]!r}") from None


def _nearest(name: str, known: list[str]) -> str:
    lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.0)
    return lower[close[0]] if close else ""
