"""How new weights reach the engines: how often, by which path, under which transition rule, and who waits for whom."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.scenario.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section

Path = Literal["cuda_ipc", "broadcast", "p2p", "disk", "disk_delta"]
RequestRule = Literal["finish", "retract", "in_place", "abort"]
KvRule = Literal["flush", "salt_by_version", "keep"]


class TransitionRule(Section):
    """Declared before an update, frozen for that transition: what happens to requests in flight and to their KV."""

    pause_generation_mode: RequestRule
    """`finish` them on the old version; `retract`: back to the queue, KV recomputed; `in_place`: go on with the KV
    they have;
    `abort`: thrown away and generated again."""
    kv: KvRule
    """KV of the old version: `flush` it, `salt_by_version` so that no new request matches it, or `keep` serving it."""


class FixedPath(Section):
    type: Literal["fixed"] = "fixed"
    update_weight_transfer_mode: Path


class CheapestPath(Section):
    """The path with the smallest prepare + transfer + apply + requantise, among those the placement allows."""

    type: Literal["cheapest"] = "cheapest"
    among: tuple[Path, ...] = ("broadcast", "p2p", "disk_delta")


PathChoice = Annotated[FixedPath | CheapestPath, Field(discriminator="type")]


class Barrier(Section):
    """All participants pause, copy and resume together."""

    type: Literal["all"] = "all"


class Waves(Section):
    """Participants are updated `size` at a time; each wave has its own barrier, the others go on serving the old
    version."""

    type: Literal["waves"] = "waves"
    size: PositiveInt


Participation = Annotated[Barrier | Waves, Field(discriminator="type")]


class Weights(Section):
    """Publication of weights. There is no default transition: an update without a declared rule is refused."""

    update_weights_interval: PositiveInt = 1
    """Batches trained between two publications."""
    path: PathChoice
    transition: TransitionRule
    participation: Participation = Barrier()
    requantize: Literal["none", "fp8", "mxfp8", "nvfp4", "int8", "int4"] = "none"
    """Conversion on the engine after the copy."""
    update_weight_buffer_size: PositiveInt = 512 * 1024**2
    """Bytes of one transfer bucket."""
    delta_density: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Share of parameters that change between two publications (published: 1 to 3 % in BF16)."""
    delta_bytes_per_changed_param: PositiveFloat = 1.2
    """After compression (published: 62.4 GB became 0.69 to 0.83 GB at about 2 % changed: 1.1 to 1.3 % of the bytes)."""
    timeout_s: PositiveFloat = 600.0
    """A participant that is not ready by then is treated as `on_failure` says."""
    on_failure: Literal["keep_old_version", "remove_engine", "retry"] = "keep_old_version"
    pause_overhead_s: NonNegativeFloat = 0.05
    """Fixed cost of pausing and resuming one engine."""
