"""What updates did, as small plots on one drawing: one a series, a line per variant, a band over its seeds.

Drawn wide (1216 px, three beside each other) and narrow (358 px) like the other plots. It refuses to compute figures
and to know colours."""

from __future__ import annotations

import math

from msgspec import Struct

from reports import numbers
from reports.canvas import Canvas, text_width
from reports.learning import curve, shown
from reports.palette import chip_role
from reports.plots import FULL, NARROW, Plot, axis_step, shortened
from reports.reward import Curve
from reports.reward_plot import spread_out
from reports.series import NATS, SERIES, Series
from reports.view import View

GAP = 28
HEAD, FOOT, LEFT, RIGHT = 24.0, 34.0, 52.0, 20.0
"""Px of a small plot above, below and beside its axes."""
DECADES = 1.5
"""A divergence that spans more orders of magnitude has a logarithmic axis, if it is above 0 throughout."""


class Scale(Struct, frozen=True):
    """Values to the share of an axis' height, and the ticks on it."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        v = math.log10(value) if self.logarithmic else value
        return (v - self.low) / (self.high - self.low)


def scale_of(curves: list[Curve], series: Series) -> Scale:
    """From the smallest to the largest value of any seed; a linear axis holds the value at rest as well."""
    low, high, rest = min(min(c.low) for c in curves), max(max(c.high) for c in curves), series.rest
    if series.unit == NATS and low > 0 and math.log10(high / low) > DECADES:
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        every = math.ceil((last - first) / 4)
        return Scale(first, last, True, tuple(10.0**k for k in range(first, last + 1, every)))
    low, high = min(low, rest), max(high, rest)
    step = axis_step(high - low or abs(high) or 1.0, 3)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return Scale(first * step, last * step, False, tuple(k * step for k in range(first, last + 1)))


def learning(view: View) -> Plot:
    names = shown(view.comparison)
    words = "what the updates did, by RL step"
    return Plot(
        _learning(view, names, FULL, 3).svg(f"{words}, {numbers.counted(len(names))} figures", "w"),
        _learning(view, names, NARROW, 1).svg(words, "nw"),
    )


def _learning(view: View, names: list[str], width: float, columns: int) -> Canvas:
    height = HEAD + max(104.0, 15.0 * len(view.figures)) + FOOT
    pitch = (width + GAP) / columns
    c = Canvas(width, math.ceil(len(names) / columns) * height)
    for i, name in enumerate(names):
        _one(c, view, name, (i % columns) * pitch, (i // columns) * height, pitch - GAP, height)
    return c


def _one(c: Canvas, view: View, name: str, x: float, y: float, width: float, height: float) -> None:
    series = SERIES[name]
    drawn = [
        (f, k) for f, v in zip(view.figures, view.comparison.variants, strict=True) if (k := curve(v, name)) is not None
    ]
    curves = [k for _, k in drawn]
    left, right, top, bottom = x + LEFT, x + width - RIGHT, y + HEAD, y + height - FOOT
    first = min(k.batches[0] for k in curves)
    steps = max(max(k.batches[-1] for k in curves) - first, 1)
    scale = scale_of(curves, series)

    def at(batch: float, value: float) -> tuple[float, float]:
        return left + (batch - first) / steps * (right - left), bottom - scale.share(value) * (bottom - top)

    c.text(x, y + 11, series.label, "ink", extra="b")
    after = x + text_width(series.label) * 1.08 + 8
    c.text(after, y + 11, shortened(series.unit, x + width - after), "mute")
    for tick in scale.ticks:
        place = at(first, tick)[1]
        c.line(left, place, right, place, "line2" if tick == series.rest else "line", "grid")
        c.text(left - 6, place + 4, _tick(name, tick), "mute", "right")
    several = len(view.comparison.seeds) > 1
    ends = []
    for f, k in drawn:
        if several and len(k.batches) > 1:
            outline = [*zip(k.batches, k.high, strict=True), *reversed(list(zip(k.batches, k.low, strict=True)))]
            c.area(
                [at(*p) for p in outline], chip_role(f.letter), f"{f.letter} {f.name}, lowest to highest seed", "band"
            )
    for f, k in drawn:
        points = [at(*p) for p in zip(k.batches, k.mean, strict=True)]
        ends.append(points[-1])
        if len(points) == 1:
            points = [points[0], (points[0][0] + 8, points[0][1])]
        c.curve(points, chip_role(f.letter), f"{f.letter} {f.name}, {series.label}", "curve")
    if not view.comparison.single:
        for (f, _), place in zip(drawn, spread_out([e[1] for e in ends], 15, top + 4, bottom - 4), strict=True):
            c.chip(right + 5, place - 7, f.letter, chip_role(f.letter))
    tick = max(1, round(axis_step(steps, 4)))
    for step in range(-(-first // tick) * tick, first + steps + 1, tick):
        c.text(at(step, 0 if not scale.logarithmic else 1)[0], bottom + 14, numbers.grouped(step), "mute", "center")
    c.text(at(first + steps / 2, 0 if not scale.logarithmic else 1)[0], bottom + 27, "RL step", "mute", "center")


def _tick(name: str, value: float) -> str:
    if name.endswith("_share") or name == "effective_sample_size":
        return numbers.percent(value)
    return numbers.tick(value)
