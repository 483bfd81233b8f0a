"""What a number rests on: six kinds with their marks.

A derived number takes the weakest kind of its inputs. It refuses to know which number is derived from which:
`reports.metrics` says that.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class Kind(Struct, frozen=True):
    name: str
    mark: str
    """One character, for text."""
    definition: str


KINDS: tuple[Kind, ...] = (
    Kind(
        "measured",
        "●",
        "Read on real hardware: on this run's engines and trainer, or in a table of kernels inside its range.",
    ),
    Kind("calibrated", "◐", "A formula whose coefficients were fitted to measurements or to published points."),
    Kind("published", "□", "Somebody else's figure, with its source."),
    Kind("analytic", "△", "A formula and a catalogue value; nothing was fitted."),
    Kind("assumed", "◇", "Chosen by whoever wrote the scenario; nothing stands behind it."),
    Kind("simulated", "○", "Came out of a simulation, and rests on all its inputs."),
)
"""Strongest first. Simulated is the weakest: it needs every input to be right, and the rules between them too."""

BY_NAME: dict[str, Kind] = {k.name: k for k in KINDS}
_RANK = {k.name: i for i, k in enumerate(KINDS)}

FAMILIES: dict[str, str] = {
    "engine_step": "engine step times",
    "reply_lengths": "reply lengths",
    "trainer": "trainer",
    "links": "links",
    "tools": "tools",
    "price": "price",
}
"""Families of inputs (`RunSummary.kinds`) and how they are called."""


def weakest(kinds: Iterable[str]) -> str:
    """The weakest kind. Raises KeyError for an unknown kind and ValueError for none."""
    return max(kinds, key=_RANK.__getitem__)


def result_kind(backend: str) -> str:
    """Of what a run gave: a real run measured it."""
    return "simulated" if backend == "simulated" else "measured"
