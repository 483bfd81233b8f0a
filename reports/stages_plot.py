"""The graph of stages as a drawing: boxes from left to right, solid arrows where weights go on, dashed ones where a
model is only read. Evaluations are no boxes: what they measured stands in the box of the model.

It refuses to know how stages ran and what figures mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from reports.canvas import Canvas, text_width
from testbed.metrics.stages import StagePlan

BOX, ROW, GAP, THREAD, MARGIN, HEAD = 54.0, 18.0, 70.0, 14.0, 8.0, 7.0
"""Px: height of a box, between boxes, between columns, height that a passing arrow is given, around everything, length
of an arrow's head."""
FILLS = {"pretrain": "q0", "sft": "signals", "rl": "train", "opd": "tool", "reward_model": "q2"}
"""Kind of stage -> colour role; what comes from outside is on the ground colour."""


@dataclass
class Node:
    """A stage, a model from outside, or (without a name) a place where an arrow passes a column."""

    name: str
    kind: str
    column: int
    before: list[str] = field(default_factory=list)
    y: float = 0.0

    @property
    def height(self) -> float:
        return BOX if self.name else THREAD


Arrow = tuple[str, str, bool]
"""From, to, whether weights go on."""


def graph(plan: Sequence[StagePlan], lines: Mapping[str, Sequence[str]]) -> tuple[str, float]:
    """The drawing and its width in px; `lines`: model -> what stands under its name, two lines at most."""
    nodes, arrows = _laid_out([p for p in plan if p.kind != "evaluate"])
    lefts, widths, right = _columns(nodes, lines)
    c = Canvas(right, max(n.y + n.height / 2 for n in nodes.values()) + MARGIN)
    for source, target, trains in arrows:
        points = _through(nodes, lefts, widths, source, target)
        role, extra = ("ink", "curve") if trains else ("mute", "curve ref")
        x, y = points[-1]
        c.curve([*points[:-1], (x - HEAD, y)], role, f"{source} → {target}", extra)
        c.area([(x, y), (x - HEAD, y - HEAD / 2), (x - HEAD, y + HEAD / 2)], role)
    for n in nodes.values():
        if n.name:
            _box(c, n, lines.get(n.name, ()), lefts[n.column], widths[n.column])
    return c.svg(f"graph of {len(plan)} stages: solid arrows train, dashed arrows only inform"), right


def _laid_out(plan: Sequence[StagePlan]) -> tuple[dict[str, Node], list[Arrow]]:
    """Nodes with column and y, and the arrows between them."""
    nodes: dict[str, Node] = {}
    arrows: list[Arrow] = []
    stages = {p.name for p in plan}
    for p in plan:
        inputs = dict.fromkeys((p.model, *p.reads))
        for source in inputs:
            if source not in stages:
                nodes.setdefault(source, Node(source, "", 0))
        nodes[p.name] = Node(p.name, p.kind, 1 + max(nodes[i].column for i in inputs))
        arrows += [(i, p.name, i == p.model) for i in inputs]
    for source, target, _ in arrows:
        before = source
        for column in range(nodes[source].column + 1, nodes[target].column):
            thread = f"{source}>{target}>{column}"
            nodes[thread] = Node("", "", column, [before])
            before = thread
        nodes[target].before.append(before)
    _stack(nodes)
    return nodes, arrows


def _stack(nodes: dict[str, Node]) -> None:
    """Columns from left to right near what their nodes come from, back near what comes after them, and forth again; the
    top is then moved to the margin."""
    columns: dict[int, list[Node]] = {}
    before = {id(n): [nodes[b] for b in n.before] for n in nodes.values()}
    after: dict[int, list[Node]] = {id(n): [] for n in nodes.values()}
    for n in nodes.values():
        columns.setdefault(n.column, []).append(n)
        for b in before[id(n)]:
            after[id(b)].append(n)
    forth = sorted(columns)
    passes = [(c, before) for c in forth], [(c, after) for c in reversed(forth)], [(c, before) for c in forth]
    for column, near in chain(*passes):
        _spread(columns[column], near)
    top = min(n.y - n.height / 2 for n in nodes.values())
    for n in nodes.values():
        n.y += MARGIN - top


def _spread(column: list[Node], near: Mapping[int, list[Node]]) -> None:
    """One under another, as near as all together get to the middles of the nodes that each belongs to."""
    wanted = {id(n): fmean([m.y for m in near[id(n)]]) if near[id(n)] else n.y for n in column}
    bottom = -math.inf
    for n in sorted(column, key=lambda n: wanted[id(n)]):
        n.y = max(bottom + ROW + n.height / 2, wanted[id(n)])
        bottom = n.y + n.height / 2
    shift = fmean([wanted[id(n)] for n in column]) - fmean([n.y for n in column])
    for n in column:
        n.y += shift


def _columns(
    nodes: dict[str, Node], lines: Mapping[str, Sequence[str]]
) -> tuple[dict[int, float], dict[int, float], float]:
    """(left of each column, its width, right end of the drawing)."""
    widths: dict[int, float] = {}
    for n in nodes.values():
        need = max([1.15 * text_width(n.name), *map(text_width, lines.get(n.name, ()))]) + 20
        widths[n.column] = max(widths.get(n.column, 0.0), need)
    x, lefts = MARGIN, {}
    for column in sorted(widths):
        lefts[column] = x
        x += widths[column] + GAP
    return lefts, widths, x - GAP + MARGIN


def _through(
    nodes: dict[str, Node], lefts: dict[int, float], widths: dict[int, float], source: str, target: str
) -> list[tuple[float, float]]:
    """From the right of a box to the left of another, level where it passes a column."""
    a, b = nodes[source], nodes[target]
    points = [(lefts[a.column] + widths[a.column], a.y)]
    for column in range(a.column + 1, b.column):
        y = nodes[f"{source}>{target}>{column}"].y
        points += [(lefts[column], y), (lefts[column] + widths[column], y)]
    return [*points, (lefts[b.column], b.y)]


def _box(c: Canvas, n: Node, lines: Sequence[str], x: float, width: float) -> None:
    fill = FILLS.get(n.kind, "bg")
    ink = fill if n.kind else "ink"
    top = n.y - BOX / 2
    c.rect(x, top, width, BOX, fill, f"{n.name}: {n.kind or 'from outside'}", "edge")
    c.text(x + 10, top + (18 if len(lines) > 1 else 24), n.name, ink, extra="b")
    for i, line in enumerate(lines):
        c.text(x + 10, top + (18 if len(lines) > 1 else 24) + 14 * (i + 1), line, ink, extra="l")
