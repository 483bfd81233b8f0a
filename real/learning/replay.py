"""Rollout routing replay (R3, arXiv 2510.11370): in training, a position runs the experts that ran it in generation.

Only the choice of experts is replayed. Their weights are the trainer's, now, and so are the gates:

    g_i = exp(s_i) / sum_{j recorded} exp(s_j)      s: the training router's logits, i recorded

so that gradients reach router and experts. Positions without a record (-1) are routed by the model itself.

Responsible for gates, the size of a record and hooking a transformers model's routers. It refuses to know records'
packing, losses and sharding: a hook on a router's output works inside FSDP2's layers as anywhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from real.errors import RealError

ROUTERS = ("Qwen3MoeTopKRouter",)
"""Classes of transformers whose forward gives (logits [P, E], gates [P, k], experts [P, k]) in this module's sense."""
NO_RECORD = -1


def routing_bytes(tokens: int, layers: int, top_k: int) -> int:
    """Bytes of the routing record of a sequence: (tokens - 1) positions of int32; the last token was never an input.
    32,768 tokens, 60 layers, top 8: 62,912,640."""
    return (tokens - 1) * layers * top_k * 4


def replayed_gates(logits: Tensor, experts: Tensor, *, norm_topk_prob: bool) -> Tensor:
    """Gates [P, k] float32 of `experts` [P, k] under the router's current `logits` [P, E], with gradient.

    A model that normalises its gates over the chosen experts (`norm_topk_prob`) gets the softmax over their logits; one
    that does not keeps their share of the softmax over all experts."""
    logits = logits.float()
    if norm_topk_prob:
        return torch.softmax(logits.gather(-1, experts), dim=-1)
    return torch.softmax(logits, dim=-1).gather(-1, experts)


class RoutingReplay:
    """The routers of one model. Between `playing`s the model routes by itself."""

    def __init__(self, model: nn.Module) -> None:
        """Raises `RealError` if the model has no experts, or routers that this module does not know."""
        routers = {_layer(n): m for n, m in model.named_modules() if type(m).__name__ in ROUTERS}
        if not routers:
            raise RealError(
                f"routing replay: {type(model).__name__} has no router that can be replayed ({', '.join(ROUTERS)}); "
                "leave use_rollout_routing_replay off for dense models"
            )
        self.layers = tuple(sorted(routers))
        """Indices of the decoder layers that have experts; others in a record are ignored."""
        first: Any = routers[self.layers[0]]
        self.top_k, self.num_experts = int(first.top_k), int(first.num_experts)
        self._experts: Tensor | None = None
        self._hooks = [r.register_forward_hook(self._hook(layer)) for layer, r in routers.items()]

    def check(self, experts: NDArray[np.int32], who: str) -> None:
        """Raise `RealError` unless `experts` [positions, layers, top_k] can be a record of this model."""
        _, layers, top_k = experts.shape
        if top_k != self.top_k or layers <= self.layers[-1]:
            raise RealError(
                f"{who}: routed experts of {layers} layers and top {top_k}; the trainer's model has experts in layer "
                f"{self.layers[-1]} and top {self.top_k}: another model generated it"
            )
        here = np.sort(experts[:, self.layers, :], axis=-1)
        known = here[(here >= 0).all(-1)]
        if known.size and (known.max() >= self.num_experts or (np.diff(known, axis=-1) == 0).any()):
            raise RealError(f"{who}: routed experts must be {self.top_k} different ones of {self.num_experts}")

    def without_record(self, experts: NDArray[np.int32]) -> int:
        """Positions of `experts` [positions, layers, top_k] that the model routes by itself in at least one layer."""
        return int((experts[:, self.layers, :] < 0).any(axis=(1, 2)).sum())

    @contextmanager
    def playing(self, experts: Tensor) -> Iterator[None]:
        """Forward passes inside run `experts` [positions, layers, top_k], int64, for the positions of their one row."""
        self._experts = experts
        try:
            yield
        finally:
            self._experts = None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Any:
        def replace(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
            if self._experts is None:
                return None
            logits, own_gates, own_experts = output
            recorded = self._experts[:, layer]
            known = (recorded >= 0).all(-1, keepdim=True)
            experts = torch.where(known, recorded, own_experts)
            gates = replayed_gates(logits, experts, norm_topk_prob=router.norm_topk_prob)
            return logits, torch.where(known, gates.to(own_gates.dtype), own_gates), experts

        return replace


def _layer(name: str) -> int:
    """`model.layers.3.mlp.gate` -> 3."""
    found = re.search(r"layers\.(\d+)\.", name)
    assert found is not None, name
    return int(found[1])
