"""What it costs to bring new weights to the engines, by each path, and to switch a shared pool between its phases.

A publication has four parts: prepare (gather and convert, or build a delta; engines may go on generating), transfer,
apply (into the served tensors) and requantise. Only model weights travel, never optimizer states. The terms follow from
sizes and links; what those do not explain are the coefficients of `sim.coefficients`, fitted to published measurements.
It refuses to know versions, barriers and requests: the core decides those.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil

from msgspec import Struct

from sim.coefficients import Coefficients, coefficients
from sim.fabric import BUS_SHARE, Fabric
from testbed.core.events import PathCost
from testbed.scenario.catalogue import GpuSpec, ModelSpec, trainer_state_bytes_per_gpu
from testbed.scenario.layout import Layout
from testbed.scenario.scenario import Scenario
from testbed.scenario.weights import Waves

COLLECTIVE_PATHS = frozenset({"broadcast"})
"""One transfer serves all engines of a wave."""

HBM_SHARE = 0.8
"""Share of peak memory bandwidth that copies reach; commonly 0.75 to 0.85."""


class Prepared(Struct, frozen=True):
    """Weights are ready to travel. Times on the caller's clock, seconds."""

    ready_t: float
    trainer_released_t: float | None
    """When the trainer may train again; null: not before the copies have ended (they read its memory)."""
    bytes: int
    """What one engine receives."""


class _Wave(Struct):
    """A collective transfer under way."""

    end: float
    served: set[int]


