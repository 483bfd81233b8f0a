"""The drawings of a validation: turns in engines over time, and the turns that the simulation misses most.

Real is drawn in ink, simulated in green. It refuses to compute figures and to know colours.
"""

from __future__ import annotations

from collections.abc import Sequence

from reports import numbers
from reports.canvas import Canvas
from reports.palette import TRAJECTORY
from reports.plots import FULL, axis_step
from testbed.metrics.turns import Turn
from testbed.validation.result import Validation

LEFT, RIGHT, HEAD, FOOT = 52.0, 16.0, 8.0, 32.0
COLUMNS = 300
"""Bins of time over the measured steps."""
PARTS = (("queue", "queue_s"), ("prefill", "prefill_s"), ("decode", "decode_s"))


def running(v: Validation) -> str:
    """Turns in engines over the measured steps of the first real run, and of its simulation with the same work: the
    mean over each of `COLUMNS` bins of time."""
    width, height = float(FULL), 170.0
    ends = {name: steps[-1][0] for name, steps in v.running.items()}
    longest = max(*ends.values(), 1e-9)
    curves = {name: binned(steps, longest) for name, steps in v.running.items()}
    most = max(*(n for curve in curves.values() for _, n in curve), 1.0)
    step = axis_step(most, 3)
    top = -(-most // step) * step
    c = Canvas(width, height)
    x = (width - LEFT - RIGHT) / longest
    y = (height - HEAD - FOOT) / top

    def at(t: float, n: float) -> tuple[float, float]:
        return LEFT + t * x, height - FOOT - n * y

    tick = 0.0
    while tick <= top:
        c.line(LEFT, at(0, tick)[1], width - RIGHT, at(0, tick)[1], "line", "grid", under=True)
        c.text(LEFT - 6, at(0, tick)[1] + 4, numbers.tick(tick), "mute", "right")
        tick += step
    every = axis_step(longest, 6)
    for k in range(int(longest / every) + 1):
        c.text(at(k * every, 0)[0], height - FOOT + 14, numbers.tick(k * every), "mute", "center")
    middle = LEFT + (width - LEFT - RIGHT) / 2
    c.text(middle, height - 4, "seconds since the first measured step began", "mute", "center")
    for name, role in (("timing", "vC"), ("real", "ink")):
        points = [at(t, n) for t, n in curves[name] if t <= ends[name]]
        if len(points) > 1:
            c.curve(points, role, "real" if name == "real" else "simulated with the run's own work", "curve")
    return c.svg("turns in engines over time, real and simulated")


def binned(steps: Sequence[tuple[float, int]], longest: float) -> list[tuple[float, float]]:
    """Time means of a step function over equal bins of [0, longest], at their middles."""
    size = longest / COLUMNS
    areas = [0.0] * COLUMNS
    for (t, n), after in zip(steps, [*(t for t, _ in steps[1:]), longest], strict=True):
        k = min(int(t / size), COLUMNS - 1)
        while n and t < after and k < COLUMNS:
            end = min(after, (k + 1) * size)
            areas[k] += n * max(end - t, 0.0)
            t, k = end, k + 1
    return [((k + 0.5) * size, area / size) for k, area in enumerate(areas)]


def worst_turns(v: Validation) -> str:
    """Two bars a turn, real above simulated, from the moment it was sent."""
    width, bar, gap, left = float(FULL), 11.0, 9.0, 300.0
    height = HEAD + len(v.worst) * (2 * bar + 2 + gap) + FOOT
    longest = max(*(t.latency_s for w in v.worst for t in (w.real, w.simulated)), 1e-9)
    c = Canvas(width, height)
    scale = (width - left - RIGHT - 90) / longest
    step = axis_step(longest, 6)
    for k in range(int(longest / step) + 1):
        x = left + k * step * scale
        c.line(x, HEAD - 4, x, height - FOOT + 2, "line", "grid", under=True)
        c.text(x, height - FOOT + 16, numbers.tick(k * step), "mute", "center")
    c.text(left + (width - left - RIGHT - 90) / 2, height - 2, "seconds since it was sent", "mute", "center")
    y = HEAD
    for w in v.worst:
        name = f"task {w.real.task}, member {w.real.member}, turn {w.real.turn}"
        c.text(0, y + 15, name, "ink")
        for side, turn in (("real", w.real), ("simulated", w.simulated)):
            c.text(left - 8, y + bar - 2, side, "mute", "right")
            _bar(c, turn, left, y, bar, scale)
            y += bar + 2
        y += gap - 2
    return c.svg("the turns whose latency the simulation misses most")


def _bar(c: Canvas, turn: Turn, left: float, y: float, height: float, scale: float) -> None:
    x = left
    for name, attribute in PARTS:
        seconds: float = getattr(turn, attribute)
        part = TRAJECTORY[name]
        c.rect(x, y, max(seconds * scale, 0.0), height, part.role, f"{part.label}: {numbers.seconds(seconds)}", "edge")
        x += max(seconds * scale, 0.0)
    c.text(x + 5, y + height - 2, f"{numbers.grouped(1000 * turn.latency_s)} ms", "mute")
