"""The log-log plots of `growth`, as one small SVG file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


def draw(growth: dict[str, Any], path: Path) -> None:
    """`growth`: name of a series -> x, per, exponent and points, as in results.json."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 9})
    figure, axes = plt.subplots(1, len(growth), figsize=(3.2 * len(growth), 2.8), constrained_layout=True)
    for axis, (name, s) in zip(axes, growth.items(), strict=True):
        x, y = [p[0] for p in s["points"]], [p[1] * (1 if s["per"] == "run" else 1e6) for p in s["points"]]
        axis.loglog(x, y, "o-", markersize=3, linewidth=1)
        axis.set_xlabel(name)
        axis.set_ylabel("CPU seconds" if s["per"] == "run" else f"CPU µs per {s['per']}")
        axis.set_title(f"exponent {s['exponent']:.2f}")
        low, high = min(y), max(y)
        axis.set_ylim(low / 3, high * 3)
        axis.minorticks_off()
        axis.grid(True, which="major", linewidth=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
