"""Links and shared storage as first-come-first-served resources: who asks first is served first, one at a time.

A link has no clock: it is told the time and answers when a transfer starts and ends. It refuses to know what travels
and why.
"""

from __future__ import annotations

from testbed.scenario.catalogue import GpuSpec, gpu_spec
from testbed.scenario.cluster import Cluster
from testbed.scenario.layout import Layout
from testbed.scenario.scenario import Scenario

BUS_SHARE = 0.82
"""Measured: NCCL ring bus bandwidth 370 of 450 GB/s of NVLink on 8 H100 (NVIDIA nccl-tests issue 212)."""


class Link:
    """One direction of a link, FIFO. Requests must come in the order of their times (D/D/1 is then exact)."""

    def __init__(self, name: str, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"link {name}: bandwidth must be above 0")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_at = 0.0
        self.busy_s = 0.0
        self.waited_s = 0.0
        self.bytes = 0.0
        self.transfers = 0

    def seconds(self, size: float) -> float:
        """Duration of one transfer of `size` bytes on an idle link: latency + size / bandwidth."""
        return self.latency_s + size / self.bytes_per_s

    def reserve(self, now: float, size: float) -> tuple[float, float]:
        """(start, end) of a transfer of `size` bytes that is asked for at `now`, seconds."""
        return self.occupy(now, self.seconds(size), size)

    def occupy(self, now: float, seconds: float, size: float = 0.0) -> tuple[float, float]:
        """(start, end) of `seconds` of work on the link, for transfers whose duration is not size / bandwidth alone."""
        start = now if now > self.free_at else self.free_at
        end = start + seconds
        self.free_at = end
        self.busy_s += seconds
        self.waited_s += start - now
        self.bytes += size
        self.transfers += 1
        return start, end

    def utilisation(self, elapsed: float) -> float:
        """Busy seconds / `elapsed` seconds."""
        return self.busy_s / elapsed if elapsed > 0 else 0.0


class Fabric:
    """The links that weights travel over, for one layout. Engines and trainer GPUs are in `Layout`'s numbering.

    `source`: all network adapters of the trainer's GPUs, shared by all receivers. `engine_nics[e]`: those of engine e's
    GPUs. `collective`: the trainer's communicator; one collective at a time. `storage_write`, `storage_read`: shared by
    everyone.
    """

    def __init__(self, scenario: Scenario, layout: Layout, gpu: GpuSpec | None = None) -> None:
        cluster = scenario.cluster
        gpu = gpu or gpu_spec(cluster.gpu)
        self.nvlink_bytes_per_s = link_bytes_per_s(cluster, gpu, "nvlink")
        self.ib_bytes_per_s = link_bytes_per_s(cluster, gpu, "ib")
        self.pcie_bytes_per_s = link_bytes_per_s(cluster, gpu, "pcie")
        latency = cluster.links.latency_us * 1e-6
        storage_latency = cluster.storage.latency_ms * 1e-3
        self.latency_s = latency
        self.storage_write = Link("storage write", cluster.storage.write_gb_per_s * 1e9, storage_latency)
        self.storage_read = Link("storage read", cluster.storage.read_gb_per_s * 1e9, storage_latency)
        self.source = Link("trainer adapters", self.ib_bytes_per_s * layout.train_gpus, latency)
        self.collective = Link("collective", self.ib_bytes_per_s, latency)
        self.engine_nics = [
            Link(f"engine {e.index} adapters", self.ib_bytes_per_s * e.gpus, latency) for e in layout.engines
        ]

    def links(self) -> list[Link]:
        """All links, for utilisation reports."""
        return [self.storage_write, self.storage_read, self.source, self.collective, *self.engine_nics]


def link_bytes_per_s(cluster: Cluster, gpu: GpuSpec, kind: str) -> float:
    """Bandwidth per GPU of `nvlink`, `ib` or `pcie`: the cluster's own value, else the catalogue's. Bytes per
    second."""
    own = getattr(cluster.links, f"{kind}_gb_per_s")
    return float(own if own is not None else getattr(gpu, f"{kind}_gb_per_s")) * 1e9
