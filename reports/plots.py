"""The four plots of a report, each drawn wide (1216 or 592 px) and narrow (358 px); the page shows one.

GPU time by cause (length = step time, height = GPUs, area = GPU time), staleness at both readings, a trajectory's time,
a weight update. It refuses to compute figures and to know colours: it places roles.
"""

from __future__ import annotations

import math

from msgspec import Struct

from reports import numbers
from reports.canvas import Canvas, text_width
from reports.compared import lane_words
from reports.comparison import Figures, Lane
from reports.palette import GPU_TIME, TRAJECTORY, UPDATE, chip_role
from reports.view import View, overlapped, update_parts, with_updates

FULL, HALF, NARROW = 1216, 592, 358
GAP = 0.6
"""Px of ground between two parts of a bar."""
HATCHED = {name for name, cause in GPU_TIME.items() if cause.stripes}


class Plot(Struct, frozen=True):
    """The same drawing for wide and narrow screens."""

    wide: str
    narrow: str

    @property
    def both(self) -> str:
        return self.wide + self.narrow


def axis_step(longest: float, about: int = 5) -> float:
    """A round step that gives about this many ticks."""
    raw = longest / about
    power = 10.0 ** math.floor(math.log10(raw))
    return next(k * power for k in (1, 2, 5, 10) if k * power >= 0.75 * raw)


def shortened(text: str, px: float) -> str:
    """Text cut to a width, with an ellipsis."""
    if text_width(text) <= px:
        return text
    return text[: max(1, int(px / text_width("x")) - 1)].rstrip(" ,+·") + "…"


def two_lines(text: str, px: float) -> list[str]:
    """Text in one or two lines of a width, cut at spaces where there are any."""
    if text_width(text) <= px:
        return [text]
    first, *words = text.split(" ")
    while words and text_width(f"{first} {words[0]}") <= px:
        first = f"{first} {words.pop(0)}"
    return [shortened(first, px), *([shortened(" ".join(words), px)] if words else [])]


def _grid(
    c: Canvas, left: float, scale: float, limit: float, top: float, bottom: float, unit: str, about: int = 5
) -> None:
    """Vertical lines with their values above."""
    step = axis_step(limit, about)
    ticks = [i * step for i in range(int(limit / step + 1e-9) + 1)]
    for i, t in enumerate(ticks):
        x = left + t * scale
        c.line(x, top, x, bottom, "line", "grid", under=True)
        label = f"{t:,.10g}" + (unit if i == len(ticks) - 1 else "")
        c.text(x, top - 5, label, "mute", "left" if i == 0 else "center")


# --- GPU time ---------------------------------------------------------------------------------------------------------


def gpu_time(view: View) -> Plot:
    wide = _gpu_time(view, FULL, 212, 120, 46.1, 18)
    narrow = _gpu_time(view, NARROW, 0, 74, 38.4, 16)
    return Plot(
        wide.svg("GPU time by cause, seconds per step, every pool of each variant", "w"),
        narrow.svg("GPU time by cause, seconds per step", "nw"),
    )


def _gpu_time(view: View, width: float, left: float, right: float, height: float, gap: float) -> Canvas:
    """`height`: px of all GPUs of a variant; `gap`: px between variants. A narrow plot has the name above its bar."""
    narrow = left == 0
    longest = max(lane.length for f in view.figures for lane in f.lanes)
    scale = (width - left - right) / longest
    most = max(f.gpus for f in view.figures)
    above = 20 if narrow else 0
    total = sum(above + height * f.gpus / most + 1.6 * (len(f.lanes) - 1) + gap for f in view.figures)
    c = Canvas(width, 20 + total - gap + 6)
    _grid(c, left, scale, longest, 16, c.height - 4, " s per step" if not narrow else " s", 5 if not narrow else 3)
    base = view.base.mean("step_time_s")
    y = 20.0
    for f in view.figures:
        name_y = y + 12 if not narrow else y + 11
        c.chip(0, name_y - 10, f.letter, chip_role(f.letter))
        c.text(20, name_y + 0.8, shortened(f.name, (left or width) - 24), "ink", extra="b")
        top = y = y + above
        for lane in f.lanes:
            h = height * lane.gpus / most
            if not narrow:
                first = len(f.lanes) == 1
                c.text(
                    left - 8,
                    y + (h / 2 + 12 if first else max(h / 2 + 4, 25 if lane is f.lanes[0] else 0)),
                    lane_words(f, lane),
                    "mute",
                    "right",
                )
            _lane(c, f, lane, left, y, h, scale)
            y += h + 1.6
        y -= 1.6
        end = left + max(lane.length for lane in f.lanes) * scale + 8
        middle = (top + y) / 2
        c.text(end, middle - 1, f.text("step_time_s"), "ink", extra="b halo")
        c.text(end, middle + 12, f"{numbers.percent(f.mean('gpu_idle_share'))} idle", "mute", extra="halo")
        y += gap
    if not view.comparison.single:
        x = left + base * scale
        c.line(x, 16, x, c.height - 4, "ink", "ref")
    return c


