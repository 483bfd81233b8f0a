"""How fast a machine was around a run: closed loops on the engines right before and after it, and a profile for that
speed.

A machine that others share is slower by some per cent for minutes. Loops tell that from what a simulation gets wrong:
they know nothing of the run between them. It refuses to know how loops are driven and what a profile predicts for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from testbed.calibration.design import TrafficPoint
from testbed.calibration.profile import Profile
from testbed.run_files import SPEED

T = TypeVar("T", bound=Struct)
PARTS = ("decode", "prefill", "arrival", "switch", "crowd")
BY_NAME = ("updates", "controls")


NEAREST = 2
"""Probes on each side of a run: one that something else disturbed does not decide."""


class Probe(Struct, frozen=True):
    """One look at the machine: what the loop took on each engine, and seconds of an optimizer update that is always the
    same (None where engines and trainer share GPUs)."""

    loop: list[TrafficPoint]
    update_s: float | None = None


class MachineSpeed(Struct, frozen=True):
    """The nearest looks, in order."""

    before: list[Probe]
    after: list[Probe]


def around(probes: Sequence[Probe], run: int) -> MachineSpeed:
    """Of run number `run` (from 0) among runs with a probe before the first and after each; those that are there."""
    return MachineSpeed(list(probes[max(run + 1 - NEAREST, 0) : run + 1]), list(probes[run + 1 : run + 1 + NEAREST]))


class Loops(Struct):
    """The closed loop of a calibration, before, between and after the experiments on the engine, and before and after
    the short run; and the update of a probe, before, between and after those that are fitted. One is no better than a
    run's own looks at the machine: all that is simulated rests on their medians."""

    engine: list[TrafficPoint]
    short_run: list[TrafficPoint]
    updates_s: list[float]


def write_speed(folder: Path, speed: MachineSpeed) -> None:
    """Beside the journal of the run."""
    (folder / SPEED).write_bytes(msgspec.json.encode(speed))


def read_speed(folder: Path) -> MachineSpeed | None:
    """None where it was not measured. Raises `ValueError` for a file that is something else."""
    try:
        return msgspec.json.decode((folder / SPEED).read_bytes(), type=MachineSpeed)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as e:
        raise ValueError(f"{folder / SPEED} does not hold closed loops: {e}") from e


def longer(these: Sequence[TrafficPoint], those: Sequence[TrafficPoint]) -> float:
    """How many times as long these loops took as those (medians); 1 where there are none, or where they are other
    loops."""
    if not these or not those or any(p.traffic != these[0].traffic for p in (*these, *those)):
        return 1.0
    return median(p.seconds for p in these) / median(p.seconds for p in those)


def times(part: T, factor: float) -> T:
    """All its seconds are so many times as long, those of its sections too."""
    changed: dict[str, Any] = {}
    for field in part.__struct_fields__:
        value = getattr(part, field)
        if field == "seconds" or field.endswith("_s"):
            changed[field] = factor * value
        elif isinstance(value, tuple) and all(isinstance(one, Struct) for one in value):
            changed[field] = tuple(times(one, factor) for one in value)
    return structs.replace(part, **changed)


def at_speed(profile: Profile, factor: float, trainer: float | None = None) -> Profile:
    """Of the machine when everything takes `factor` times as long, but for optimizer updates, which take `trainer`
    times as long (None: `factor` too)."""
    parts = {name: times(p, factor) for name in PARTS if (p := getattr(profile, name)) is not None}
    named = {name: {k: times(p, factor) for k, p in getattr(profile, name).items()} for name in BY_NAME}
    if profile.trainer is not None:
        parts["trainer"] = times(profile.trainer, factor if trainer is None else trainer)
    return structs.replace(profile, traffic_s=factor * profile.traffic_s, **parts, **named)
