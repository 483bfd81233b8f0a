"""What the figures of a run do not follow from: who ran what, on which basis. It refuses to know the figures."""

from __future__ import annotations

from msgspec import Struct, field

from testbed.metrics.scores import Score


class RunMeta(Struct, frozen=True, kw_only=True):
    """Fields as in `RunSummary`."""

    name: str = ""
    """Empty: the scenario's name."""
    backend: str = "simulated"
    seed: int | None = None
    """None: the scenario's seed."""
    scenario_hash: str = ""
    workload_hash: str = ""
    backend_events: int = 0
    finish_reason: str = ""
    kinds: dict[str, str] = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)
    learning: dict[int, dict[str, float]] = field(default_factory=dict)
    """By batch, as in `StepRecord`."""
    ratios: dict[int, dict[str, dict[int, int]]] = field(default_factory=dict)
    """By batch, as in `StepRecord`."""
    clip: tuple[float, float] | None = None
    held_out: list[Score] = field(default_factory=list)
    engine_weight_bytes: float = 0.0
