"""How long the trainer works: seconds of each optimizer update and of a forward pass, from trajectory lengths.

FLOPs per token = 6 (N_active - N_emb) + 6 L q d_h s for forward and backward with causal attention; for packed
sequences the attention term is 6 L q d_h x sum s^2. It refuses to know batches, versions and clocks: whoever calls it
keeps the trainer busy for the seconds it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from sim.coefficients import Coefficients, coefficients
from sim.costs.calibrated import read_profile
from sim.costs.errors import CostModelError
from testbed.calibration.profile import TrainerFit
from testbed.packing import rows_of
from testbed.scenario.catalogue import GpuSpec, ModelSpec
from testbed.scenario.layout import Layout
from testbed.scenario.scenario import Scenario
from testbed.scenario.training import AnalyticTrainer, CalibratedTrainer, RateTrainer

FORWARD_SHARE = 1 / 3
"""Analytic: 2 of the 6 FLOPs per parameter and token are the forward pass."""

RECOMPUTE = {"none": 1.0, "selective": 1.03, "full": 4 / 3}
"""On the clock. Full: analytic (one more forward pass). Selective: reported as 1.02 to 1.05."""

OPTIMIZER_TRAFFIC = 2.0
"""Analytic: every byte of optimizer state is read once and written once."""

HBM_SHARE = 0.8
"""Share of peak memory bandwidth that streaming kernels reach; commonly 0.75 to 0.85."""


def flops_per_token(model: ModelSpec, length: float) -> float:
    """Forward and backward FLOPs of one token in a sequence of `length` tokens, causal.

    Agrees with Megatron-Bridge 25.11's published FLOPs per token to 0.2 % (dense and MoE).
    """
    return 6.0 * model.matmul_params + 6.0 * model.layers * model.attention_width * length


class TrainerModel:
    """Seconds of one trainer. `analytic`: FLOPs over peak x MFU and what is added to it; `fitted`: the same by kind of
    work, with memory traffic; `rate`: a plain throughput; `calibrated`: of a profile (relative to `base_dir`).

    Raises `ValueError` for a `rate` trainer without a rate, `CostModelError` for a profile that has none.
    """

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        model: ModelSpec,
        gpu: GpuSpec,
        fitted: Coefficients | None = None,
        base_dir: Path | None = None,
    ) -> None:
        self._c = fitted or coefficients()
        self._training = scenario.training
        self._cost = scenario.training.cost
        self._gpus = layout.train_gpus
        self._model = model
        self._gpu = gpu
        self._linear = 6.0 * model.matmul_params
        self._quadratic = 6.0 * model.layers * model.attention_width
        self._calibrated: TrainerFit | None = None
        if isinstance(self._cost, CalibratedTrainer):
            self._calibrated = read_profile((base_dir or Path()) / self._cost.profile).trainer
            if self._calibrated is None:
                message = f"the calibration profile {self._cost.profile} has no trainer"
                raise CostModelError(message, "make one with `testbed calibrate`")
        if isinstance(self._cost, RateTrainer) and self._cost.samples_per_s is None and self._cost.tokens_per_s is None:
            raise ValueError("a trainer of type `rate` needs samples_per_s or tokens_per_s")

    @property
    def data_parallel(self) -> int:
        """Ranks that train different sequences: GPUs / (tensor x pipeline x context parallel), at least 1."""
        t = self._training
        return max(1, self._gpus // (t.tensor_parallel * t.pipeline_parallel * t.context_parallel))

    def flops(self, lengths: Sequence[int]) -> float:
        """Model FLOPs, forward and backward, of packed causal sequences of these lengths."""
        return self._linear * sum(lengths) + self._quadratic * sum(n * n for n in lengths)

    def update_seconds(self, lengths: Sequence[int], updates: int) -> list[float]:
        """Seconds of each of `updates` optimizer updates over one batch.

        `lengths`: prompt and output tokens of each trajectory, in batch order. The batch is cut into `updates`
        consecutive parts of equal count (the first ones take the remainder).
        """
        size, rest = divmod(len(lengths), updates)
        seconds, start = [], 0
        for u in range(updates):
            end = start + size + (u < rest)
            seconds.append(self._update(lengths[start:end]))
            start = end
        return seconds

    def forward_seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of one forward pass over these trajectories (old log-probs, reference, critic): a third, no
        optimizer."""
        if not lengths:
            return 0.0
        if self._calibrated is not None:
            return FORWARD_SHARE * (self._by_profile(self._calibrated, lengths) - self._calibrated.fixed_s)
        if isinstance(self._cost, RateTrainer):
            return FORWARD_SHARE * self._at_rate(lengths)
        return FORWARD_SHARE * self._compute(lengths)

    def optimizer_seconds(self) -> float:
        """Optimizer states of one GPU's share, read and written once."""
        states = self._training.optimizer_bytes_per_param * self._model.params / self._gpus
        return OPTIMIZER_TRAFFIC * states / (HBM_SHARE * self._gpu.hbm_bytes_per_s)

    def bubble(self, tokens: int) -> float:
        """Pipeline bubble as a share of compute: (PP - 1) / m for m micro-batches of `max_tokens_per_gpu` tokens a
        rank."""
        t = self._training
        if t.pipeline_parallel == 1:
            return 0.0
        per_rank = tokens / self.data_parallel
        micro_batches = max(1, ceil(per_rank / (t.max_tokens_per_gpu * t.context_parallel)))
        return (t.pipeline_parallel - 1) / micro_batches

    def _update(self, lengths: Sequence[int]) -> float:
        if self._calibrated is not None:
            return self._by_profile(self._calibrated, lengths)
        if isinstance(self._cost, RateTrainer):
            return self._cost.fixed_s + self._at_rate(lengths)
        assert not isinstance(self._cost, CalibratedTrainer)
        compute = self._compute(lengths, RECOMPUTE[self._training.recompute])
        return compute + self.optimizer_seconds() + self._cost.fixed_s

    def _compute(self, lengths: Sequence[int], recompute: float = 1.0) -> float:
        """Seconds of forward and backward on evenly loaded GPUs x imbalance x (1 + bubble) x (1 + exposed
        communication)."""
        c = self._cost
        assert not isinstance(c, (RateTrainer, CalibratedTrainer))
        if isinstance(c, AnalyticTrainer):
            even = recompute * self.flops(lengths) / (self._gpus * self._gpu.peak_flops("bf16") * c.mfu)
        else:
            even = self._by_kind_of_work(lengths, recompute)
        return even * c.imbalance * (1.0 + self.bubble(sum(lengths))) * (1.0 + c.exposed_communication)

    def _by_kind_of_work(self, lengths: Sequence[int], recompute: float) -> float:
        """Matrix products and attention over peak x their MFU, activations over memory bandwidth, all of it computed
        again as asked; and the logits, which are not."""
        m, tokens = self._model, sum(lengths)
        peak = self._gpus * self._gpu.peak_flops("bf16")
        memory = self._gpus * HBM_SHARE * self._gpu.hbm_bytes_per_s
        products = self._linear * tokens / (peak * self._c.trainer_linear_mfu)
        attention = self._quadratic * sum(n * n for n in lengths) / (peak * self._c.trainer_attention_mfu)
        activations = 2.0 * tokens * m.layers * m.hidden * (1 + m.topk) * self._c.trainer_activation_passes / memory
        logits = 4.0 * tokens * m.vocab * self._c.trainer_logits_passes / memory
        return recompute * (products + attention + activations) + logits

    def _by_profile(self, fit: TrainerFit, lengths: Sequence[int]) -> float:
        t = self._training
        capacity = t.max_tokens_per_gpu * t.context_parallel
        return max(fit.seconds(rows) for rows in rows_of(lengths, capacity, self.data_parallel))

    def _at_rate(self, lengths: Sequence[int]) -> float:
        c = self._cost
        assert isinstance(c, RateTrainer)
        by_samples = len(lengths) / c.samples_per_s if c.samples_per_s else 0.0
        return by_samples + (sum(lengths) / c.tokens_per_s if c.tokens_per_s else 0.0)