class WeightPaths:
    """Times of weight updates for one layout. Links queue, so calls must come in the order of their times."""

    kind = "analytic"
    """What the times rest on."""

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        model: ModelSpec,
        gpu: GpuSpec,
        fabric: Fabric | None = None,
        fitted: Coefficients | None = None,
    ) -> None:
        self._c = fitted or coefficients()
        self._s = scenario
        self._w = scenario.weights
        self._layout = layout
        self._model = model
        self._gpu = gpu
        self.fabric = fabric or Fabric(scenario, layout, gpu)
        self._hbm = HBM_SHARE * gpu.hbm_bytes_per_s
        self._nvlink = BUS_SHARE * self.fabric.nvlink_bytes_per_s
        per_node = scenario.cluster.gpus_per_node
        first = layout.num_gpus - layout.train_gpus  # the training pool is the last one
        self._train_nodes = range(first // per_node, (layout.num_gpus - 1) // per_node + 1)
        self._waves: dict[tuple[int, ...], _Wave] = {}

    # --- what travels -----------------------------------------------------------------------------------------------

    @cached_property
    def payload_bytes(self) -> float:
        """Bytes of one whole copy: parameters x bytes of the format that travels. 16 bits if the engine requantises."""
        served = self._s.rollout.engine.weight_precision
        return self._model.weight_bytes(served if self._w.requantize == "none" else "bf16")

    @property
    def trained_bytes(self) -> float:
        """Bytes of one whole copy as the trainer has it and converts it: parameters x 2, or x 4 in fp32."""
        return self._model.weight_bytes("fp32" if self._s.training.precision == "fp32" else "bf16")

    @property
    def delta_bytes(self) -> float:
        """Bytes of one delta: parameters x changed share x bytes per changed parameter, compressed."""
        return self._model.params * self._w.delta_density * self._w.delta_bytes_per_changed_param

    @property
    def converts(self) -> bool:
        """Whether the trainer's split or format differs from the engines', so that shards are gathered and cut anew."""
        t = self._s.training
        gpus = self._s.placement.rollout_num_gpus_per_engine
        experts_differ = self._model.is_moe and t.expert_parallel not in (1, gpus)
        split_differs = t.tensor_parallel != gpus or t.pipeline_parallel != 1 or experts_differ
        sharded = t.sharding == "zero3" and self._layout.train_gpus > t.tensor_parallel
        trained = "fp32" if t.precision == "fp32" else "bf16"
        travels = self._s.rollout.engine.weight_precision if self._w.requantize == "none" else "bf16"
        return split_differs or sharded or trained != travels

    def gather_seconds(self) -> float:
        """All-gather of the trainer's shards: bytes x (1 - 1 / shards) / min(NVLink, a node's adapters). 0 if nothing
        converts. Pipeline stages gather at the same time, each its own layers."""
        if not self.converts:
            return 0.0
        t = self._s.training
        shards, gathered = max(t.tensor_parallel, t.expert_parallel), self.payload_bytes / t.pipeline_parallel
        if t.sharding == "zero3":
            shards, gathered = self._layout.train_gpus, self.payload_bytes
        per_node = self._s.cluster.gpus_per_node
        rate = self._nvlink if shards <= per_node else min(self._nvlink, self.fabric.ib_bytes_per_s * per_node)
        return gathered * (1 - 1 / max(1, shards)) / rate

    def available(self, path: str) -> bool:
        """CUDA IPC needs engines on the trainer's own GPUs."""
        return path != "cuda_ipc" or all(e.pool == self._layout.train_pool for e in self._layout.engines)

    # --- the steps of an update, asked for by the driver --------------------------------------------------------------

    def prepare(self, now: float, path: str, participants: tuple[int, ...]) -> Prepared:
        """Gather, convert, and for the disk paths write (and, for a delta, pull to the engines' hosts)."""
        self._waves.clear()
        size = int(self.payload_bytes)
        if path == "disk":
            _, end = self.fabric.storage_write.reserve(now + self._snapshot_seconds(), self.payload_bytes)
            return Prepared(end, end, size)
        if path == "disk_delta":
            snapshot = now + self._snapshot_seconds()
            _, end = self.fabric.storage_write.reserve(snapshot + self._build_seconds(), self.delta_bytes)
            pulls = [self.fabric.storage_read.reserve(end, self.delta_bytes)[1] for _ in participants]
            return Prepared(max(pulls, default=end), snapshot, int(self.delta_bytes))
        return Prepared(now + self._convert_seconds(path), None, size)

    def copy(self, now: float, path: str, participants: tuple[int, ...], engine: int) -> float:
        """End of transfer and application on this engine. `participants`: the engines of its wave.

        A collective path serves the wave at once: the first call starts it, and all get the same end. Raises
        `ValueError` for CUDA IPC to an engine that is not on the trainer's GPUs.
        """
        if path in COLLECTIVE_PATHS:
            return self._collective(now, participants, engine)
        if path == "p2p":
            return self._p2p(now, engine) + self._apply_seconds(path, engine)
        if path == "disk":
            _, end = self.fabric.storage_read.reserve(now, self.payload_bytes)
            return end + self._apply_seconds(path, engine)
        if path == "cuda_ipc" and self._layout.engines[engine].pool != self._layout.train_pool:
            raise ValueError(f"cuda_ipc needs engine {engine} on the trainer's GPUs; use broadcast, p2p or a disk path")
        return now + self._apply_seconds(path, engine)

    def requantize(self, now: float, engine: int) -> float:
        """End of requantisation on this engine; `now` if the scenario asks for none."""
        return now + self._requantize_seconds(engine)

    def pause_seconds(self, path: str, mode: str) -> float:
        """From the request to pause until the engine takes it up."""
        return 0.0

    def resume_seconds(self, path: str) -> float:
        return self._w.pause_overhead_s

    def restore(self, now: float, engine: int) -> float:
        """End of bringing the old version back from host memory after a failed copy."""
        gpus = self._layout.engines[engine].gpus
        return now + self._model.weight_bytes(self._s.rollout.engine.weight_precision) / (
            gpus * self.fabric.pcie_bytes_per_s
        )

    def expected(self, path: str) -> PathCost:
        """Cost of one publication to all engines on idle links, for a choice by total. Waves follow one another.

        Raises `ValueError` if the placement does not allow the path.
        """
        if not self.available(path):
            raise ValueError(f"{path} needs every engine on the trainer's GPUs")
        engines = range(len(self._layout.engines))
        part = self._w.participation
        size = part.size if isinstance(part, Waves) else max(1, len(engines))
        waves = [tuple(engines[i : i + size]) for i in range(0, len(engines), size)]
        read = self.fabric.storage_read
        transfer = {
            "broadcast": sum(self._broadcast_seconds(w) for w in waves),
            "p2p": sum(self._p2p_seconds(w) for w in waves),
            "disk": len(engines) * read.seconds(self.payload_bytes),
            "disk_delta": len(engines) * read.seconds(self.delta_bytes),
            "cuda_ipc": 0.0,
        }[path]
        apply = sum(max(self._apply_seconds(path, e) for e in w) for w in waves)
        requantize = sum(max(self._requantize_seconds(e) for e in w) for w in waves)
        return PathCost(path, self._prepare_seconds(path), transfer, apply, requantize)

    # --- a shared pool changes phase ----------------------------------------------------------------------------------

    def offload_seconds(self) -> float:
        """Trainer state of one GPU over PCIe, one way: bytes per GPU / usable PCIe bandwidth."""
        state = trainer_state_bytes_per_gpu(self._model, self._s.training, self._layout.train_gpus)
        return state / self.fabric.pcie_bytes_per_s

    def switch_seconds(self, to_phase: str) -> float:
        """Seconds of a switch to `train` or `generate`. KV is dropped, never moved.

        To generate: trainer state out, then engine weights in. To train: trainer state in; engine weights are released,
        they are in host memory. One after the other, since what comes in needs the room. Without offload only the fixed
        part. Raises `ValueError` for a placement without a shared pool.
        """
        p = self._s.placement
        if p.mode == "disaggregated":
            raise ValueError("a disaggregated placement has no pool that switches")
        if not p.switch.offload:
            return p.switch.fixed_s
        moved = self.offload_seconds()
        if to_phase == "generate":
            weights = self._model.weight_bytes(self._s.rollout.engine.weight_precision)
            moved += weights / p.rollout_num_gpus_per_engine / self.fabric.pcie_bytes_per_s
        return p.switch.fixed_s + moved

    # --- terms --------------------------------------------------------------------------------------------------------

    def _snapshot_seconds(self) -> float:
        """Gather, then device to host over the PCIe links of all trainer GPUs."""
        gpus = self._layout.train_gpus
        return self.gather_seconds() + self.payload_bytes / (gpus * self.fabric.pcie_bytes_per_s)

    def _build_seconds(self) -> float:
        return self.payload_bytes / (len(self._train_nodes) * self._c.delta_build_bytes_per_s)

    def _convert_seconds(self, path: str) -> float:
        """Gather and convert for the paths that read the trainer's GPU memory."""
        if path == "broadcast":
            return 0.0 if self._s.simulation.broadcast == "checkpoint_engine" else self.gather_seconds()
        if path == "p2p":
            rate = len(self._train_nodes) * self._c.p2p_source_bytes_per_s
            return self.trained_bytes / rate if self.converts else 0.0
        convert = self.payload_bytes / self._c.ipc_convert_bytes_per_s if self.converts else 0.0
        return convert + self._model.num_tensors * self._c.ipc_tensor_s

    def _prepare_seconds(self, path: str) -> float:
        """Without the pulls of a delta, which are transfer."""
        write = self.fabric.storage_write
        if path == "disk":
            return self._snapshot_seconds() + write.seconds(self.payload_bytes)
        if path == "disk_delta":
            return self._snapshot_seconds() + self._build_seconds() + write.seconds(self.delta_bytes)
        return self._convert_seconds(path)

    def _on_trainer_node(self, engine: int) -> bool:
        """Trainer and engine share one node: NVLink all the way."""
        e = self._layout.engines[engine]
        return list(self._train_nodes) == [e.node] and e.gpus <= self._s.cluster.gpus_per_node

    def _broadcast_seconds(self, wave: tuple[int, ...]) -> float:
        """Buckets through one ring: the wire does not depend on the number of receivers, the control plane does.

        `miles`: one GPU of a pipeline stage gathers, converts and sends bucket after bucket; the stages convert at the
        same time and take turns on the wire, so that t = max(send, (send + convert) / stages) + buckets x receivers x
        overhead. `checkpoint_engine`: every rank sends what it holds in host memory, over all adapters of a node;
        t = send + reload + buckets x receivers x overhead.
        """
        buckets = ceil(self.payload_bytes / self._w.update_weight_buffer_size)
        receivers = sum(self._layout.engines[e].gpus for e in wave)
        near = all(self._on_trainer_node(e) for e in wave)
        latency = buckets * self.fabric.latency_s
        if self._s.simulation.broadcast == "checkpoint_engine":
            adapters = min(self._layout.train_gpus, self._s.cluster.gpus_per_node)
            rate = self._nvlink if near else min(self._nvlink, adapters * self.fabric.ib_bytes_per_s)
            reload = self.payload_bytes / self._c.checkpoint_engine_reload_bytes_per_s
            overhead = self._c.checkpoint_engine_receiver_s
            return self.payload_bytes / rate + reload + latency + buckets * receivers * overhead
        send = self.payload_bytes / (self._nvlink if near else self.fabric.ib_bytes_per_s) + latency
        convert = self.trained_bytes / self._c.broadcast_convert_bytes_per_s if self.converts else 0.0
        stages = self._s.training.pipeline_parallel
        return max(send, (send + convert) / stages) + buckets * receivers * self._c.broadcast_receiver_s

    def _collective(self, now: float, participants: tuple[int, ...], engine: int) -> float:
        wave = self._waves.get(participants)
        if wave is None or engine in wave.served or wave.end < now:
            seconds = self._broadcast_seconds(participants)
            _, sent = self.fabric.collective.occupy(now, seconds, self.payload_bytes)
            apply = max(self._apply_seconds("broadcast", e) for e in participants)
            wave = self._waves[participants] = _Wave(sent + apply, set())
        wave.served.add(engine)
        return wave.end

    def _p2p_rates(self, engine: int) -> tuple[float, float]:
        """(all sources together, all adapters of this engine), bytes per second."""
        rate = self._nvlink if self._on_trainer_node(engine) else self.fabric.ib_bytes_per_s
        return rate * self._layout.train_gpus, rate * self._layout.engines[engine].gpus

    def _p2p(self, now: float, engine: int) -> float:
        """Each engine takes one whole copy, spread over its GPUs, from sources that all engines share."""
        source, own = self._p2p_rates(engine)
        start, sent = self.fabric.source.occupy(now, self.payload_bytes / source, self.payload_bytes)
        _, received = self.fabric.engine_nics[engine].occupy(start, self.payload_bytes / own, self.payload_bytes)
        return max(sent, received) + self.fabric.latency_s

    def _p2p_seconds(self, wave: tuple[int, ...]) -> float:
        """The last end of a wave that starts on idle links."""
        sent, end = 0.0, 0.0
        for e in wave:
            source, own = self._p2p_rates(e)
            end = max(end, sent + max(self.payload_bytes / source, self.payload_bytes / own))
            sent += self.payload_bytes / source
        return end + self.fabric.latency_s

    def _apply_seconds(self, path: str, engine: int) -> float:
        """Into the served tensors: from host memory (disk paths), or read and written once in GPU memory."""
        share = self.payload_bytes / self._layout.engines[engine].gpus
        if path in ("disk", "disk_delta"):
            return share / self._c.reload_bytes_per_s
        return 2 * share / self._hbm

    def _requantize_seconds(self, engine: int) -> float:
        if self._w.requantize == "none":
            return 0.0
        return self._model.weight_bytes("bf16") / self._layout.engines[engine].gpus / self._c.requantize_bytes_per_s
