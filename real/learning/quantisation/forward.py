"""The training forward on the values that engines hold, and gradients to the weights as if nothing had been rounded.

An engine quantises its own parameters: q, k and v in one matrix, gate and up in one, experts stacked, and of each only
the shard of its tensor-parallel rank. Blocks of several rows, and NVFP4's outer scale, therefore cross from q to k, and
column shards cut groups. So the rule is not applied to the trainer's tensors: the engine's are built from them by
`real.weights.partition.layout` (the table that weight transfer and checksums use), the same function runs on those, and
the pieces are read back. Both sides then agree bit for bit for any TP size; with aligned shapes and row-wise rules the
result is that of the parts alone.

The estimator is straight-through (Y. Bengio et al., arXiv 1308.3432): d loss / d weight := d loss / d quantised.
Gradients of activations use the quantised weights. Refuses to know losses and how weights travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from real.errors import RealError
from real.learning.quantisation.rules import QUANTIZED, rule_named
from real.weights.partition import Config, Piece, Shape, checkpoint_tensors, layout
from real.weights.raw import part

Fused = tuple[Shape, tuple[Piece, ...]]
"""One parameter of one engine rank: its shape and what fills it."""


class AsServed:
    """A rule as the engines of `tp_size` ranks apply it to a model, or to some whole layers of it.

    `shapes`: the trainer's parameters (transformers' names, experts stacked or apart). Raises `RealError` for a rule
    or tensor that is unknown, sizes that `tp_size` does not divide, and KV heads that several ranks hold but would
    round differently."""

    def __init__(self, rule: str, config: Config, shapes: Mapping[str, Iterable[int]], tp_size: int = 1) -> None:
        self._rule = rule_named(rule)
        self._config = config
        empty = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
        named = {name: tuple(t.shape) for name, t in checkpoint_tensors(empty, config).items()}
        self._fused = [f for rank in range(tp_size) for f in _projections(config, named, tp_size, rank)]
        sources = {piece.source for _, pieces in self._fused for piece in pieces}
        self.names = tuple(n for n, t in empty.items() if checkpoint_tensors({n: t}, config).keys() & sources)
        """Of the parameters among `shapes` that are quantised."""
        taken = [(piece.source, piece.take) for _, pieces in self._fused for piece in pieces]
        if len(set(taken)) < len(taken) and not self._rule.by_row:
            raise RealError(
                f"quantisation: with tp_size {tp_size} several engine ranks hold one KV head, which {rule} rounds "
                "together with each rank's own queries: there is no one value to train on; use a tp_size of at most "
                f"{config.get('num_key_value_heads')}, or a rule by rows"
            )

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors under `names`: those of `tensors` as the engines hold them after requantisation."""
        quantised = {name: torch.empty_like(tensors[name]) for name in self.names}
        sources = checkpoint_tensors({name: tensors[name] for name in self.names}, self._config)
        targets = checkpoint_tensors(quantised, self._config)  # views
        for shape, pieces in self._fused:
            fused = sources[pieces[0].source].new_empty(shape)
            for piece in pieces:
                part(fused, piece.put).copy_(part(sources[piece.source], piece.take))
            fused = self._rule.apply(fused)
            for piece in pieces:
                part(targets[piece.source], piece.take).copy_(part(fused, piece.put).reshape(piece.shape))
        return quantised


def _projections(config: Config, shapes: Mapping[str, Shape], tp_size: int, rank: int) -> Iterable[Fused]:
    plan = layout(config, shapes, tp_size, rank)
    for target, shape in plan.shapes.items():
        pieces = tuple(piece for piece in plan.pieces if piece.target == target)
        if target.endswith(QUANTIZED):
            if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
                raise RealError(f"quantisation: {target} {list(shape)} is not whole; a rule needs all of its parts")
            yield shape, pieces


class StraightThrough(torch.autograd.Function):
    """Forward: `quantised`, bit for bit (w + (q - w) is not). Backward: its gradient, to `weight`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, quantised: Tensor) -> Tensor:
        return quantised.view_as(quantised)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def quantise_forward(model: PreTrainedModel, rule: str, tp_size: int = 1) -> Callable[[], None]:
    """Every forward pass of `model` from now on uses its projection weights as engines of `tp_size` ranks hold them;
    the parameters themselves, their names and the optimizer stay as they are. Call what is returned to undo it.

    Works before and after FSDP2 shards the model decoder layer by decoder layer: the rule sees the gathered weights in
    the type of the pass, which must be the engines'. A forward pass with gradients keeps a quantised copy of each
    layer until its backward pass. Raises `RealError` as `AsServed`, and if layers are sharded more finely."""
    config = model.config.get_text_config().to_dict()
    kinds = set(model._no_split_modules or ())
    undo: list[Callable[[], None]] = []
    # FSDP2 gives a module a class of its own, below the one it had.
    layers = [(n, m) for n, m in model.named_modules() if kinds & {base.__name__ for base in type(m).__mro__}]
    plans = [
        AsServed(rule, config, {f"{name}.{n}": p.shape for n, p in layer.named_parameters()}, tp_size)
        for name, layer in layers
    ]
    for (name, layer), served in zip(layers, plans, strict=True):
        undo += _swap_in(layer, name, served)
    if not undo:
        raise RealError(f"quantisation: {type(model).__name__} has no decoder layers to quantise")

    def remove() -> None:
        for step in undo:
            step()

    return remove


def _swap_in(layer: nn.Module, prefix: str, served: AsServed) -> list[Callable[[], None]]:
    """While `layer` runs, an entry in its modules' instance dictionaries hides each quantised parameter."""
    places: dict[str, tuple[nn.Module, str]] = {}
    for name in served.names:
        owner, _, attribute = name.removeprefix(f"{prefix}.").rpartition(".")
        places[name] = layer.get_submodule(owner), attribute

    def before(*_: Any) -> None:
        weights = {name: getattr(owner, attribute) for name, (owner, attribute) in places.items()}
        if any(isinstance(weight, DTensor) for weight in weights.values()):
            raise RealError(f"quantisation: {prefix} runs on sharded weights; shard whole decoder layers (FSDP2)")
        for name, quantised in served(weights).items():
            owner, attribute = places[name]
            owner.__dict__[attribute] = StraightThrough.apply(weights[name], quantised)

    def after(*_: Any) -> None:
        for owner, attribute in places.values():
            owner.__dict__.pop(attribute, None)

    hooks = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after, always_call=True)]
    return [hook.remove for hook in hooks]
