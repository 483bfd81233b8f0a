"""The machines: how many GPUs of which kind, the links between them, shared storage, and what an hour costs.

Rates are bytes per second and GPU unless a name says otherwise. `null` means "the catalogue's value for this GPU".
"""

from __future__ import annotations

from typing import Literal

from testbed.scenario.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section

GpuName = Literal["A100", "H100", "H200", "B200", "H20", "CPU"]


class Links(Section):
    """Usable bandwidth of one direction, in GB/s (1e9 bytes per second)."""

    nvlink_gb_per_s: PositiveFloat | None = None
    """Per GPU, inside a node."""
    ib_gb_per_s: PositiveFloat | None = None
    """Per GPU, between nodes."""
    pcie_gb_per_s: PositiveFloat | None = None
    """Per GPU, to host memory."""
    latency_us: NonNegativeFloat = 10.0
    """Start-up cost of one message."""


class Storage(Section):
    """Shared storage that disk paths of a weight update go through. All readers share `read_gb_per_s`."""

    write_gb_per_s: PositiveFloat = 2.0
    read_gb_per_s: PositiveFloat = 8.0
    latency_ms: NonNegativeFloat = 5.0


class Cluster(Section):
    """GPUs, links, storage and price."""

    gpu: GpuName = "H100"
    nodes: PositiveInt
    gpus_per_node: PositiveInt = 8
    links: Links = Links()
    storage: Storage = Storage()
    host_memory_gb_per_node: PositiveFloat = 2048.0
    price_usd_per_gpu_hour: NonNegativeFloat = 2.60

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node
