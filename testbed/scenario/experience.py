"""Between generation and training: the buffer, which ready groups form a batch, and what is too old."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.scenario.base import Fraction, PositiveFloat, PositiveInt, Section

Measure = Literal[
    "oldest_token", "dispatch", "completion", "create_step", "admission_count", "trainer_steps", "samples"
]
"""The seven readings of "staleness" in use; `testbed.metrics.staleness` states each as a formula."""


class InsertWhenReady(Section):
    """Only complete, ready groups enter (Miles). A full buffer blocks the producer."""

    type: Literal["insert_when_ready"] = "insert_when_ready"
    async_data_buffer_capacity_factor: PositiveFloat = 2.0
    """Capacity = floor(factor x rollout_batch_size) groups."""
    put_when_full: Literal["block", "drop_oldest"] = "block"
    """`block`: generated groups wait outside and hold their admission. `drop_oldest`: the oldest stored group makes
    room."""


class StoreThenReady(Section):
    """A slot is reserved at dispatch, committed when generated, selectable when ready (NeMo RL, ROLL, verl V1)."""

    type: Literal["store_then_ready"] = "store_then_ready"
    max_buffered_groups: PositiveInt | None = None
    """null: groups per batch x (staleness bound + 1)."""


Buffer = Annotated[InsertWhenReady | StoreThenReady, Field(discriminator="type")]


class Fifo(Section):
    """Ready groups in the order they became ready."""

    type: Literal["fifo"] = "fifo"


class WindowedFifo(Section):
    """As fifo, but only groups whose dispatch version lies within `window` versions of the deployed one."""

    type: Literal["windowed_fifo"] = "windowed_fifo"
    window: Annotated[int, Field(ge=0)] = 1


class FreshestFirst(Section):
    type: Literal["freshest_first"] = "freshest_first"


class OldestFirst(Section):
    """By submission: the order that makes AReaL's admission bound a bound on staleness."""

    type: Literal["oldest_first"] = "oldest_first"


SelectionOrder = Annotated[Fifo | WindowedFifo | FreshestFirst | OldestFirst, Field(discriminator="type")]


class Selection(Section):
    """Order, filters and reuse."""

    order: SelectionOrder = Fifo()
    filter_zero_variance: bool = False
    """Drop groups whose rewards are all equal (DAPO's dynamic sampling)."""
    use_count: PositiveInt = 1
    """How many batches may use a group before it leaves the buffer."""


class Staleness(Section):
    """What is too old, when that is decided, and then what. Readings are reported at completion and at dequeue in any
    case."""

    measure: Measure = "oldest_token"
    bound: Annotated[int, Field(ge=0)] | None = None
    """null: nothing is too old (`max_weight_staleness` unset)."""
    action: Literal["drop", "retry", "wait", "mask", "correct", "none"] = "drop"
    """`drop` the group; `retry` its task; `wait`: hold the next publication until it is used; `mask` tokens of
    versions beyond the bound; `correct`: train it with a correction and count it; `none`: train it and count it."""
    event: Literal["dequeue", "completion", "publication"] = "dequeue"
    """`dequeue`: when a batch is cut. `completion`: when a group is ready, and not again. `publication`: at dequeue,
    and groups in flight are cancelled before engines pause for a version that makes them too old (`drop` and `retry`
    only)."""
    max_dropped_share: Fraction = 1.0
    """Refuse to go on when more than this share of generated groups is dropped (1: never)."""


class Experience(Section):
    buffer: Buffer = InsertWhenReady()
    selection: Selection = Selection()
    staleness: Staleness = Staleness()
