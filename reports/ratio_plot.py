"""Histograms of probability ratios, one small plot a variant and ratio, on one drawing.

Both axes are logarithmic: right and left the distance of the ratio from 1, upward the share of tokens, so that a bulk
around 1 and one token in a million can be read in one plot. Drawn wide (1216 px, three beside each other) and narrow
(358 px). It refuses to compute figures and to know colours."""

from __future__ import annotations

import math

from reports import numbers
from reports.canvas import Canvas, text_width
from reports.comparison import Figures
from reports.palette import chip_role
from reports.plots import FULL, NARROW, Plot, shortened
from reports.ratios import RATIOS, counts, ratio_text, shown
from reports.view import View
from testbed.metrics.ratios import FARTHEST, LEAST, PER_DECADE, edges

GAP, HEAD, FOOT, LEFT, HEIGHT = 28.0, 40.0, 30.0, 46.0, 96.0
"""Px between plots, above and below the axes, left of them; and of the upright axis."""
LOWEST = -6
"""Power of ten of the smallest share that is drawn to scale."""

Panel = tuple[Figures, str, dict[int, int], tuple[float, float] | None]
"""Variant, name of the ratio, its counts, and where the loss clips it."""


def ratios(view: View) -> Plot:
    panels = [
        (f, name, bins, v.runs[0].clip if name == "ratio" else None)
        for name in shown(view.comparison)
        for f, v in zip(view.figures, view.comparison.variants, strict=True)
        if (bins := counts(v, name))
    ]
    several = len(view.figures) > 1
    columns = min(len(view.figures) if several else len(panels), 3)  # a row for each ratio, as far as it fits
    words = "tokens by probability ratio"
    return Plot(
        _ratios(panels, FULL, columns).svg(f"{words}, {numbers.counted(len(panels))} histograms", "w"),
        _ratios(panels, NARROW, 1).svg(words, "nw"),
    )


def _ratios(panels: list[Panel], width: float, columns: int) -> Canvas:
    pitch, height = (width + GAP) / columns, HEAD + HEIGHT + FOOT
    c = Canvas(width, math.ceil(len(panels) / columns) * height)
    farthest = max(abs(k) for _, _, bins, _ in panels for k in bins)
    last = min(max(math.ceil(farthest / PER_DECADE), 2) * PER_DECADE, FARTHEST)
    smallest = min(min(bins.values()) / sum(bins.values()) for _, _, bins, _ in panels)
    floor = max(math.floor(math.log10(smallest) - 1e-9), LOWEST)
    for i, panel in enumerate(panels):
        _panel(c, panel, (i % columns) * pitch, (i // columns) * height, pitch - GAP, last, floor)
    return c


def _panel(c: Canvas, panel: Panel, x: float, y: float, width: float, last: int, floor: int) -> None:
    f, name, bins, clip = panel
    left, right, top, bottom = x + LEFT, x + width, y + HEAD, y + HEAD + HEIGHT
    cell, total = (right - left) / (2 * last + 1), sum(bins.values())
    middle = (left + right) / 2
    c.chip(x, y, f.letter, chip_role(f.letter))
    c.text(x + 19, y + 11, shortened(f.name, width - 20), "ink", extra="b")
    c.text(x + 19, y + 25, f"{RATIOS[name].label}, {numbers.grouped(total)} tokens", "mute")
    for power in range(0, floor - 1, -1 if floor > -4 else -2):
        at = bottom - HEIGHT * (1 - power / floor)
        c.line(left, at, right, at, "line", "grid")
        c.text(left - 6, at + 4, numbers.percent(10.0**power, max(0, -2 - power)), "mute", "right")
    c.line(left, bottom, right, bottom, "line2", "ax")
    for k, n in bins.items():
        share = n / total
        height = max(HEIGHT * (1 - math.log10(share) / floor), 1.5) if floor else HEIGHT
        low, high = edges(k)
        title = f"{ratio_text(low)} to {ratio_text(high)}: {numbers.percent(share, 2 if share >= 1e-4 else 4)}"
        c.rect(middle + (k - 0.5) * cell + 0.3, bottom - height, cell - 0.6, height, chip_role(f.letter), title)
    for bound in clip or ():
        place = middle + _position(bound) * cell
        if left <= place <= right:
            c.line(place, top, place, bottom, "ink", "ref")
    _ticks(c, middle, cell, last, bottom)


def _position(ratio: float) -> float:
    """Bins from the middle to a ratio above 0, within its bin too."""
    distance = math.log(ratio) if ratio > 0 else -math.inf
    if abs(distance) < LEAST:
        return 0.0
    return math.copysign(PER_DECADE * math.log10(abs(distance) / LEAST) + 0.5, distance)


def _ticks(c: Canvas, middle: float, cell: float, last: int, bottom: float) -> None:
    """1 in the middle, then every power of ten of the distance from it that has room."""
    c.text(middle, bottom + 14, "1", "mute", "center")
    end = 0.0
    for decade in range(1, last // PER_DECADE + 1):
        distance = LEAST * 10**decade
        above, below = (_word(distance), _word(-distance))
        away = (decade * PER_DECADE + 0.5) * cell
        half = text_width(above) / 2
        if away - half < end + 6 or away + half > (last + 0.5) * cell + 8:
            continue
        end = away + half
        for side, words in ((1, above), (-1, below)):
            c.line(middle + side * away, bottom, middle + side * away, bottom + 4, "line2", "ax")
            c.text(middle + side * away, bottom + 14, words, "mute", "center")


def _word(distance: float) -> str:
    """Of exp(distance): `+1 %`, `−0.1 %`; from a tenth on `× 1.1`, `÷ 2.7`."""
    far = abs(distance)
    if far < 0.05:
        return ("+" if distance > 0 else numbers.MINUS) + numbers.percent(far, 0 if far > 0.005 else 1)
    return f"{'×' if distance > 0 else '÷'}{numbers.NBSP}{math.exp(far):.2g}"
