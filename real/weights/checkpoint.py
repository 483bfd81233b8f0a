"""Checkpoint folders: one safetensors file and its config, published whole or not at all.

A folder is written under a temporary name and renamed, so a name that exists is complete. Refuses to know versions,
engines and trainers."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from real.errors import RealError
from real.weights.partition import checkpoint_tensors, read_config

WEIGHTS = "model.safetensors"


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well and vanishes when it does not. A folder of
    that name is replaced."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """Publish `tensors` (one dtype, checkpoint names) as a folder an engine loads."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with published(folder) as temporary:
        (temporary / "config.json").write_text(json.dumps({**config, "dtype": dtype, "torch_dtype": dtype}, indent=1))
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary / WEIGHTS, metadata={"format": "pt"})
    return folder


def load_checkpoint(folder: str | Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a folder (one file or several) in `dtype`, under checkpoint names. Raises RealError if none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise RealError(f"{folder} holds no *.safetensors file")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            state.update((name, opened.get_tensor(name).to(dtype)) for name in opened.keys())  # noqa: SIM118
    return checkpoint_tensors(state, read_config(folder))


def byte_ranges(file: Path) -> dict[str, tuple[int, int]]:
    """[start, stop) of each tensor in a safetensors file. Raises RealError for a file that is cut short."""
    with file.open("rb") as opened:
        head = opened.read(8)
        (length,) = struct.unpack("<Q", head) if len(head) == 8 else (1 << 62,)
        actual = file.stat().st_size
        if 8 + length > actual:
            raise RealError(f"{file} is cut short in its header")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    ranges = {name: tuple(8 + length + offset for offset in entry["data_offsets"]) for name, entry in header.items()}
    end = max((stop for _, stop in ranges.values()), default=0)
    if end != actual:
        raise RealError(f"{file} has {actual} bytes instead of {end}: cut short or torn")
    return ranges


def check_whole(folder: Path) -> None:
    """Raise RealError unless every weights file has the length its header says. An engine that meets a torn file while
    loading dies, so one looks before asking it to."""
    for file in sorted(folder.glob("*.safetensors")) or [folder / WEIGHTS]:
        if not file.is_file():
            raise RealError(f"{folder} holds no weights")
        byte_ranges(file)
