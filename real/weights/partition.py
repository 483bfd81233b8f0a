"""The engine's layout: which part of which checkpoint tensor lies where in the parameters of one engine rank.

Responsible for SGLang's fused projections (`qkv_proj`, `gate_up_proj`, experts `w13`/`w2`), its tensor-parallel shards
(heads, rows, columns), replicated KV heads, padded vocabulary and tied head, for Llama, Qwen2, Qwen3 and Qwen3-MoE
without weight quantisation. Arithmetic on names and shapes; it refuses to know how parts travel. The trainer derives
checksums from it and an engine rank the parts to ask for, so both read one table.

On a CPU with tp_size > 1, SGLang pads head counts that tp_size does not divide and intermediate sizes that 32 x tp_size
does not divide. Those layouts are not here: such an engine fails the agreement check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from real.errors import RealError
from real.weights.raw import Box, part

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
VOCAB_PADDING = 64
"""SGLang pads vocabularies to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE`)."""

Shape = tuple[int, ...]
Config = Mapping[str, Any]
"""A checkpoint's `config.json`."""


@dataclass(frozen=True)
class Piece:
    """`take` of checkpoint tensor `source` is `put` of engine parameter `target`; the boxes have equal sizes, `put`
    has one more leading dimension of 1 where the engine stacks experts."""

    source: str
    take: Box
    target: str
    put: Box

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.take)


@dataclass(frozen=True)
class Layout:
    """Parameters of one engine rank and the pieces that fill them; what no piece fills (vocabulary padding) is 0."""

    shapes: Mapping[str, Shape]
    pieces: tuple[Piece, ...]


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder. Raises RealError for a folder without one or an unsupported model."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise RealError(f"{folder} is no model folder: {error}") from None
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise RealError(
            f"weights of {architecture} ({folder}) cannot be laid out for an engine; known: {', '.join(ARCHITECTURES)}"
        )
    if experts_of(config) and config.get("tie_word_embeddings"):
        raise RealError(f"{folder}: SGLang's Qwen3-MoE keeps its own head; set tie_word_embeddings to false")
    return config  # type: ignore[no-any-return]


def experts_of(config: Config) -> int:
    """Experts of a layer, 0 in a dense model; the name changed between releases of transformers."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def checkpoint_tensors(state: Mapping[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """`state` under the names of a checkpoint file: stacked experts (transformers keeps `gate_up_proj` [E, 2I, H] and
    `down_proj` [E, H, I]) are split per expert, a tied head is dropped. Tensors are views where possible."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        prefix, stacked, kind = name.partition(".mlp.experts.")
        if stacked and kind in ("gate_up_proj", "down_proj"):
            for expert, weight in enumerate(tensor):
                halves = weight.chunk(2) if kind == "gate_up_proj" else (weight,)
                kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                for half, value in zip(kinds, halves, strict=True):
                    named[f"{prefix}.mlp.experts.{expert}.{half}.weight"] = value
        elif not (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            named[name] = tensor
    return named


_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_QKV = re.compile(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)")
_GATE_UP = re.compile(r"(.*\.mlp)\.(gate|up)_proj\.(weight|bias)")
_BY_COLUMN = re.compile(r".*\.(self_attn\.o_proj|mlp\.down_proj)\.weight")
_VOCABULARY = re.compile(r"(model\.embed_tokens|lm_head)\.weight")
_REPLICATED = re.compile(r".*(norm\.weight|\.mlp\.gate\.weight|\.(o_proj|down_proj)\.bias)")


def layout(config: Config, shapes: Mapping[str, Sequence[int]], tp_size: int, tp_rank: int) -> Layout:
    """Parameters of rank `tp_rank` of an engine of `tp_size` ranks, from the checkpoint's tensor shapes.

    Raises RealError for a tensor without a rule and for sizes that do not divide."""
    targets: dict[str, Shape] = {}
    pieces: list[Piece] = []
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads

    def even(count: int, what: str) -> tuple[int, int]:
        if count % tp_size:
            raise RealError(f"{count} {what} cannot be split over tp_size {tp_size}")
        share = count // tp_size
        return tp_rank * share, (tp_rank + 1) * share

    def whole(shape: Iterable[int]) -> Box:
        return tuple((0, n) for n in shape)

    q = even(heads, "attention heads")
    if kv_heads >= tp_size:
        kv = even(kv_heads, "KV heads")
    elif tp_size % kv_heads == 0:  # replicated: several ranks hold the same head
        kv = (tp_rank * kv_heads // tp_size, tp_rank * kv_heads // tp_size + 1)
    else:
        raise RealError(f"{kv_heads} KV heads cannot be replicated over tp_size {tp_size}")
    q_rows, kv_rows = (q[1] - q[0]) * width, (kv[1] - kv[0]) * width
    at = {"q": (0, q_rows), "k": (q_rows, q_rows + kv_rows), "v": (q_rows + kv_rows, q_rows + 2 * kv_rows)}

    for name, dims in shapes.items():
        shape = tuple(dims)
        rest = whole(shape[1:])
        full: Shape
        take: Box
        put: Box
        if match := _EXPERT.fullmatch(name):
            stem, expert, kind = match[1], int(match[2]), match[3]
            place = (expert, expert + 1)
            if kind == "down":
                a, b = even(shape[1], f"columns of {name}")
                target, full = f"{stem}.w2_weight", (experts_of(config), shape[0], b - a)
                take, put = ((0, shape[0]), (a, b)), (place, (0, shape[0]), (0, b - a))
            else:
                a, b = even(shape[0], f"rows of {name}")
                offset = 0 if kind == "gate" else b - a
                target, full = f"{stem}.w13_weight", (experts_of(config), 2 * (b - a), shape[1])
                take, put = ((a, b), *rest), (place, (offset, offset + b - a), *rest)
        elif match := _QKV.fullmatch(name):
            a, b = q if match[2] == "q" else kv
            target, full = f"{match[1]}.qkv_proj.{match[3]}", (q_rows + 2 * kv_rows, *shape[1:])
            take, put = ((a * width, b * width), *rest), (at[match[2]], *rest)
        elif match := _GATE_UP.fullmatch(name):
            a, b = even(shape[0], f"rows of {name}")
            offset = 0 if match[2] == "gate" else b - a
            target, full = f"{match[1]}.gate_up_proj.{match[3]}", (2 * (b - a), *shape[1:])
            take, put = ((a, b), *rest), ((offset, offset + b - a), *rest)
        elif _BY_COLUMN.fullmatch(name):
            a, b = even(shape[1], f"columns of {name}")
            target, full = name, (shape[0], b - a)
            take, put = ((0, shape[0]), (a, b)), whole(full)
        elif _VOCABULARY.fullmatch(name):
            padding = VOCAB_PADDING if _up(shape[0], VOCAB_PADDING) % tp_size == 0 else VOCAB_PADDING * tp_size
            share = _up(shape[0], padding) // tp_size
            a, b = (min(r * share, shape[0]) for r in (tp_rank, tp_rank + 1))
            target, full = name, (share, *shape[1:])
            take, put = ((a, b), *rest), ((0, b - a), *rest)
        elif _REPLICATED.fullmatch(name):
            target, full, take, put = name, shape, whole(shape), whole(shape)
        else:
            raise RealError(f"no rule lays out checkpoint tensor {name} {list(shape)} for an engine")
        targets[target] = full
        if all(start < stop for start, stop in take):
            pieces.append(Piece(name, take, target, put))
    return Layout(targets, tuple(pieces))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def engine_tensors(plan: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of one engine rank, built from the whole checkpoint."""
    dtype = next(iter(tensors.values())).dtype
    built = {name: torch.zeros(shape, dtype=dtype) for name, shape in plan.shapes.items()}
    for piece in plan.pieces:
        part(built[piece.target], piece.put).copy_(part(tensors[piece.source], piece.take))
    return built
