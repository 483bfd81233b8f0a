"""The curve of mean reward by RL step: a line per variant, and a band from its lowest seed to its highest.

Drawn wide (1216 px) and narrow (358 px) like the other plots. It refuses to compute figures and to know colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from reports import numbers
from reports.canvas import Canvas, text_width
from reports.palette import chip_role
from reports.plots import FULL, NARROW, Plot, axis_step, shortened
from reports.reward import LAST, Curve, curve
from reports.view import View, rewarded_view
from testbed.metrics.scores import fifth

Place = Callable[[float, float], tuple[float, float]]
"""(step, reward) -> px."""
BOTTOM = 34
"""Px below the axis: numbers of the steps and their word."""


def reward(view: View) -> Plot:
    view = rewarded_view(view)
    curves = [curve(v) for v in view.comparison.variants]
    words = "mean reward of a batch by RL step"
    return Plot(
        _reward(view, curves, FULL, 220, 250).svg(f"{words}, {numbers.counted(len(curves))} variants", "w"),
        _reward(view, curves, NARROW, 190, 0).svg(words, "nw"),
    )


def spread_out(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """The places, moved apart to at least `gap` in their order, between `low` and `high` as far as they fit."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    out = list(places)
    for before, i in zip([None, *order], order, strict=False):
        out[i] = max(out[i], low if before is None else out[before] + gap)
    for after, i in zip([None, *reversed(order)], reversed(order), strict=False):
        out[i] = min(out[i], high if after is None else out[after] - gap)
    return out


def _reward(view: View, curves: list[Curve], width: float, height: float, names: float) -> Canvas:
    """`height`: px of the axis. `names`: px right of it for names; 0 has them above the plot."""
    top, left = 20.0 + (0 if names else 18 * len(curves) + 4), 34.0
    right = width - (names or 24)
    bottom = top + height
    c = Canvas(width, bottom + BOTTOM)
    first = min(x.batches[0] for x in curves)
    steps = max(max(x.batches[-1] for x in curves) - first, 1)
    lowest, highest = min(0.0, *(min(x.low) for x in curves)), max(0.0, *(max(x.high) for x in curves))
    tick = axis_step(highest - lowest or 1.0, 4)
    floor, ceiling = math.floor(lowest / tick + 1e-9), math.ceil(highest / tick - 1e-9)
    ceiling = max(ceiling, floor + 1)

    def at(batch: float, value: float) -> tuple[float, float]:
        x = left + (batch - first) / steps * (right - left)
        return x, bottom - (value / tick - floor) / (ceiling - floor) * height

    c.text(0, top - 8, "mean reward of a batch; values: last fifth", "mute")
    _fifths(c, view, at, top, bottom)
    for k in range(floor, ceiling + 1):
        y = at(first, k * tick)[1]
        c.line(left, y, right, y, "line2" if k == 0 else "line", "grid")
        c.text(left - 6, y + 4, numbers.grouped(k * tick, max(0, -math.floor(math.log10(tick)))), "mute", "right")
    _steps(c, at, first, steps, bottom, 10 if names else 4)
    several = len(view.comparison.seeds) > 1
    for f, drawn in zip(view.figures, curves, strict=True):
        if several and len(drawn.batches) > 1:
            outline = [
                *zip(drawn.batches, drawn.high, strict=True),
                *reversed(list(zip(drawn.batches, drawn.low, strict=True))),
            ]
            c.area(
                [at(*p) for p in outline], chip_role(f.letter), f"{f.letter} {f.name}, lowest to highest seed", "band"
            )
    ends = []
    for f, drawn in zip(view.figures, curves, strict=True):
        points = [at(*p) for p in zip(drawn.batches, drawn.mean, strict=True)]
        ends.append(points[-1])
        if len(points) == 1:
            points = [(points[0][0], points[0][1]), (points[0][0] + 8, points[0][1])]
        c.curve(points, chip_role(f.letter), f"{f.letter} {f.name}, mean reward of a batch", "curve")
    labels = spread_out([at(first, f.mean(LAST))[1] for f in view.figures], 17, top + 4, bottom - 4)
    for i, (f, (x, y), label) in enumerate(zip(view.figures, ends, labels, strict=True)):
        value = f.text(LAST)
        c.line(x, y, right + 8, label, "line2", "grid")
        c.chip(right + 8, label - 7, f.letter, chip_role(f.letter))
        if names:
            c.text(right + 27, label + 4, value, "ink", extra="b")
            after = right + 27 + text_width(value) + 6
            c.text(after, label + 4, shortened(f.name, width - after), "mute")
        else:
            c.chip(0, 18 * i, f.letter, chip_role(f.letter))
            c.text(20, 18 * i + 11, shortened(f.name, width - 30 - text_width(value)), "ink", extra="b")
            c.text(width, 18 * i + 11, value, "mute", "right")
    return c


def _fifths(c: Canvas, view: View, at: Place, top: float, bottom: float) -> None:
    """A ground behind the batches of which the figures are made; only where all runs have the same ones."""
    runs = {tuple(s.batch for s in r.steps) for r in view.comparison.runs}
    if len(runs) > 1 or len(min(runs)) < 2:
        return
    (batches,) = runs
    n = fifth(len(batches))
    for words, low, high in (
        ("first fifth", batches[0], batches[n - 1] + 0.5),
        ("last fifth", batches[-n] - 0.5, batches[-1]),
    ):
        x1, x2 = at(low, 0)[0], at(high, 0)[0]
        c.rect(x1, top, x2 - x1, bottom - top, "lane")
        if text_width(words) + 8 <= x2 - x1:
            c.text((x1 + x2) / 2, bottom - 6, words, "mute", "center", "halo")


def _steps(c: Canvas, at: Place, first: int, steps: int, bottom: float, about: int) -> None:
    """Numbers of RL steps below the axis."""
    tick = max(1, round(axis_step(steps, about)))
    for step in range(-(-first // tick) * tick, first + steps + 1, tick):
        c.text(at(step, 0)[0], bottom + 15, numbers.grouped(step), "mute", "center")
    c.text(at(first + steps / 2, 0)[0], bottom + 30, "RL step", "mute", "center")
