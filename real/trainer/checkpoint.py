"""Checkpoint folders: weights in Hugging Face's layout, so that transformers and SGLang load one as a model, and beside
them what a bit-identical continuation needs. Independent of the number of ranks. Knows no loss.

    config.json, tokenizer files, model.safetensors     the actor's weights, float32
    trainer/optimizer.safetensors                       `<parameter>|<exp_avg, ...>`, whole tensors
    critic/                                             the same two of the critic, where there is one
    trainer/rng-<rank>.safetensors                            torch generators of each rank
    trainer.json                                        updates done, and the driver's position in its data
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from real.errors import RealError
from real.trainer.model import full_state, gather

STATE = "trainer.json"
OWN = "trainer"
"""Folder inside for what is not the model: SGLang takes every safetensors file beside config.json for weights."""
CRITIC = "critic"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def begin(folder: Path) -> Path:
    """An empty folder beside `folder` to write into. Raises `RealError` if `folder` exists: none is overwritten."""
    if folder.exists():
        raise RealError(f"trainer: checkpoint {folder} exists already; give it another name or remove it")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # what a run that died left
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, folder: Path) -> None:
    """Make it durable, then give it its name: a checkpoint is there as a whole or not at all."""
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    temporary.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_weights(model: PreTrainedModel, model_path: Path, folder: Path, dtype: str, *, writer: bool) -> None:
    """Collective; rank 0 is the `writer`. `dtype` goes into config.json: what a reader casts to."""
    state = full_state(model, torch.float32, keep=writer)
    if state is None:
        return
    folder.mkdir(exist_ok=True)
    for path in model_path.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_FILES) and path.name != STATE:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((model_path / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _named_state(model: PreTrainedModel, optimizer: Optimizer) -> Iterable[tuple[str, str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield name, key, value


def write_optimizer(model: PreTrainedModel, optimizer: Optimizer, folder: Path, *, writer: bool) -> None:
    """Collective."""
    whole: dict[str, Tensor] = {}
    for name, key, value in _named_state(model, optimizer):
        full = gather(value)
        if writer:
            whole[f"{name}|{key}"] = full.detach().cpu().clone()
    if writer:
        save_file(whole, _own(folder) / "optimizer.safetensors")


def read_optimizer(model: PreTrainedModel, optimizer: Optimizer, folder: Path) -> None:
    """Each rank takes its shards."""
    whole = load_file(folder / OWN / "optimizer.safetensors")
    parameters = dict(model.named_parameters())
    for entry, value in whole.items():
        name, key = entry.split("|")
        parameter = parameters[name]
        if value.shape == parameter.shape and isinstance(parameter, DTensor):
            value = distribute_tensor(
                value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        optimizer.state[parameter][key] = value


def write_rng(folder: Path, rank: int, device: torch.device) -> None:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    save_file(state, _own(folder) / f"rng-{rank}.safetensors")


def _own(folder: Path) -> Path:
    place = folder / OWN
    place.mkdir(exist_ok=True)
    return place


def read_rng(folder: Path, rank: int, device: torch.device) -> None:
    """A rank that the run which saved did not have keeps its own."""
    path = folder / OWN / f"rng-{rank}.safetensors"
    if path.exists():
        state = load_file(path)
        torch.set_rng_state(state["cpu"])
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=2))


def read_state(folder: Path) -> dict[str, Any]:
    """Raises `RealError` if `folder` is no checkpoint."""
    if not (folder / STATE).is_file():
        raise RealError(f"trainer: {folder} is no checkpoint (it has no {STATE})")
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    return state
