"""Moving a trainer's memory to the host and back, so that an engine can use the device meanwhile. Knows storages
only."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from real.trainer.stats import Moved


class HostCopies:
    """Host copies of device storages whose memory has been given back; the tensors over them stay valid objects and
    are filled again, bit for bit, by `onload`.

    On a CPU device the host is the same memory: bytes and seconds are those of a real copy, storages are really
    freed, and the process is no smaller for it."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Copy to the host and free the storages of all `tensors` that are on `device`."""
        start = time.perf_counter()
        self._device = device
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        seen: set[int] = set()
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if local.device.type != device.type or storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._copies.append((storage, host.copy_(self._bytes(storage))))
        for storage, _ in self._copies:
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.moved = Moved(self.bytes, time.perf_counter() - start)

    @property
    def bytes(self) -> int:
        return sum(host.nbytes for _, host in self._copies)

    def onload(self) -> Moved:
        start = time.perf_counter()
        for storage, host in self._copies:
            storage.resize_(host.nbytes)
            self._bytes(storage).copy_(host)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Moved(self.bytes, time.perf_counter() - start)

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
