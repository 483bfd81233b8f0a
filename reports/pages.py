"""What every HTML page of a report is made with: template, style, script, marks of numbers. One file, no network.

It refuses to know what a page says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from reports import palette

TEMPLATES = Path(__file__).parent / "templates"
SYMBOLS = {
    "simulated": '<circle cx="4" cy="4" r="3.2" fill="none" stroke="currentColor" stroke-width="1.3"/>',
    "measured": '<circle cx="4" cy="4" r="3.8" fill="currentColor"/>',
    "calibrated": '<circle cx="4" cy="4" r="3.2" fill="none" stroke="currentColor" stroke-width="1.3"/>'
    '<path d="M4 .8A3.2 3.2 0 0 0 4 7.2Z" fill="currentColor"/>',
    "analytic": '<path d="M4 1L7.4 7H.6Z" fill="none" stroke="currentColor" stroke-width="1.3"/>',
    "published": '<rect x="1" y="1" width="6" height="6" fill="none" stroke="currentColor" stroke-width="1.3"/>',
    "assumed": '<path d="M4 .6L7.4 4L4 7.4L.6 4Z" fill="none" stroke="currentColor" stroke-width="1.3"/>',
}
"""Marks as drawings: filled = read on hardware, half = fitted, hollow = computed or stated."""


NO_WORDS: Mapping[str, Any] = MappingProxyType({})


def mark(kind: str) -> Markup:
    """A kind's mark with its text alternative."""
    name = escape(kind)
    return Markup(f'<svg class="k" role="img" aria-label="{name}"><title>{name}</title><use href="#k-{name}"/></svg>')


def numbered(text: object, kind: str) -> Markup:
    """A number and the mark of its kind, which never part."""
    return Markup(f'<span class="n">{escape(text)}{mark(kind)}</span>')


def stylesheet() -> str:
    """Colours of both themes and of print, then the page's own rules."""
    light, dark = palette.variables(False), palette.variables(True)
    return "\n".join(
        (
            f":root{{color-scheme:light dark;{light}}}",
            f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}",
            f":root[data-theme=light]{{color-scheme:light;{light}}}",
            f":root[data-theme=dark]{{color-scheme:dark;{dark}}}",
            (TEMPLATES / "style.css").read_text(encoding="utf-8"),
            palette.rules(),
            f"@media print{{:root,:root[data-theme]{{color-scheme:light;{light}}}}}",
        )
    )


def patterns() -> Markup:
    """Stripes, as SVG patterns that follow the theme."""
    out = []
    for name, cause in palette.GPU_TIME.items():
        if cause.stripes:
            ground, stripe, pitch, width = cause.stripes
            angle = -45 if name == "phase_switch" else 45
            out.append(
                f'<pattern id="h-{name}" width="{pitch:g}" height="{pitch:g}" '
                f'patternUnits="userSpaceOnUse" patternTransform="rotate({angle})">'
                f'<rect width="{pitch:g}" height="{pitch:g}" style="fill:var({ground})"/>'
                f'<rect width="{width:g}" height="{pitch:g}" style="fill:var({stripe})"/></pattern>'
            )
    return Markup("".join(out))


def page(template: str, words: Mapping[str, Any] = NO_WORDS, **values: Any) -> str:
    """The template with `values`; `words`: functions that it calls besides `mark` and `numbered`."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals.update(mark=mark, numbered=numbered, **words)
    shared = {
        "symbols": {name: Markup(drawing) for name, drawing in SYMBOLS.items()},
        "patterns": patterns(),
        "style": Markup(stylesheet()),
        "script": Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
    }
    return env.get_template(template).render(shared | values)


def write_pages(folder: Path, index: str, report: str) -> dict[str, Path]:
    """Write `index.html` and `report.md`; returns their paths by `index` and `report`. The folder is made if it is
    missing."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"index": folder / "index.html", "report": folder / "report.md"}
    for name, text in (("index", index), ("report", report)):
        paths[name].write_text(text, encoding="utf-8", newline="\n")
    return paths
