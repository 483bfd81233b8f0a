"""KV on its way between engines: what leaves an engine passes its network adapters one piece after another.

Within a node it goes over NVLink. Links are those of the GPUs of the sending engine, in its direction out; weights come
in by the other. It refuses to know what the KV is for.
"""

from __future__ import annotations

from sim.fabric import Link, link_bytes_per_s
from testbed.scenario.catalogue import GpuSpec
from testbed.scenario.layout import Layout
from testbed.scenario.scenario import Scenario


class KvTransfers:
    """`bytes_per_token`: KV of one token, summed over an engine's GPUs."""

    def __init__(self, scenario: Scenario, layout: Layout, gpu: GpuSpec, bytes_per_token: float) -> None:
        cluster = scenario.cluster
        latency = cluster.links.latency_us * 1e-6
        self._bytes_per_token = bytes_per_token
        self._nodes = [e.node for e in layout.engines]
        self.links = {
            kind: [
                Link(f"engine {e.index} KV out, {kind}", link_bytes_per_s(cluster, gpu, kind) * e.gpus, latency)
                for e in layout.engines
            ]
            for kind in ("nvlink", "ib")
        }
        self.tokens = 0
        """Sent so far."""

    def send(self, now: float, source: int, to: int, tokens: int) -> float:
        """When this many tokens of KV that engine `source` sends from now on have arrived at engine `to`."""
        kind = "nvlink" if self._nodes[source] == self._nodes[to] else "ib"
        self.tokens += tokens
        return self.links[kind][source].reserve(now, tokens * self._bytes_per_token)[1]
