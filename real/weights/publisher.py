"""A trainer rank's part in a publication: it holds snapshots of the weights and hands them out, by every path.

Lives in the rank's process; the driver calls it by method name and gets plain values back. A snapshot is a copy in host
memory under checkpoint names, in the dtype engines get; training goes on while it is sent. It stays until `forget`, so
that the version before can be restored. Refuses to know engines (only addresses and groups) and the order of steps.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from real.weights.checkpoint import load_checkpoint, save_checkpoint
from real.weights.delta import DeltaReport, Encoding, write_delta
from real.weights.handle import Checksums
from real.weights.node_copy import version_folder
from real.weights.partition import checkpoint_tensors, engine_tensors, layout, read_config
from real.weights.raw import by_value, checksum, size
from real.weights.wire import Address, PartServer, address_towards


class Rank(Protocol):
    """What is used of a trainer rank. `options` has `model_path`, `device` and `dtype`."""

    rank: int
    world: int
    options: Any

    def full_state(self, everywhere: bool = False) -> dict[str, torch.Tensor] | None: ...


@dataclass(frozen=True)
class Snapshot:
    """What was taken: elements of all tensors, and their bytes."""

    words: int
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


def split_buckets(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> list[Bucket]:
    """In order, as many tensors to a bucket as fit; one that is larger than a bucket has its own."""
    buckets: list[Bucket] = []
    used = bucket_bytes + 1
    for name, tensor in tensors.items():
        if used + size(tensor) > bucket_bytes:
            buckets.append(Bucket([], [], []))
            used = 0
        used += size(tensor)
        buckets[-1].names.append(name)
        buckets[-1].dtypes.append(str(tensor.dtype).removeprefix("torch."))
        buckets[-1].shapes.append(list(tensor.shape))
    return buckets


class Publisher:
    """`snapshot` is collective over ranks, everything else is one rank's own. Methods raise KeyError for a version that
    is not held."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._config = read_config(rank.options.model_path)
        self._held: dict[int, dict[str, torch.Tensor]] = {}
        self._server: PartServer | None = None
        self._shared: dict[int, torch.Tensor] = {}
        self._tickets = 0
        self._group: dist.ProcessGroup | None = None
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    # --- versions -----------------------------------------------------------------------------------------------------

    def snapshot(self, version: int, everywhere: bool) -> Snapshot:
        """Copy the weights as they are now, on rank 0 or on all ranks."""
        state = self._rank.full_state(everywhere)
        if state is None:
            return Snapshot(0, 0)
        tensors = {n: t.contiguous() for n, t in checkpoint_tensors(state, self._config).items()}
        self._held[version] = tensors
        return Snapshot(sum(t.numel() for t in tensors.values()), sum(map(size, tensors.values())))

    def held(self) -> list[int]:
        return sorted(self._held)

    def start_checkpoint(self) -> tuple[str, str]:
        """(folder of version 0, dtype of what engines get)."""
        return str(self._rank.options.model_path), str(self._rank.options.dtype)

    def forget(self, version: int, folder: str) -> None:
        """Drop a version: its snapshot and what was written of it below `folder`."""
        self._held.pop(version, None)
        if self._rank.rank == 0:
            for written in (version_folder(Path(folder), version), _delta_folder(folder, version)):
                shutil.rmtree(written, ignore_errors=True)

    def expected(self, version: int, tp_size: int) -> Checksums:
        """Checksums of an engine's parameters by TP rank, if this version is loaded without error."""
        tensors = self._tensors(version)
        shapes = {name: t.shape for name, t in tensors.items()}
        return [
            {
                name: checksum(built)
                for name, built in engine_tensors(layout(self._config, shapes, tp_size, rank), tensors).items()
            }
            for rank in range(tp_size)
        ]

    def _tensors(self, version: int) -> dict[str, torch.Tensor]:
        if version not in self._held and version == 0:
            model_path, dtype = self.start_checkpoint()
            return load_checkpoint(model_path, getattr(torch, dtype))
        if version not in self._held:
            raise KeyError(f"version {version} is not held by trainer rank {self._rank.rank}; held: {self.held()}")
        return self._held[version]

    # --- files --------------------------------------------------------------------------------------------------------

    def write(self, version: int, folder: str) -> str:
        """Publish the whole checkpoint below `folder`; returns its path."""
        return str(save_checkpoint(version_folder(Path(folder), version), self._tensors(version), self._config))

    def retained(self, version: int, folder: str) -> str:
        """A checkpoint of a version that was sent before, written now (version 0: the one that was started from)."""
        return str(self._rank.options.model_path) if version == 0 else self.write(version, folder)

    def write_delta(self, version: int, base: int, folder: str, encoding: Encoding) -> tuple[str, DeltaReport]:
        """Publish what changed since `base` below `folder`; returns its path and sizes."""
        path = _delta_folder(folder, version)
        before, after = self._tensors(base), self._tensors(version)
        report = write_delta(path, before, after, base_version=base, version=version, encoding=encoding)
        return str(path), report

    # --- same host: tensors handed over -------------------------------------------------------------------------------

    def buckets(self, version: int, bucket_bytes: int) -> list[Bucket]:
        return split_buckets(self._tensors(version), bucket_bytes)

    def share(self, version: int, names: list[str], copies: int) -> tuple[int, list[str]]:
        """One flat buffer of tensors, serialised `copies` times for SGLang: on GPUs a CUDA IPC handle, which is good
        until `unshare` of the returned ticket; on a CPU the bytes themselves (handles to host memory that strangers
        can open go through a daemon of torch's, and an engine that it keeps waiting for a second dies)."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        device, tensors = self._rank.options.device, self._tensors(version)
        bucket = FlattenedTensorBucket([(name, tensors[name].to(device)) for name in names])
        flat = bucket.get_flattened_tensor()
        message = {"flattened_tensor": flat, "metadata": bucket.get_metadata()}
        self._tickets += 1
        if device == "cpu":
            return self._tickets, [by_value(message)] * copies
        self._shared[self._tickets] = flat
        return self._tickets, [MultiprocessingSerializer.serialize(message, output_str=True) for _ in range(copies)]

    def unshare(self, ticket: int) -> None:
        self._shared.pop(ticket, None)

    # --- one group with all engines -----------------------------------------------------------------------------------

    def join(self, name: str, address: Address, world: int, timeout_s: float) -> None:
        """Wait for all engine ranks in a new group, as its rank 0. `address`: of the store where all meet. Raises on a
        timeout, and at once when that store closes. The group before is left."""
        from sglang.srt.utils import init_custom_process_group

        self.leave(broken=False)
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(*address, world_size=world, is_master=False, timeout=timeout)
        self._group = init_custom_process_group(
            backend="nccl" if self._rank.options.device == "cuda" else "gloo",
            store=dist.PrefixStore(name, store),
            timeout=timeout,
            world_size=world,
            rank=0,
            group_name=name,
        )

    def start_broadcast(self, version: int, names: list[str]) -> None:
        """Begin to send; `finish_broadcast` waits. In between the driver can see whether anybody listens."""
        device, tensors = self._rank.options.device, self._tensors(version)
        for name in names:
            tensor = tensors[name].to(device)
            self._sending.append((dist.broadcast(tensor, src=0, group=self._group, async_op=True), tensor))

    def finish_broadcast(self, timeout_s: float) -> None:
        while self._sending:
            work, _ = self._sending.pop(0)
            work.wait(timedelta(seconds=timeout_s))

    def leave(self, broken: bool) -> None:
        """End the group. What is still being sent in a broken one is given up: NCCL aborts it; gloo waits until the
        peers have left too, at most for the group's timeout."""
        group, self._group, self._sending = self._group, None, []
        if group is not None:
            if broken:
                group.abort()
            dist.destroy_process_group(group)

    # --- point to point -----------------------------------------------------------------------------------------------

    def serve(self, engine_host: str, engine_port: int) -> Address:
        """Serve parts of held versions from background threads; the address for engines."""
        if self._server is None:
            self._server = PartServer(address_towards(engine_host, engine_port), lambda v, n: self._held[v][n])
        return self._server.address

    def shapes(self, version: int) -> dict[str, list[int]]:
        return {name: list(tensor.shape) for name, tensor in self._tensors(version).items()}

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def close(self) -> None:
        """Leave the group, stop serving and let go of all versions: as new, for another run."""
        if self._server is not None:
            self._server.close()
            self._server = None
        with contextlib.suppress(Exception):  # peers may be gone
            self.leave(broken=True)
        self._held.clear()
        self._shared.clear()


def _delta_folder(folder: str, version: int) -> Path:
    return Path(folder) / f"delta_v{version:06d}"
