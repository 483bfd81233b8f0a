"""What a step of a served engine takes beyond the kernels of a table: the host, and ranks that wait for each other.

Calibrated on measured servers by `sim.serving.fit`; the coefficients and their intervals lie in the bundled data. It
refuses to know tables, requests and clocks.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import msgspec
from msgspec import Struct

FILE = "serving_overheads.json"

COLLECTIVES_PER_LAYER = 2
"""After attention and after the MLP."""


class Overheads(Struct, frozen=True):
    """Seconds."""

    step_s: float = 0.0
    """The host, once a step: schedule, launch, sample, hand over."""
    sequence_s: float = 0.0
    """The host, for each sequence: its token is appended, checked, detokenised and streamed."""
    collective_s: float = 0.0
    """Each all-reduce between GPUs: ranks do not arrive at the same time."""


NONE = Overheads()


class Fitted(Struct, frozen=True):
    """Coefficients of one way of scheduling; `plus_minus`: half of the 95 % interval. Microseconds."""

    step_us: float
    sequence_us: float
    collective_us: float
    plus_minus: tuple[float, float, float]
    points: int

    def overheads(self) -> Overheads:
        return Overheads(self.step_us * 1e-6, self.sequence_us * 1e-6, self.collective_us * 1e-6)


@lru_cache(maxsize=1)
def fitted() -> dict[str, Fitted]:
    """By way of scheduling: `sglang` (overlap), `vllm` (asynchronous), `vllm_synchronous`."""
    raw = (files("testbed") / "data" / FILE).read_bytes()
    return msgspec.json.decode(raw, type=dict[str, Fitted])


def collectives(layers: int, tensor_parallel: int) -> int:
    """All-reduces of one step; none on one GPU."""
    return COLLECTIVES_PER_LAYER * layers if tensor_parallel > 1 else 0