def _lane(c: Canvas, f: Figures, lane: Lane, left: float, y: float, h: float, scale: float) -> None:
    x, whole = left, sum(other.length * other.gpus for other in f.lanes)
    for cause, seconds in lane.seconds.items():
        w = seconds * scale
        share = numbers.percent(seconds * lane.gpus / whole, 1)
        what = GPU_TIME[cause].label
        c.rect(
            x,
            y,
            max(w - GAP, 0.3),
            h,
            cause,
            f"{what}: {numbers.seconds(seconds)} per step, {lane.gpus} GPUs, {share} of all GPU time",
        )
        if h >= 11:
            value = numbers.grouped(seconds, 0 if seconds >= 9.95 else 1)
            for text in (f"{what} {value} s", f"{GPU_TIME[cause].short} {value}", value):
                if text_width(text) + 8 <= w:
                    c.text(x + 5, y + h / 2 + 4, text, cause, extra="halo" if cause in HATCHED else "")
                    break
        x += w


# --- staleness --------------------------------------------------------------------------------------------------------


def staleness(view: View) -> Plot:
    n = len(view.figures)
    wide = _staleness(view, FULL if n > 5 else HALF, 92, n)
    narrow = _staleness(view, NARROW, 0, min(n, 3))
    return Plot(
        wide.svg(f"staleness at completion and at dequeue, {numbers.counted(n)} variants", "w"),
        narrow.svg("staleness at completion and at dequeue", "nw"),
    )


def _bins(view: View) -> int:
    """Values drawn: 0 to the largest of any histogram or bound, nine at most (the last then has all above)."""
    top = max(
        [
            0,
            *(v for f in view.figures for h in (f.completion, f.dequeue) for v in h),
            *(f.bound or 0 for f in view.figures),
        ]
    )
    return min(top, 8) + 1


