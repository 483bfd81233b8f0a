"""Step times from coefficients that were fitted to one machine's engines, read from a profile
(`testbed.calibration.profile`).

It refuses to know how the fit was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path

import msgspec
from msgspec import structs

from sim.costs.errors import CostModelError
from sim.costs.segments import Row, SegmentCosts, row_through
from testbed.calibration.profile import BesideFit, Profile, other
from testbed.calibration.speed import times


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


def refuse_other(
    profile: Profile, path: str, versions: Mapping[str, str], machine: Mapping[str, str] | None = None
) -> None:
    """Raises `CostModelError` if the profile was made with other versions, or (if `machine` is given) on another
    machine."""
    differences = other(profile, versions, machine)
    if differences:
        message = f"the calibration profile {path} was made with {'; '.join(differences)}"
        raise CostModelError(message, "make one with `testbed calibrate`")


def slowed(profile: Profile, decode: float, prefill: float) -> Profile:
    """Steps that take so many times as long."""
    return structs.replace(
        profile, decode=times(profile.decode, decode), prefill=times(profile.prefill, prefill), traffic=1.0
    )


def _beside(profile: Profile, by: BesideFit) -> Profile:
    """Of an engine that works beside a trainer."""
    return structs.replace(slowed(profile, by.decode, by.prefill), beside=None)


class CalibratedCostModel(SegmentCosts):
    """Raises `CostModelError` for coefficients that make a decode step free or a time negative.

    `beside`, if it was measured: step times of an engine beside a working trainer, and how much longer a trainer takes
    beside a working engine."""

    kind = "calibrated"

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        profile = slowed(profile, profile.traffic, profile.traffic)
        self.beside: tuple[CalibratedCostModel, float] | None = None
        if profile.beside is not None:
            self.beside = CalibratedCostModel(_beside(profile, profile.beside)), profile.beside.train
        d, p = profile.decode, profile.prefill
        fitted = (*msgspec.structs.astuple(d), *msgspec.structs.astuple(p))
        if min(fitted) < 0 or d.base_s + d.per_sequence_s + d.per_context_token_s <= 0:
            raise CostModelError(
                "coefficients of a calibration profile can't be negative, and a decode step must take time"
            )
        self._profile = profile
        self.padded_attention = p.padded
        if profile.arrival is not None:
            self.arrival_base_s, self.arrival_per_request_s = profile.arrival.base_s, profile.arrival.per_request_s

    @property
    def outside_share(self) -> dict[str, float]:
        if self.beside is None:
            return super().outside_share
        b = self.beside[0]
        return {
            "decode": (self._decode_outside + b._decode_outside) / max(self._decode_asked + b._decode_asked, 1),
            "prefill": (self._prefill_outside + b._prefill_outside) / max(self._prefill_asked + b._prefill_asked, 1),
        }

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
