"""Step times from a roofline: the GPU's peak rates, the model's architecture, two efficiencies and one fixed overhead.

Formulas as used by the serving simulators of the field: a decode step reads the weights it touches and all KV, or is
bound by compute; a prefill batch is one GEMM over all its tokens (weights read once) and attention over its query-key
pairs; tensor parallelism adds two all-reduces a layer. It refuses to know measurements.
"""

from __future__ import annotations

from sim.costs.segments import Row, SegmentCosts, row_through
from sim.fabric import BUS_SHARE
from testbed.scenario.catalogue import GpuSpec, ModelSpec
from testbed.scenario.run import AnalyticCosts

ALL_REDUCE_FLOOR_S = 4e-6
"""Measured: SGLang's all-reduce of 8 to 128 KB on 2 to 8 H100 takes 2.6 to 6.4 us (aiconfigurator 0.12.0 tables)."""

ALL_REDUCES_PER_LAYER = 2
"""Analytic: one after attention, one after the MLP."""

ACTIVATION_BYTES = 2
"""Analytic: activations travel in 16 bits."""


class AnalyticCostModel(SegmentCosts):
    """Roofline of one engine of `gpus` GPUs in one TP group (MoE: experts spread over the same GPUs).

    `precision`, `kv_dtype`: of the served weights and of the KV cache. With more than `gpus_per_node` GPUs the
    all-reduces cross the network.
    """

    kind = "analytic"

    def __init__(
        self,
        costs: AnalyticCosts,
        model: ModelSpec,
        gpu: GpuSpec,
        gpus: int,
        precision: str = "bf16",
        kv_dtype: str = "bf16",
        gpus_per_node: int = 8,
    ) -> None:
        super().__init__()
        self._model = model
        self._gpus = gpus
        self._flops_per_s = costs.compute_efficiency * gpu.peak_flops(precision) * gpus
        self._bytes_per_s = costs.memory_efficiency * gpu.hbm_bytes_per_s * gpus
        self._overhead = costs.step_overhead_ms * 1e-3
        self._kv_bytes = model.kv_bytes_per_token(kv_dtype, gpus)
        bytes_per_param = model.weight_bytes(precision) / model.params
        embedding = 0 if model.tied else model.embedding_params  # looked up, not read
        self._routed_bytes = model.routed_expert_params * bytes_per_param
        self._always_bytes = (model.params - embedding) * bytes_per_param - self._routed_bytes
        link = gpu.nvlink_gb_per_s if gpus <= gpus_per_node else gpu.ib_gb_per_s
        self._bus = BUS_SHARE * link * 1e9

    def weight_bytes_touched(self, tokens: int) -> float:
        """Bytes that a step over n = `tokens` tokens reads. MoE: E (1 - (1 - k/E)^n) experts a layer (uniform
        routing)."""
        m = self._model
        if not m.is_moe:
            return self._always_bytes
        return self._always_bytes + self._routed_bytes * (1.0 - (1.0 - m.topk / m.experts) ** tokens)

    def all_reduce_time(self, tokens: int) -> float:
        """All-reduces of one step, seconds: per layer 2 x max(floor, 2 h tokens bytes x 2 (g - 1) / g / bus)."""
        g = self._gpus
        if g == 1:
            return 0.0
        wire = ACTIVATION_BYTES * self._model.hidden * tokens * 2 * (g - 1) / g / self._bus
        return ALL_REDUCES_PER_LAYER * self._model.layers * max(ALL_REDUCE_FLOOR_S, wire)

    def _row(self, batch: int) -> Row:
        """Memory-bound time rises with the context, compute-bound time does not: two segments, meeting where they are
        equal."""
        fixed = self._overhead + self.all_reduce_time(batch)
        compute = 2.0 * self._model.matmul_params * batch / self._flops_per_s
        weights = self.weight_bytes_touched(batch) / self._bytes_per_s
        slope = self._kv_bytes * batch / self._bytes_per_s
        if weights >= compute:
            return row_through([(0.0, fixed + weights), (1.0, fixed + weights + slope)])
        meet = (compute - weights) / slope
        return row_through(
            [(0.0, fixed + compute), (meet, fixed + compute), (2 * meet, fixed + compute + slope * meet)]
        )

    def _prefill(self, new_tokens: int, attention: float, requests: int) -> tuple[float, bool]:
        """FLOPs: 2 (N - N_emb - N_head) p + 2 N_head per request + 4 L q d_h x pairs; or the bytes of the weights."""
        m = self._model
        body = 2.0 * (m.matmul_params - m.lm_head_params) * new_tokens + 2.0 * m.lm_head_params * requests
        flops = body + 4.0 * m.layers * m.attention_width * attention
        weights = self.weight_bytes_touched(new_tokens)
        busy = max(flops / self._flops_per_s, weights / self._bytes_per_s)
        return self._overhead + self.all_reduce_time(new_tokens) + busy, False
