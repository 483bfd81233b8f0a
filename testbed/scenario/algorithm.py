"""The learning algorithm as far as scheduling sees it: which signals a loss needs, and how many of what make a
batch."""

from __future__ import annotations

from typing import Literal

from testbed.scenario.base import NonNegativeFloat, PositiveInt, Section

Signal = Literal["reward", "old_log_probs", "reference", "critic", "teacher"]
Advantage = Literal["group", "critic", "distillation", "group_with_distillation"]


class Algorithm(Section):
    """Group sizes, batch sizes and the signals that must be there before a trajectory is ready.

    A batch is `rollout_batch_size` groups of `n_samples_per_prompt` trajectories, trained in `num_steps_per_rollout`
    optimizer updates. Readiness follows from `signals`: a group (advantage `group*`) is ready when all its members are.
    """

    advantage: Advantage = "group"
    """`critic` needs values and is ready per trajectory; `distillation` needs a teacher and no reward."""
    n_samples_per_prompt: PositiveInt = 8
    rollout_batch_size: PositiveInt = 32
    """Groups in a batch."""
    num_steps_per_rollout: PositiveInt = 1
    """Optimizer updates made of one batch."""
    recompute_old_log_probs: bool = False
    """Run a forward pass of the trainer over the batch before training (else generation log-probs are the
    denominator)."""
    kl_coef: NonNegativeFloat = 0.0
    """> 0 adds a reference forward pass."""

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "critic"

    @property
    def needs_teacher(self) -> bool:
        return self.advantage in ("distillation", "group_with_distillation")

    @property
    def group_ready_together(self) -> bool:
        """Whether members wait for each other (a group baseline compares them)."""
        return self.advantage in ("group", "group_with_distillation")

    @property
    def signals(self) -> tuple[Signal, ...]:
        """Every signal one trajectory needs, in the order in which they are asked for."""
        needed: list[Signal] = []
        if self.advantage != "distillation":
            needed.append("reward")
        if self.needs_teacher:
            needed.append("teacher")
        if self.recompute_old_log_probs:
            needed.append("old_log_probs")
        if self.kl_coef > 0:
            needed.append("reference")
        if self.needs_critic:
            needed.append("critic")
        return tuple(needed)

    @property
    def trajectories_per_batch(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt
