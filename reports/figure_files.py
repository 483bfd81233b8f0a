"""Learning figures as files for documents: reward, and the KL that the run is about, as small SVG and PNG.

A line per variant (mean over seeds), a band from the lowest seed to the highest, the margin in the key. Light ground,
the colours of the page. matplotlib is imported when a figure is drawn, not before. It refuses to compute figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from reports import numbers
from reports.comparison import Figures, VariantRuns
from reports.learning import curve, shown
from reports.learning_plot import scale_of
from reports.palette import BASE, VARIANTS
from reports.reward import FIRST, LAST, Curve
from reports.reward import curve as reward_curve
from reports.series import SERIES, Series
from reports.spread import Stat
from reports.view import View, view_of

FOLDER = "figures"
FORMATS = ("svg", "png")
WIDTH, HEIGHT, DPI = 5.6, 4.2, 100
"""Inches of one pair of axes with its key; dots per inch of the PNG."""
KL_CHOICES = (("teacher_kl", "reference_kl"), ("engine_kl", "update_kl"), ("mismatch_kl",))
"""What a run with any of these is about, the first that there are: a teacher or a reference, else both differences."""


class Axes(Struct, frozen=True):
    """One pair of axes."""

    label: str
    """Of the upright axis, with its unit."""
    curve: Callable[[VariantRuns], Curve | None]
    ends: Callable[[Figures], tuple[Stat, Stat] | None]
    """First and last fifth of the batches."""
    write: Callable[[float, float], str]
    series: Series | None = None
    """Of what updates did; None: reward."""


REWARD = Axes(
    "mean reward of a batch",
    lambda v: reward_curve(v) if all(r.rewarded for r in v.runs) else None,
    lambda f: (f.stats[FIRST], f.stats[LAST]) if FIRST in f.stats else None,
    numbers.hundredths,
)


def write_figures(comparison: Any, folder: Path) -> dict[str, Path]:
    """`FOLDER/reward.svg`, `.png` of real runs, `kl.svg`, `.png` where they have a KL; paths by file name."""
    if not comparison.rewarded and not shown(comparison):
        return {}
    view = view_of(comparison)
    drawings = {"reward": [REWARD]} if comparison.rewarded else {}
    chosen = next((names for choice in KL_CHOICES if (names := [n for n in choice if n in shown(comparison)])), [])
    if chosen:
        drawings["kl"] = [_series(name) for name in chosen]
    if drawings:
        (folder / FOLDER).mkdir(exist_ok=True)
    return {
        path.name: path
        for name, axes in drawings.items()
        for path in _written(view, axes, {"reward": "reward", "kl": "KL divergence"}[name], folder / FOLDER / name)
    }


def _series(name: str) -> Axes:
    def ends(f: Figures) -> tuple[Stat, Stat] | None:
        found = f.learning.get(name)
        return None if found is None else (found.first, found.last)

    series = SERIES[name]
    return Axes(f"{series.label}, {series.unit}", lambda v: curve(v, name), ends, series.write, series)


def _written(view: View, axes: list[Axes], what: str, stem: Path) -> list[Path]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * len(axes), HEIGHT + 0.18 * max(0, len(view.figures) - 2)), layout="constrained")
    FigureCanvasAgg(figure)
    seeds = view.comparison.seeds
    of = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    figure.suptitle(f"{view.comparison.study}: {what} by RL step, measured, {of}", fontsize=11, x=0.01, ha="left")
    for k, one in enumerate(axes):
        _draw(figure.add_subplot(1, len(axes), k + 1), view, one)
    paths = [stem.with_suffix(f".{kind}") for kind in FORMATS]
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": "testbed", "font.size": 9.0}
    with matplotlib.rc_context(options):
        for path in paths:
            facts: dict[str, Any] = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
            figure.savefig(path, dpi=DPI, facecolor="white", metadata=facts)
    return paths


def _draw(axes: Any, view: View, one: Axes) -> None:
    several, curves = len(view.comparison.seeds) > 1, []
    for i, (f, v) in enumerate(zip(view.figures, view.comparison.variants, strict=True)):
        drawn, ends = one.curve(v), one.ends(f)
        if drawn is None:
            continue
        curves.append(drawn)
        shade = VARIANTS.get(f.letter)
        colour = shade.light if shade else BASE["ink"][0]
        style = "-" if shade else ("--", ":", "-.")[i % 3]
        head = "" if view.comparison.single else f"{f.letter} {f.name}: "
        words = head + (_margin(one, *ends) if ends is not None else "")
        axes.plot(drawn.batches, drawn.mean, style, color=colour, linewidth=1.6, label=words, marker=_dot(drawn))
        if several:
            axes.fill_between(drawn.batches, drawn.low, drawn.high, color=colour, alpha=0.18, linewidth=0)
    if one.series is not None and scale_of(curves, one.series).logarithmic:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: numbers.tick(value))
    axes.set_xlabel("RL step")
    axes.set_ylabel(one.label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=BASE["line"][0], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    band = "line: mean over seeds, band: lowest to highest; " if several else ""
    note = f"{band}first → last fifth of the batches"
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8.5, title=note, title_fontsize=7.5
    )


def _dot(drawn: Curve) -> str:
    return "o" if len(drawn.batches) == 1 else ""


def _margin(one: Axes, first: Stat, last: Stat) -> str:
    """`0.48 → 0.82, change +0.34 ± 0.02`."""
    rises = Stat(tuple(b - a for a, b in zip(first.values, last.values, strict=True)))
    sign = "+" if rises.mean > 0 else ""
    ends = f"{one.write(first.mean, 0.0)} → {one.write(last.mean, 0.0)}"
    return f"{ends}, change {sign}{one.write(rises.mean, rises.sd)}"