def _staleness(view: View, width: float, left: float, columns: int) -> Canvas:
    bins = max(_bins(view), 3)
    pitch = (width - left) / columns
    rows = math.ceil(len(view.figures) / columns)
    floors = (112.0, 226.0) if left else (124.0, 266.0)
    block = floors[1] + 34
    c = Canvas(width, rows * block)
    cell = min((pitch - 16) / bins, 30)
    for i, f in enumerate(view.figures):
        x, y = left + (i % columns) * pitch, (i // columns) * block
        c.chip(x, y, f.letter, chip_role(f.letter))
        for k, words in enumerate(two_lines(f.name, pitch - 26)):
            c.text(x + 19, y + 11 + 13 * k, words, "ink", extra="b")
        for reading, histogram, floor in (("completion", f.completion, floors[0]), ("dequeue", f.dequeue, floors[1])):
            if i % columns == 0 and left:
                c.text(0, y + floor - 24, f"at {reading}", "ink", extra="b")
                c.text(0, y + floor - 10, "share in %", "mute")
            elif not left:
                c.text(x, y + floor - 86, f"at {reading}", "mute")
            _histogram(c, f, histogram, x, y + floor, cell, bins)
            mean = sum(v * share for v, share in histogram.items())
            c.text(x, y + floor + 26, f"mean {numbers.tenths(mean)}", "mute")
        if f.bound is not None and f.bound < bins:
            _bound(c, f.bound, x + (f.bound + 1) * cell, y + floors[1], x + pitch)
    return c


def _bound(c: Canvas, bound: int, edge: float, floor: float, limit: float) -> None:
    """A dashed line right of the last value that the bound allows; its label stays left of `limit`."""
    c.line(edge, floor - 83, edge, floor, "ink", "ref")
    text = f"η = {bound}"
    if edge + 3 + text_width(text) > limit:
        c.text(edge - 3, floor - 75, text, "mute", "right")
    else:
        c.text(edge + 3, floor - 75, text, "mute")


def _histogram(
    c: Canvas, f: Figures, histogram: dict[int, float], x: float, floor: float, cell: float, bins: int
) -> None:
    c.line(x, floor, x + cell * bins, floor, "line2", "ax")
    shares = [0.0] * bins
    for value, share in histogram.items():
        shares[min(value, bins - 1)] += share
    for value, share in enumerate(shares):
        middle = x + (value + 0.5) * cell
        more = "+" if value == bins - 1 and max(histogram, default=0) >= bins else ""
        c.text(middle, floor + 12, f"{value}{more}", "mute", "center")
        if share <= 0:
            continue
        h = max(60 * share, 1)
        c.rect(
            middle - cell / 2 + 1,
            floor - h,
            cell - 2,
            h,
            chip_role(f.letter),
            f"staleness {value}{more}: {numbers.percent(share, 1)}",
        )
        if share >= 0.01 and cell >= 13:
            c.text(middle, floor - h - 4, numbers.grouped(share * 100), "ink", "center")


# --- bars of parts ----------------------------------------------------------------------------------------------------


def _parts_bar(
    c: Canvas, parts: list[tuple[str, str, float, str]], x: float, y: float, h: float, scale: float, fine: bool
) -> float:
    """Draw (label, role, seconds, tooltip) one after the other, names and values where they fit. Returns the end's x.

    `fine`: values have a digit after the point.
    """
    for label, role, seconds, title in parts:
        w = seconds * scale
        c.rect(x, y, max(w - GAP, 0.3), h, role, title, "edge" if role in ("q3", "rest") else "")
        value = numbers.grouped(seconds, 1 if fine or seconds < 9.95 else 0)
        for text in (f"{label} {value}", value):
            if text_width(text) + 6 <= w:
                c.text(x + 4, y + h / 2 + 4, text, role)
                break
        x += w
    return x


def trajectory(view: View) -> Plot:
    """Mean seconds of a trained trajectory by what it was doing."""
    return Plot(
        _trajectory(view, HALF, 150).svg("where a trajectory's time goes", "w"),
        _trajectory(view, NARROW, 0).svg("where a trajectory's time goes", "nw"),
    )


def _trajectory(view: View, width: float, left: float) -> Canvas:
    figures = [f for f in view.figures if f.mean("trajectory_total_s") > 0]
    scale = (width - left - 60) / max(f.mean("trajectory_total_s") for f in figures)
    row = 30 if left else 44
    c = Canvas(width, row * len(figures))
    for i, f in enumerate(figures):
        y = i * row + (0 if left else 18)
        c.chip(0, y + 3 if left else y - 17, f.letter, chip_role(f.letter))
        c.text(19, y + 14 if left else y - 6, shortened(f.name, (left or width) - 24), "ink", extra="b")
        parts = [
            (p.label, p.role, s, f"{p.label}: {numbers.seconds(s)}, mean per trained trajectory")
            for name, p in TRAJECTORY.items()
            if (s := f.mean(f"trajectory_{name}_s")) > 0
        ]
        end = _parts_bar(c, parts, left, y, 20, scale, False)
        c.text(end + 6, y + 14, f.text("trajectory_total_s"), "ink", extra="b")
    return c


def update(view: View) -> Plot:
    """One weight update by part: what overlaps generation, and the pause."""
    rows = update_rows(view)
    words = "weight update by part"
    return Plot(_update(rows, HALF, 118).svg(words, "w"), _update(rows, NARROW, 0).svg(words, "nw"))


def update_rows(view: View) -> list[list[Figures]]:
    """Variants whose updates look the same (path and parts to a tenth of a second) share a row."""
    rows: dict[tuple[object, ...], list[Figures]] = {}
    for f in with_updates(view):
        parts = tuple(round(s, 1) for s in (*update_parts(f).values(), f.mean("update_pause_s")))
        rows.setdefault((f.path, overlapped(f), parts), []).append(f)
    return list(rows.values())


def _update(rows: list[list[Figures]], width: float, left: float) -> Canvas:
    longest = max(max(sum(update_parts(r[0]).values()), r[0].mean("update_total_s")) for r in rows)
    scale = (width - left - 64) / longest
    row = 54 if left else 68
    c = Canvas(width, 20 + row * len(rows))
    _grid(c, left, scale, longest, 14, c.height - 6, " s", 5 if left else 4)
    for i, figures in enumerate(rows):
        f = figures[0]
        y = 16 + i * row + (0 if left else 22)
        fitting = int((left or width) // 16) - (0 if left else 6)
        for k, g in enumerate(figures[:fitting]):
            c.chip(16 * k, y + 2 if left else y - 18, g.letter, chip_role(g.letter))
        c.text(0 if left else 16 * min(len(figures), fitting) + 6, y + 30 if left else y - 7, f.path, "ink", extra="b")
        _one_update(c, f, left, y, scale)
    return c


def _one_update(c: Canvas, f: Figures, left: float, y: float, scale: float) -> None:
    total, pause = f.mean("update_total_s"), f.mean("update_pause_s")
    parts = [
        (UPDATE[n].label, UPDATE[n].role, s, f"{UPDATE[n].label} {numbers.seconds(s)}")
        if n in UPDATE
        else ("other", "rest", s, f"waits between the parts {numbers.seconds(s)}")
        for n, s in update_parts(f).items()
    ]
    end = _parts_bar(c, parts, left, y, 18, scale, True)
    c.text(end + 6, y + 13, f.text("update_total_s"), "ink", extra="b")
    pool = {lane.lane for lane in f.lanes}
    if pool == {"shared"}:
        c.text(left, y + 32, "nothing to pause: the pool is between phases", "mute")
        return
    start = left + max(0.0, total - pause) * scale
    if start - left > 1:
        if overlapped(f):
            c.rect(left, y + 19, start - left - GAP, 4, "generate", "engines generate during this part")
        words = "generation continues" if overlapped(f) else "engines not paused"
        if text_width(words) < start - left:
            c.text(left, y + 35, words, "mute")
    c.line(start, y + 21, left + total * scale, y + 21, "weight_update", "pz")
    words = f"paused {f.text('update_pause_s')}"
    if start + text_width(words) > c.width:
        c.text(c.width, y + 35, words, "ink", "right")
    else:
        c.text(start, y + 35, words, "ink")
