"""A calibration profile: coefficients fitted to one machine, what they were fitted to, and where they hold.

A JSON object; all but `format`, `decode` and `prefill` may be missing. `pair`: one query token attending to one key
token. It refuses to know how the fit was made and what simulates with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

FORMAT = 1
Range = tuple[float, float]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Each sequence beyond the first `sequences` adds so much to a decode step."""

    sequences: float
    per_sequence_s: float


class DecodeFit(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds of one decode step: base + per sequence + per token of all contexts. What a further sequence adds may
    change with their number."""

    base_s: float
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    above: tuple[Section, ...] = ()
    """In order: from so many sequences on, each adds other seconds."""

    def fixed_s(self, sequences: float) -> float:
        """Of so many sequences, without their contexts."""
        seconds, start, each = self.base_s, 0.0, self.per_sequence_s
        for section in self.above:
            if sequences <= section.sequences:
                break
            seconds += each * (section.sequences - start)
            start, each = section.sequences, section.per_sequence_s
        return seconds + each * (sequences - start)

    def changed(self, base: Callable[[float], float], each: Callable[[float], float]) -> DecodeFit:
        """With other seconds for the base, and for each sequence."""
        return structs.replace(
            self,
            base_s=base(self.base_s),
            per_sequence_s=each(self.per_sequence_s),
            above=tuple(Section(s.sequences, each(s.per_sequence_s)) for s in self.above),
        )


class PrefillFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one prefill batch: base + per computed token + per pair + per request. `padded`: pairs are
    (cached + new)^2 of each request, as an engine computes them that pads queries to the length of the keys."""

    base_s: float
    per_token_s: float
    per_pair_s: float = 0.0
    per_request_s: float = 0.0
    padded: bool = False


class ArrivalFit(Struct, frozen=True, forbid_unknown_fields=True):
    """From the driver's decision to the scheduler's queue: `base_s`, and requests of one engine one after another,
    `per_request_s` each."""

    base_s: float
    per_request_s: float


class TrainerFit(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds of one optimizer update: fixed + per row (micro-batch of packed sequences) + per token (prompt and
    output) + per pair, of the rank that takes longest. A row's pairs are the square of its tokens: its mask is as wide
    as the row."""

    fixed_s: float
    per_row_s: float = 0.0
    per_token_s: float = 0.0
    per_pair_s: float = 0.0
    tokens: Range = (0, inf)
    """Of one update, that the measurements covered."""

    def seconds(self, rows: Sequence[int]) -> float:
        """Of an update of rows with so many tokens each."""
        pairs = sum(n * n for n in rows)
        return self.fixed_s + self.per_row_s * len(rows) + self.per_token_s * sum(rows) + self.per_pair_s * pairs


class UpdateTimes(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Mean seconds of one publication's parts by one path, of `bytes`; and what another byte adds where models of
    several sizes were measured."""

    prepare_s: float
    pause_s: float
    """An engine asked to pause, until it has."""
    copy_s: float
    requantize_s: float
    """Requantised where asked for, and in agreement."""
    resume_s: float
    engines: int = 1
    """Participants of the publications that were measured."""
    bytes: int = 0
    prepare_per_byte_s: float = 0.0
    copy_per_byte_s: float = 0.0
    requantize_per_byte_s: float = 0.0


class ControlTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Median seconds of one pause mode's control calls: an idle engine paused, one paused while `running` requests
    generate, the cache flushed while it is paused idle, and the engine resumed."""

    idle_s: float
    running_s: float
    running: int
    flush_s: float
    resume_s: float


class SwitchTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Median seconds of a shared pool's switch to each phase."""

    train_s: float
    generate_s: float


class BesideFit(Struct, frozen=True, forbid_unknown_fields=True):
    """How much longer things take on a machine that engines and a trainer share while both work: ratios to the same
    work alone."""

    decode: float
    """A decode step while the trainer trains."""
    prefill: float
    """A prefill batch while the trainer trains."""
    train: float
    """An optimizer update while all engines generate."""


class CrowdFit(Struct, frozen=True, forbid_unknown_fields=True):
    """What the other engines' work adds to an engine's steps on a machine that they share: seconds of a decode step,
    and how many times as long a prefill batch takes."""

    base_s: float
    per_sequence_s: float
    prefill: float


class FitRanges(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the measurements covered; answers outside are given and counted."""

    batch: Range = (1, inf)
    context_per_sequence: Range = (0, inf)
    new_tokens: Range = (1, inf)


class Interval(Struct, frozen=True, forbid_unknown_fields=True):
    """A coefficient with its 95 % interval."""

    value: float
    low: float
    high: float


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """How well a fit does: its coefficients with intervals, and relative residuals."""

    points: int
    coefficients: dict[str, Interval]
    residual_median: float
    """Of (fitted - measured) / measured without sign."""
    residual_max: float


class Profile(Struct, frozen=True):
    """Fitted coefficients of one model on one machine."""

    format: int
    decode: DecodeFit
    prefill: PrefillFit
    ranges: FitRanges = FitRanges()
    machine: dict[str, str] = {}
    """As `testbed.machine.machine` says it; empty: not said."""
    model: str = ""
    versions: dict[str, str] = {}
    """Package -> version of what was measured."""
    server: dict[str, Any] = {}
    """Arguments of the engine as it resolved them."""
    max_total_num_tokens: int | None = None
    """KV slots of the engine that was measured."""
    arrival: ArrivalFit | None = None
    trainer: TrainerFit | None = None
    probe_s: float | None = None
    """Seconds of a probe's optimizer update while the trainer was measured."""
    updates: dict[str, UpdateTimes] = {}
    """By path."""
    switch: SwitchTimes | None = None
    beside: BesideFit | None = None
    traffic_s: float = 0.0
    """Seconds of an engine that a request costs beyond its steps, with its prefill: what servers, driver and engines
    take from each other on the machine's cores as messages come and go. Below 0 where the steps say too much."""
    crowd: CrowdFit | None = None
    """Of several engines, all of which worked when the steps above were measured."""
    controls: dict[str, ControlTimes] = {}
    """By mode of pausing."""
    engines: int = 1
    """That worked side by side when they were measured."""
    start_s: float | None = None
    """From nothing to engines, trainer and environment that are ready, once."""
    quality: dict[str, Quality] = {}
    """Of `decode`, `prefill`, `arrival` and `trainer`."""


def write_profile(path: Path, profile: Profile) -> None:
    """As indented JSON, which has no infinity: an open range is left out. The folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def other(profile: Profile, versions: Mapping[str, str], machine: Mapping[str, str] | None = None) -> list[str]:
    """How the profile's versions, and its machine if one is given, differ from these. What the profile does not say is
    not looked at."""
    found = []
    for known, here in ((profile.versions, versions), (profile.machine, machine)):
        if here is not None:
            found += [f"{k} {was}, here {here.get(k, 'none')}" for k, was in known.items() if here.get(k) != was]
    return found
