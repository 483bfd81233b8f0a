"""Step times from coefficients that were fitted to one machine's engines, read from a profile.

A profile is a JSON object:
  {"format": 1, "machine": "...", "model": "...",
   "decode":  {"base_s": ., "per_sequence_s": ., "per_context_token_s": .},
   "prefill": {"base_s": ., "per_token_s": ., "per_pair_s": ., "per_request_s": .},
   "ranges":  {"batch": [low, high], "context_per_sequence": [low, high], "new_tokens": [low, high]}}
`pair`: one query token attending to one key token. It refuses to know how the fit was made.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

import msgspec
from msgspec import Struct

from sim.costs.errors import CostModelError
from sim.costs.segments import Row, SegmentCosts, row_through

Range = tuple[float, float]


class DecodeFit(Struct, frozen=True, forbid_unknown_fields=True):
    base_s: float
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0


class PrefillFit(Struct, frozen=True, forbid_unknown_fields=True):
    base_s: float
    per_token_s: float
    per_pair_s: float = 0.0
    per_request_s: float = 0.0


class FitRanges(Struct, frozen=True, forbid_unknown_fields=True):
    """What the measurements covered; answers outside are given and counted."""

    batch: Range = (1, inf)
    context_per_sequence: Range = (0, inf)
    new_tokens: Range = (1, inf)


class Profile(Struct, frozen=True):
    """Fitted coefficients of one model on one machine."""

    format: int
    decode: DecodeFit
    prefill: PrefillFit
    ranges: FitRanges = FitRanges()
    machine: str = ""
    model: str = ""


def read_profile(path: Path) -> Profile:
    """Raises `CostModelError` if the file is missing or is no profile."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as e:
        raise CostModelError(
            f"can't read the calibration profile {path}: {e.strerror}", "make one with `testbed calibrate`"
        ) from e
    except msgspec.MsgspecError as e:
        raise CostModelError(f"{path} is not a calibration profile: {e}", "make one with `testbed calibrate`") from e


class CalibratedCostModel(SegmentCosts):
    """Raises `CostModelError` for coefficients that make a decode step free or a time negative."""

    kind = "calibrated"

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        d, p = profile.decode, profile.prefill
        fitted = (*msgspec.structs.astuple(d), *msgspec.structs.astuple(p))
        if min(fitted) < 0 or d.base_s + d.per_sequence_s + d.per_context_token_s <= 0:
            raise CostModelError(
                "coefficients of a calibration profile can't be negative, and a decode step must take time"
            )
        self._profile = profile

    def _row(self, batch: int) -> Row:
        d, r = self._profile.decode, self._profile.ranges
        fixed = d.base_s + d.per_sequence_s * batch
        inside = r.batch[0] <= batch <= r.batch[1]
        low, high = r.context_per_sequence if inside else (inf, -inf)
        return row_through([(0.0, fixed), (1.0, fixed + d.per_context_token_s * batch)], low, high)

    def _prefill(self, new_tokens: int, attention: float, requests: int) -> tuple[float, bool]:
        p, (low, high) = self._profile.prefill, self._profile.ranges.new_tokens
        seconds = p.base_s + p.per_token_s * new_tokens + p.per_pair_s * attention + p.per_request_s * requests
        return seconds, not low <= new_tokens <= high
