"""A page of SVG drawn by matplotlib in px, whose colours are roles: dark mode and print cost nothing more.

Coordinates: px, origin at the top left, y down. Text stays text (`svg.fonttype: none`) and takes its font from the
page. It refuses to know what is drawn. matplotlib is imported when a canvas is made, not before.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any
from xml.etree import ElementTree

_SVG = "{http://www.w3.org/2000/svg}"
_FIRST_CODE = 0x0A0000
_POINT = re.compile(r"[ML] (-?[\d.]+) (-?[\d.]+)")
CHARACTER_PX = 5.9
"""Mean width of a character of plot text (11 px); labels that do not fit are left out."""


def text_width(text: str) -> float:
    """Estimated px of plot text."""
    return len(text) * CHARACTER_PX


class Canvas:
    """Draw rectangles, lines, curves, areas and text; then `svg()`.

    Every role gets a colour of its own while matplotlib draws (no two roles share one, as they do on the page), and the
    written SVG has a class in its place: fills `c-ROLE`, strokes `s-ROLE`, text `t-ROLE`.
    """

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self._figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(self._figure)
        self._axes: Any = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)
        self._axes.axis("off")
        self._roles: list[str] = []
        self._gids: dict[str, tuple[str, str, str]] = {}
        """gid -> (shape, title, extra classes)"""

    def _colour(self, role: str) -> str:
        if role not in self._roles:
            self._roles.append(role)
        return f"#{_FIRST_CODE + self._roles.index(role):06x}"

    def _gid(self, shape: str, title: str = "", extra: str = "") -> str:
        gid = f"e{len(self._gids)}"
        self._gids[gid] = (shape, title, extra)
        return gid

    def rect(
        self, x: float, y: float, width: float, height: float, role: str, title: str = "", extra: str = ""
    ) -> None:
        """A filled rectangle; `title` is its tooltip."""
        from matplotlib.patches import Rectangle

        self._axes.add_patch(
            Rectangle(
                (x, y),
                width,
                height,
                facecolor=self._colour(role),
                linewidth=0,
                gid=self._gid("rect", title, extra),
                snap=False,
            )
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, role: str, extra: str = "", under: bool = False) -> None:
        """A straight line, `under` the rectangles or above; width and dashes come from its classes."""
        from matplotlib.lines import Line2D

        self._axes.add_line(
            Line2D(
                [x1, x2],
                [y1, y2],
                color=self._colour(role),
                linewidth=1,
                gid=self._gid("line", "", extra),
                snap=False,
                zorder=0.5 if under else 2,
            )
        )

    def curve(self, points: Sequence[tuple[float, float]], role: str, title: str = "", extra: str = "") -> None:
        """A line through two points or more, above everything but text."""
        from matplotlib.lines import Line2D

        xs, ys = zip(*points, strict=True)
        self._axes.add_line(
            Line2D(xs, ys, color=self._colour(role), linewidth=1, gid=self._gid("polyline", title, extra), zorder=2.5)
        )

    def area(self, points: Sequence[tuple[float, float]], role: str, title: str = "", extra: str = "") -> None:
        """A filled outline of three points or more."""
        from matplotlib.patches import Polygon

        self._axes.add_patch(
            Polygon(
                points, closed=True, facecolor=self._colour(role), linewidth=0, gid=self._gid("polygon", title, extra)
            )
        )

    def text(self, x: float, y: float, text: str, role: str = "ink", anchor: str = "left", extra: str = "") -> None:
        """Plot text with its baseline at y. `anchor`: left, center, right."""
        self._axes.text(
            x,
            y,
            text,
            color=self._colour(role),
            fontsize=11,
            ha=anchor,
            va="baseline",
            gid=self._gid("text", "", extra),
            parse_math=False,
            clip_on=False,
        )

    def chip(self, x: float, y: float, letter: str, role: str) -> None:
        """A variant's letter on its colour, 14 px."""
        self.rect(x, y, 14, 14, role, extra=f"k-{role}")
        self.text(x + 7, y + 10.5, letter, role, "center", "b l")

    def svg(self, label: str, extra: str = "") -> str:
        """The drawing as one `<svg>` element with `label` as its text alternative."""
        import matplotlib

        out = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "testbed", "path.simplify": False}):
            self._figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        root = ElementTree.fromstring(out.getvalue())
        classes = f"fig {extra}".strip()
        parts = [
            f'<svg class="{classes}" viewBox="0 0 {_px(self.width)} {_px(self.height)}" role="img" '
            f'aria-label="{escape(label, quote=True)}">'
        ]
        for group in root.iter(f"{_SVG}g"):
            gid = group.get("id", "")
            if gid in self._gids:
                parts.append(self._element(group, *self._gids[gid]))
        parts.append("</svg>")
        return "".join(parts)

    def _element(self, group: ElementTree.Element, shape: str, title: str, extra: str) -> str:
        inner = f"<title>{escape(title)}</title>" if title else ""
        for node in group.iter():
            if node.tag == f"{_SVG}text":
                return self._text(node, extra)
            if node.tag == f"{_SVG}path":
                return self._path(node, shape, inner, extra)
        raise ValueError("matplotlib drew neither a path nor text")

    def _role(self, style: str, key: str) -> str:
        code = re.search(rf"{key}: #([0-9a-f]{{6}})", style)
        if code is None:
            raise ValueError(f"no {key} in {style!r}")
        return self._roles[int(code.group(1), 16) - _FIRST_CODE]

    def _path(self, node: ElementTree.Element, shape: str, inner: str, extra: str) -> str:
        points = [(float(x), float(y)) for x, y in _POINT.findall(node.get("d", ""))]
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        style = node.get("style", "")
        if shape in ("polyline", "polygon"):
            role = "s-" + self._role(style, "stroke") if shape == "polyline" else "c-" + self._role(style, "fill")
            places = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
            return f'<{shape} points="{places}" class="{_classes(role, extra)}">{inner}</{shape}>'
        if shape == "line":
            return (
                f'<line x1="{_px(xs[0])}" y1="{_px(ys[0])}" x2="{_px(xs[1])}" y2="{_px(ys[1])}" '
                f'class="{_classes("s-" + self._role(style, "stroke"), extra)}"/>'
            )
        x, y = min(xs), min(ys)
        box = f'x="{_px(x)}" y="{_px(y)}" width="{_px(max(xs) - x)}" height="{_px(max(ys) - y)}"'
        name = _classes("c-" + self._role(style, "fill"), extra)
        return f'<rect {box} class="{name}">{inner}</rect>' if inner else f'<rect {box} class="{name}"/>'

    def _text(self, node: ElementTree.Element, extra: str) -> str:
        style = node.get("style", "")
        anchor = re.search(r"text-anchor: (\w+)", style)
        where = f' text-anchor="{anchor.group(1)}"' if anchor and anchor.group(1) != "start" else ""
        x, y = float(node.get("x", "0")), float(node.get("y", "0"))
        name = _classes("t-" + self._role(style, "fill"), extra)
        return f'<text x="{_px(x)}" y="{_px(y)}"{where} class="{name}">{escape(node.text or "")}</text>'


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _classes(*names: str) -> str:
    return " ".join(n for n in names if n)
