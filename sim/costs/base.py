"""The cost-model interface: how long an engine's steps take, in closed form.

A batch's step time is affine in the total context between two changes of the batch, so k steps have a closed form. A
model therefore answers three questions about a decode run, and one about prefill. All times in seconds, all lengths
in tokens. It refuses to know requests, queues and clocks.
"""

from __future__ import annotations

from typing import Protocol


class CostModel(Protocol):
    """Durations of one engine's GPU steps."""

    kind: str
    """`measured`, `calibrated`, `analytic` or `linear`: what the numbers rest on."""

    arrival_base_s: float
    """From a request's being sent until it is in the engine's queue, on an idle machine."""
    arrival_per_request_s: float
    """Requests of one engine take this long each on that way, one after another."""

    padded_attention: bool
    """Whether the engine's attention computes whole squares in a prefill, cached tokens or not (SGLang's
    `torch_native` pads queries to the length of the keys)."""

    def decode_time(self, batch: int, context: int) -> float:
        """One decode step for `batch` sequences whose contexts sum to `context` (the new tokens included)."""

    def run_time(self, batch: int, context: int, steps: int) -> float:
        """`steps` consecutive decode steps; the first has total context `context`, each later one `batch` more.

        Equals `sum(decode_time(batch, context + i * batch) for i in range(steps))` to rounding.
        """

    def steps_within(self, batch: int, context: int, seconds: float) -> int:
        """Largest k with `run_time(batch, context, k) <= seconds` (0 if not even one step fits)."""

    def prefill_time(self, new_tokens: int, attention: float, requests: int) -> float:
        """One prefill batch. `new_tokens`: computed tokens; `attention`: the number of query-key pairs, sum over
        requests of new x (cached + new / 2), or of (cached + new)^2 if `padded_attention`; `requests`: how many."""

    @property
    def outside_share(self) -> dict[str, float]:
        """Share of answers that lay outside the model's range, by phase (`decode`, `prefill`); 0 where it has none."""
