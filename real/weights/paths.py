"""The five ways weights take from the trainer to engines, behind one interface: prepare, then copy to paused engines.

Requantisation, agreement and commit are the same for all and live in `agree`. Refuses to know which path is chosen
when, and what happens to requests meanwhile: the core does.

Common to all methods: `UpdateFailed` with stage `prepare` or `copy` for whatever goes wrong or takes longer than
`timeout_s`, `EngineGone` if an engine died. A failed or cancelled copy leaves engines with torn weights under the old
version's name; `Agreement.restore` mends them. No copy flushes a cache or names a version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from real.errors import RealError
from real.weights.handle import EngineHandle, Prepared

if TYPE_CHECKING:
    from real.trainer.trainer import Trainer

Copied = Callable[[EngineHandle], None]


class WeightPath(Protocol):
    releases_trainer_after_prepare: bool
    """Whether copies need nothing of the trainer."""

    async def prepare(self, version: int, engines: Sequence[EngineHandle]) -> Prepared:
        """Take the trainer's weights as `version` for these participants, while engines may still generate."""

    async def copy(self, version: int, engines: Sequence[EngineHandle], copied: Copied) -> None:
        """Copy to engines that are paused or idle: one, several, or the wave of a collective path. `copied` is called
        as each has its weights. Copies to different engines may run at once."""

    async def forget(self, version: int) -> None:
        """Drop a version that will be neither copied nor restored again: superseded, or failed."""

    async def close(self) -> None:
        """Give up what the path holds on to (groups, servers)."""


def weight_path(
    name: str,
    trainer: Trainer,
    *,
    folder: Path,
    timeout_s: float,
    bucket_bytes: int,
    device: str,
    delta_encoding: Literal["xor", "overwrite"] = "xor",
) -> WeightPath:
    """The path called `name`. `folder`: on storage that trainer and engines share. Raises RealError for other names."""
    from real.weights.broadcast import Broadcast
    from real.weights.cuda_ipc import CudaIpc
    from real.weights.disk import Disk, DiskDelta
    from real.weights.p2p import PointToPoint

    match name:
        case "cuda_ipc":
            return CudaIpc(trainer, folder, timeout_s, bucket_bytes)
        case "broadcast":
            return Broadcast(trainer, folder, timeout_s, bucket_bytes, "nccl" if device == "cuda" else "gloo")
        case "p2p":
            return PointToPoint(trainer, folder, timeout_s)
        case "disk":
            return Disk(trainer, folder, timeout_s)
        case "disk_delta":
            return DiskDelta(trainer, folder, timeout_s, delta_encoding)
    raise RealError(f"no weight path {name!r}; there are cuda_ipc, broadcast, p2p, disk and disk_delta")
