"""Transformers models as FSDP2 shards, and their weights back in Hugging Face's names. Knows no loss, no optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from real.errors import RealError


def load_sharded(
    folder: str | Path, mesh: DeviceMesh, dtype: torch.dtype, attn_implementation: str, *, trainable: bool
) -> PreTrainedModel:
    """The causal model in `folder` with float32 master weights, sharded over `mesh` layer by layer; its passes compute
    in `dtype` and gradients are summed in float32. Collective. Raises `RealError` if transformers cannot load it.

    It stays in eval mode also in training: a dropped-out forward pass would not be the policy that generated."""
    model, _ = _load(AutoModelForCausalLM, folder, attn_implementation)
    model.eval().requires_grad_(trainable)
    return _sharded(model, mesh, dtype)


def load_value_model(
    folder: str | Path, mesh: DeviceMesh, dtype: torch.dtype, attn_implementation: str, *, trainable: bool
) -> PreTrainedModel:
    """The model in `folder` with one number per position instead of next-token logits, sharded likewise. If it is to be
    trained, a head that the folder lacks says 0 everywhere (drawn numbers would be noise, and other ones on every
    rank); raises `RealError` if it is not: such a model says nothing."""
    model, missing = _load(AutoModelForTokenClassification, folder, attn_implementation, num_labels=1)
    if "score.weight" in missing:
        if not trainable:
            raise RealError(
                f"trainer: {folder} has no value head, so it is no reward model "
                "(nearest: real.models.reward_model.train_reward_model makes one of it)"
            )
        torch.nn.init.zeros_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
    # FSDP2 warns of outputs that are views of others, which a linear layer's on a batch of rows are.
    model.score.register_forward_hook(lambda _module, _inputs, values: values.clone())
    model.eval().requires_grad_(trainable)
    return _sharded(model, mesh, dtype)


def _load(kind: Any, folder: str | Path, attn_implementation: str, **settings: Any) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of parameters that the folder does not have."""
    try:
        model, info = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=attn_implementation,
            local_files_only=True,
            output_loading_info=True,
            **settings,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise RealError(f"trainer: transformers cannot load {folder}: {error}") from error
    return model, set(info["missing_keys"])


def _sharded(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> PreTrainedModel:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    # The root too gives up its gathered weights after each forward: one without a backward (scoring) would else leave
    # them in place, to be stale after the next update.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def gather(value: Tensor) -> Tensor:
    """The whole of a sharded tensor (collective); of a world of one, the tensor's own memory."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def full_state(model: PreTrainedModel, dtype: torch.dtype, *, keep: bool) -> dict[str, Tensor] | None:
    """A copy of all weights under the checkpoint names that transformers and SGLang read (experts apart, tied weights
    once), on the CPU, contiguous, in `dtype`. Collective; None unless `keep`."""
    whole: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = gather(parameter.detach())
        if keep:
            whole[name] = value.cpu()
    if not keep:
        return None
    named = revert_weight_conversion(model, whole)
    return {name: torch.empty(value.shape, dtype=dtype).copy_(value) for name, value in named.items()}
