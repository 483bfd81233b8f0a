"""How far simulated serving points are from the measured ones: relative errors and their distribution by group.

It refuses to know how a point is simulated and how the errors are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median, quantiles
from typing import Any

import msgspec
from msgspec import Struct

from testbed.commands.serving_points import Answer, Case, LeftOut, Point

FALLS_TO, REPEATS_WITHIN = 0.7, 1.5
"""A measurement is contradicted if its TPOT is below this share of that at the next fewer clients, or this many times
that of its repeat."""


class Compared(Struct, frozen=True):
    """A simulated point beside its measurement. Errors are relative, with sign."""

    case: Case
    answer: Answer
    contradicted: bool

    @property
    def point(self) -> Point:
        return self.case.point

    @property
    def tpot(self) -> float:
        return self.answer.tpot_ms / self.point.tpot_ms - 1

    @property
    def ttft(self) -> float:
        return self.answer.ttft_ms / self.point.ttft_ms - 1

    @property
    def bare_tpot(self) -> float:
        return self.answer.bare_tpot_ms / self.point.tpot_ms - 1


class Spread(Struct, frozen=True):
    """Distribution of a group's relative errors: mean and median of their size, deciles with sign."""

    points: int
    mean: float
    median: float
    p10: float
    p50: float
    p90: float


class Group(Struct, frozen=True):
    """`tpot` with the step's overheads, `bare_tpot` with the tables alone."""

    by: str
    name: str
    tpot: Spread
    bare_tpot: Spread
    ttft: Spread


def compare(cases: Sequence[Case], answers: Sequence[Answer]) -> list[Compared]:
    """Answers in the order of the cases."""
    wrong = contradicted([c.point for c in cases])
    return [Compared(c, a, c.point.id in wrong) for c, a in zip(cases, answers, strict=True)]


def contradicted(points: Iterable[Point]) -> set[str]:
    """Ids of measurements that others of the same engine and lengths contradict (`FALLS_TO`, `REPEATS_WITHIN`)."""
    alike: dict[tuple[Any, ...], list[Point]] = {}
    for p in points:
        key = (p.system, p.backend, p.model_path, p.precision, p.tp_size, p.moe_ep_size, p.isl, p.osl)
        alike.setdefault(key, []).append(p)
    found = set()
    for same in alike.values():
        for p in same:
            repeats = min(q.tpot_ms for q in same if q.concurrency == p.concurrency)
            next_fewer = max((q.concurrency for q in same if q.concurrency < p.concurrency), default=0)
            before = min((q.tpot_ms for q in same if q.concurrency == next_fewer), default=0.0)
            if p.tpot_ms > REPEATS_WITHIN * repeats or p.tpot_ms < FALLS_TO * before:
                found.add(p.id)
    return found


def spread(errors: Sequence[float]) -> Spread:
    deciles = quantiles(errors, n=10, method="inclusive") if len(errors) > 1 else [errors[0]] * 9
    sizes = [abs(e) for e in errors]
    return Spread(len(errors), mean(sizes), median(sizes), deciles[0], deciles[4], deciles[8])


def headlines(compared: Sequence[Compared]) -> list[Group]:
    """All points; those that the overheads were fitted to and the others; without contradicted measurements."""
    parts: dict[str, list[Compared]] = {
        "all": list(compared),
        "fitted to": [c for c in compared if c.point.fitted],
        "predicted": [c for c in compared if not c.point.fitted],
        "predicted, without contradicted measurements": [
            c for c in compared if not c.point.fitted and not c.contradicted
        ],
    }
    return [_group("part", name, part) for name, part in parts.items() if part]


BY: dict[str, Callable[[Compared], str]] = {
    "engine": lambda c: _engine(c.point),
    "GPU": lambda c: c.point.gpu,
    "backend": lambda c: c.point.backend,
    "precision": lambda c: c.point.precision or "bf16",
    "clients": lambda c: _octave(c.point.concurrency),
    "lengths": lambda c: f"{c.point.isl} x {c.point.osl}",
}


def groups(compared: Sequence[Compared]) -> list[Group]:
    """By engine, GPU, backend, precision, clients and lengths."""
    found = []
    for by, name_of in BY.items():
        parts: dict[str, list[Compared]] = {}
        for c in compared:
            parts.setdefault(name_of(c), []).append(c)
        found += [_group(by, name, part) for name, part in sorted(parts.items(), key=lambda x: _natural(x[0]))]
    return found


def _engine(p: Point) -> str:
    return f"{p.model}, {p.backend} {p.backend_version or '?'}, {p.gpu} x {p.tp_size}"


def _octave(concurrency: int) -> str:
    low = 1 << (concurrency.bit_length() - 1)
    return f"{low} to {2 * low - 1}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in names in their order."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(" ")]


def _group(by: str, name: str, part: Sequence[Compared]) -> Group:
    return Group(
        by, name, spread([c.tpot for c in part]), spread([c.bare_tpot for c in part]), spread([c.ttft for c in part])
    )


def figures(compared: Sequence[Compared], left_out: Sequence[LeftOut], coefficients: Any) -> dict[str, Any]:
    """Everything, plain, for `--json`."""
    return {
        "coefficients": msgspec.to_builtins(coefficients),
        "headlines": msgspec.to_builtins(headlines(compared)),
        "groups": msgspec.to_builtins(groups(compared)),
        "points": [
            {
                **msgspec.to_builtins(c.point),
                "fitted": c.point.fitted,
                "contradicted": c.contradicted,
                "launch": msgspec.to_builtins(c.case.launch),
                "simulated": msgspec.to_builtins(c.answer),
            }
            for c in compared
        ],
        "left_out": dict(reasons(left_out)),
    }


def reasons(left_out: Iterable[LeftOut]) -> list[tuple[str, int]]:
    """Why points were left out, and how many, the most frequent reason first."""
    same = "the same measurement"
    short = ("listed more than once" if x.reason.startswith(same) else x.reason for x in left_out)
    return Counter(short).most_common()
