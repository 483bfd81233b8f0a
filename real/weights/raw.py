"""Tensors as bytes: the view every path sends, XORs and checksums. Knows no path, no engine and no trainer."""

from __future__ import annotations

import base64
import pickle

import torch
import xxhash

Box = tuple[tuple[int, int], ...]
"""[start, stop) in each dimension of a tensor."""


def raw(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in memory order; shares memory with a contiguous tensor on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def checksum(data: torch.Tensor | memoryview | bytes) -> str:
    """xxh3-128 of the bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(raw(data) if isinstance(data, torch.Tensor) else data)


def size(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def by_value(message: object) -> str:
    """A message with tensors for SGLang's `update_weights_from_tensor`, all bytes in it: it can cross machines."""
    return base64.b64encode(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)).decode()


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of `tensor` inside `box`."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]
