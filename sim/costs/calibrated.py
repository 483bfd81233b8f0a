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
    return structs.replace(profile, decode=times(profile.decode, decode), prefill=times(profile.prefill, prefill))


def without(profile: Profile, part: float) -> Profile:
    """Steps while that part of the other engines has nothing to do."""
    c, d = profile.crowd, profile.decode
    if c is None:
        return profile
    base, each = part * c.base_s, part * c.per_sequence_s
    quicker = 1.0 - part * (1.0 - 1.0 / c.prefill)
    decode = d.changed(lambda s: max(s - base, 0.0), lambda s: max(s - each, 0.0))
    return structs.replace(profile, decode=decode, prefill=times(profile.prefill, quicker))


UNMEASURED = BesideFit(1.0, 1.0, 1.0)


class CalibratedCostModel(SegmentCosts):
    """Of an engine while all others work and the trainer does not; `among` for other states of the machine. Raises
    `CostModelError` for coefficients that make a decode step free or a time negative."""

    kind = "calibrated"

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        per_request_s = max(profile.prefill.per_request_s + profile.traffic_s, 0.0)
        prefill = structs.replace(profile.prefill, per_request_s=per_request_s)
        profile = structs.replace(profile, prefill=prefill, traffic_s=0.0)
        self.beside = profile.beside or UNMEASURED
        self._among: dict[tuple[bool, float], CalibratedCostModel] = {}
        d, p = profile.decode, profile.prefill
        each = (d.per_sequence_s, *(s.per_sequence_s for s in d.above))
        fitted = (d.base_s, *each, d.per_context_token_s, *msgspec.structs.astuple(p))
        if min(fitted) < 0 or d.fixed_s(1) + d.per_context_token_s <= 0:
            raise CostModelError(
                "coefficients of a calibration profile can't be negative, and a decode step must take time"
            )
        self._profile = profile
        self.padded_attention = p.padded
        if profile.arrival is not None:
            self.arrival_base_s, self.arrival_per_request_s = profile.arrival.base_s, profile.arrival.per_request_s

    @property
    def shared(self) -> bool:
        """Whether step times depend on what else the machine does."""
        return self.beside != UNMEASURED or self.crowded

    @property
    def crowded(self) -> bool:
        """Whether they depend on what other engines do."""
        return self._profile.crowd is not None

    def among(self, trainer: bool, others: float) -> CalibratedCostModel:
        """Step times while that part of the other engines works, and the trainer does or does not: in between one alone
        and all, linear."""
        if not self.crowded:
            others = 1.0  # nothing depends on them
        if not trainer and others == 1.0:
            return self
        state = (trainer, others)
        if state not in self._among:
            by = self.beside if trainer else UNMEASURED
            profile = without(self._profile, 1.0 - others)
            profile = structs.replace(slowed(profile, by.decode, by.prefill), beside=None, crowd=None)
            self._among[state] = CalibratedCostModel(profile)
        return self._among[state]

    @property
    def outside_share(self) -> dict[str, float]:
        all_states = (self, *self._among.values())
        decode = sum(c._decode_outside for c in all_states) / max(sum(c._decode_asked for c in all_states), 1)
        prefill = sum(c._prefill_outside for c in all_states) / max(sum(c._prefill_asked for c in all_states), 1)
        return {"decode": decode, "prefill": prefill}

    def _row(self, batch: int) -> Row:
        d, r = self._profile.decode, self._profile.ranges
        fixed = d.fixed_s(batch)
        inside = r.batch[0] <= batch <= r.batch[1]
        low, high = r.context_per_sequence if inside else (inf, -inf)
        return row_through([(0.0, fixed), (1.0, fixed + d.per_context_token_s * batch)], low, high)

    def _prefill(self, new_tokens: int, attention: float, requests: int) -> tuple[float, bool]:
        p, (low, high) = self._profile.prefill, self._profile.ranges.new_tokens
        seconds = p.base_s + p.per_token_s * new_tokens + p.per_pair_s * attention + p.per_request_s * requests
        return seconds, not low <= new_tokens <= high
