"""Units of configuration keys, and the plain number that a quantity such as `512MB` or `80%` means in them.

A key's unit is in its name or in the table below. Knows nothing of models, files and messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    name: str
    dimension: str
    """`time`, `size`, `rate` (bytes per time), `tokens`, `share`, `money`."""
    factor: float
    """Seconds, bytes, bytes per second, tokens, shares or USD in one of this unit."""


BYTES = Unit("bytes", "size", 1)
SECONDS = Unit("seconds", "time", 1)
TOKENS = Unit("tokens", "tokens", 1)
SHARE = Unit("a share between 0 and 1", "share", 1)

BY_NAME = {
    "update_weight_buffer_size": BYTES,
    "seconds": SECONDS,
    "external_seconds_per_trajectory": SECONDS,
    "decode_seconds_per_turn": SECONDS,
    "tokens": TOKENS,
    "low": TOKENS,
    "high": TOKENS,
    "mean": TOKENS,
    "max_response_length": TOKENS,
    "max_total_num_tokens": TOKENS,
    "context_length": TOKENS,
    "chunked_prefill_size": TOKENS,
    "page_size": TOKENS,
    "max_tree_size": TOKENS,
    "max_tokens_per_gpu": TOKENS,
    "arrival_rate_per_s": Unit("tasks per second", "rate of tasks", 1),
    "samples_per_s": Unit("trajectories per second", "rate of trajectories", 1),
    "tokens_per_s": Unit("tokens per second", "rate of tokens", 1),
    "prefill_tokens_per_s": Unit("tokens per second", "rate of tokens", 1),
}

BY_SUFFIX = (
    ("_gb_per_s", Unit("GB/s (1e9 bytes per second)", "rate", 1e9)),
    ("_gb_per_node", Unit("GB (1e9 bytes)", "size", 1e9)),
    ("_usd_per_gpu_hour", Unit("USD per GPU-hour", "money", 1)),
    ("_bytes_per_param", Unit("bytes per parameter", "size", 1)),
    ("_bytes_per_changed_param", Unit("bytes per changed parameter", "size", 1)),
    ("_us", Unit("microseconds", "time", 1e-6)),
    ("_ms", Unit("milliseconds", "time", 1e-3)),
    ("_s", SECONDS),
    ("_tokens", TOKENS),
)


def unit_of(key: str) -> Unit | None:
    """Unit of a key, by its last name; None for counts, versions and words."""
    if key in BY_NAME:
        return BY_NAME[key]
    return next((unit for suffix, unit in BY_SUFFIX if key.endswith(suffix)), None)


_SIZES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
WRITTEN: dict[str, tuple[str, float]] = {
    "%": ("share", 0.01),
    "percent": ("share", 0.01),
    "ns": ("time", 1e-9),
    "us": ("time", 1e-6),
    "µs": ("time", 1e-6),
    "ms": ("time", 1e-3),
    "s": ("time", 1),
    "sec": ("time", 1),
    "second": ("time", 1),
    "seconds": ("time", 1),
    "m": ("time", 60),
    "min": ("time", 60),
    "minutes": ("time", 60),
    "h": ("time", 3600),
    "hours": ("time", 3600),
    "d": ("time", 86400),
    "days": ("time", 86400),
    "B": ("size", 1),
    "bytes": ("size", 1),
    "tokens": ("tokens", 1),
    "token": ("tokens", 1),
    "tok": ("tokens", 1),
    "ktok": ("tokens", 1e3),
    "k": ("tokens", 1e3),
    "K": ("tokens", 1e3),
    "$": ("money", 1),
    "USD": ("money", 1),
    "usd": ("money", 1),
    "$/h": ("money", 1),
    "USD/h": ("money", 1),
}
for _prefix, _factor in _SIZES.items():
    WRITTEN[f"{_prefix}B"] = ("size", _factor)
    WRITTEN[f"{_prefix}B/s"] = WRITTEN[f"{_prefix}Bps"] = ("rate", _factor)
    WRITTEN[f"{_prefix}b/s"] = WRITTEN[f"{_prefix}bps"] = WRITTEN[f"{_prefix}bit/s"] = ("rate", _factor / 8)
WRITTEN["KB"] = WRITTEN["kB"]

_QUANTITY = re.compile(
    r"^\s*(\$?)\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%|[A-Za-zµ$][A-Za-zµ$/]*)?\s*$"
)


@dataclass(frozen=True)
class Quantity:
    """A number that was written with a unit."""

    dimension: str
    value: float
    """In seconds, bytes, bytes per second, tokens, shares or USD."""

    def in_unit(self, unit: Unit) -> float | None:
        """The number to write for a key in `unit`; None if the dimensions differ."""
        if self.dimension != unit.dimension:
            return None
        return float(f"{self.value / unit.factor:.12g}")


def quantity(text: str) -> Quantity | None:
    """Read `512MB`, `3 s`, `80%`, `$2.60`; None if the text is no number with a known unit."""
    match = _QUANTITY.match(text)
    if match is None:
        return None
    dollar, number, written = match.groups()
    if dollar and not written:
        written = "$"
    if written not in WRITTEN:
        return None
    dimension, factor = WRITTEN[written]
    return Quantity(dimension, float(number.replace("_", "")) * factor)


def plain(value: float) -> str:
    """A number as one writes it in YAML: no exponent and no `.0` where it is whole."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.12g}"
