"""Which GPUs do what: colocated (time-shared), disaggregated, or hybrid (some GPUs change role), and who hosts the
other roles.

A role is not a process and not a GPU count: `roles` maps each extra role onto a pool.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.scenario.base import NonNegativeFloat, PositiveInt, Section

Host = Literal["trainer", "external"]
"""`trainer`: the job runs on the training pool between updates. `external`: a service outside the cluster's GPUs."""


class Roles(Section):
    """Where the jobs of extra roles run. Only roles that the algorithm needs are ever scheduled."""

    old_log_probs: Literal["trainer"] = "trainer"
    reference: Host = "trainer"
    critic: Host = "trainer"
    teacher: Host = "external"
    external_seconds_per_trajectory: NonNegativeFloat = 1.0
    """Latency of a signal computed by an external service."""
    external_slots: PositiveInt = 64


class Switch(Section):
    """What a shared pool pays when it changes phase."""

    offload: bool = True
    """Move the state of the phase that ends to host memory; false: both phases must fit at once."""
    fixed_s: NonNegativeFloat = 1.0
    """Per switch: process hand-over, memory pools, CUDA graphs."""
    clear_kv: bool = True
    """Leaving the generation phase drops the engines' KV."""


class PdDisaggregation(Section):
    """Prefill and decode on engines of their own. `rollout.routing` chooses the prefill engine of a turn; when its
    prompt is computed, its KV goes to a decode engine, which makes the second token and all that follow."""

    prefill_num_gpus: PositiveInt
    """Of `rollout_num_gpus`: they prefill, the others decode."""
    decode_policy: Literal["random", "round_robin", "power_of_two", "least_load"] = "least_load"
    """Which decode engine (SGLang's `--decode-policy`). Chosen when the prompt is computed, not when it is sent."""


class Colocated(Section):
    """All GPUs generate, then all GPUs train. Phase switches cost time; weights travel inside the GPU (cuda_ipc)."""

    mode: Literal["colocated"] = "colocated"
    num_gpus: PositiveInt
    rollout_num_gpus_per_engine: PositiveInt = 1
    roles: Roles = Roles()
    switch: Switch = Switch()


class Disaggregated(Section):
    """Some GPUs only generate, the others only train. No switch; weights travel over a fabric or storage."""

    mode: Literal["disaggregated"] = "disaggregated"
    rollout_num_gpus: PositiveInt
    actor_num_gpus: PositiveInt
    rollout_num_gpus_per_engine: PositiveInt = 1
    pd_disaggregation: PdDisaggregation | None = None
    """null: every engine prefills and decodes."""
    roles: Roles = Roles()


class Hybrid(Section):
    """Dedicated engines, and trainer GPUs that also run engines while the trainer waits for data."""

    mode: Literal["hybrid"] = "hybrid"
    rollout_num_gpus: PositiveInt
    actor_num_gpus: PositiveInt
    """These GPUs train, and generate in between."""
    rollout_num_gpus_per_engine: PositiveInt = 1
    min_pending_trajectories: PositiveInt = 1
    """The shared pool goes (back) to generation only while at least this many trajectories could use it."""
    roles: Roles = Roles()
    switch: Switch = Switch()


Placement = Annotated[Colocated | Disaggregated | Hybrid, Field(discriminator="mode")]
