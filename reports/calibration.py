"""The report of a calibration: coefficients with intervals, ranges, and every point's residual; one HTML page and the
same as Markdown.

It refuses to fit: the profile says what came out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from reports import numbers
from reports.canvas import Canvas
from reports.kinds import BY_NAME
from reports.markdown import table
from reports.pages import page, write_pages
from reports.plots import HALF
from testbed.calibration.fit import fitted
from testbed.calibration.make import Series
from testbed.calibration.profile import Profile, Quality

TITLES = {
    "decode": "Decode step",
    "prefill": "Prefill batch",
    "arrival": "A request's way to the engine",
    "trainer": "Optimizer update",
}
HEAD = ["Coefficient", "value", "95 % interval"]
UPDATE_HEAD = [
    "Path",
    "engines",
    "MB",
    "prepare",
    "pause",
    "copy",
    "requantise and agree",
    "resume",
    "copy, each further MB",
]
UPDATE_PARTS = ("prepare_s", "pause_s", "copy_s", "requantize_s", "resume_s")
LIMITS = (
    "Residuals are relative. Intervals assume independent errors of equal relative size; they hold for these "
    "experiments, not for a busier machine.",
    "The profile is of one model and of so many engines side by side, on a machine that does nothing else. What a "
    "trainer at work costs them is in it where engine and trainer were measured side by side.",
    "Weight updates are means, phase switches medians; what further bytes take is known where models of several sizes "
    "were measured.",
    "SGLang's mixed steps (`enable_mixed_chunk`) are not measured: no scenario turns them on.",
)


def write_calibration(
    profile: Profile, series: Mapping[str, Series], name: str, command: str, folder: Path
) -> dict[str, Path]:
    """Write `index.html` and `report.md`; returns their paths by `index` and `report`."""
    return write_pages(folder, render(profile, series, name, command), markdown(profile, name, command))


def headline(profile: Profile) -> str:
    parts = [f"{TITLES[n].lower()} {numbers.percent(q.residual_median, 1)}" for n, q in profile.quality.items()]
    return f"Median residual: {', '.join(parts)}"


def rows(q: Quality) -> list[list[str]]:
    return [
        [name, f"{c.value:.3g}", f"{c.low:.2g} to {c.high:.2g}" if c.high > c.low else "at its bound of 0"]
        for name, c in q.coefficients.items()
    ]


def words(q: Quality) -> str:
    return (
        f"{q.points} measurements; residuals {numbers.percent(q.residual_median, 1)} in the median, "
        f"{numbers.percent(q.residual_max)} at most."
    )


def update_rows(profile: Profile) -> list[list[str]]:
    return [
        [
            path,
            str(u.engines),
            f"{u.bytes / 1e6:.1f}",
            *(numbers.milliseconds(getattr(u, part)) for part in UPDATE_PARTS),
            numbers.milliseconds(1e6 * u.copy_per_byte_s) if u.copy_per_byte_s else "–",
        ]
        for path, u in profile.updates.items()
    ]


def facts(profile: Profile) -> dict[str, str]:
    r = profile.ranges
    found = {
        "model": profile.model,
        "machine": ", ".join(f"{k} {v}" for k, v in profile.machine.items()),
        "versions": ", ".join(f"{k} {v}" for k, v in profile.versions.items()),
        "engines side by side": str(profile.engines),
        "KV slots": str(profile.max_total_num_tokens),
        "holds for": f"batches of {r.batch[0]:g} to {r.batch[1]:g}, {r.context_per_sequence[0]:g} to "
        f"{r.context_per_sequence[1]:g} tokens of context a sequence, {r.new_tokens[0]:g} to {r.new_tokens[1]:g} "
        "computed tokens a prefill batch; answers outside are given and counted",
    }
    ms = numbers.milliseconds
    for mode, t in profile.controls.items():
        found[f"pause {mode}"] = (
            f"{ms(t.idle_s)} of an idle engine, {ms(t.running_s)} with {t.running} requests; then "
            f"flush {ms(t.flush_s)}, resume {ms(t.resume_s)}"
        )
    if profile.start_s is not None:
        found["start"] = f"{numbers.seconds(profile.start_s)} from nothing to a deployment that is ready"
    if profile.traffic_s:
        found["in traffic"] = (
            f"a request of a closed loop costs {ms(profile.traffic_s)} of the engine beyond these steps; in a "
            "simulation its prefill takes that longer"
        )
    if (c := profile.crowd) is not None:
        found["other engines that work"] = (
            f"add {ms(c.base_s)} and {ms(c.per_sequence_s)} a sequence to a decode step of an engine; its prefill "
            f"batches take {numbers.percent(c.prefill - 1)} longer"
        )
    if profile.beside is not None:
        b = profile.beside
        longer = [numbers.percent(x - 1) for x in (b.decode, b.prefill, b.train)]
        found["side by side"] = (
            f"beside a working trainer decode steps take {longer[0]} longer and prefill batches {longer[1]}, beside a "
            f"working engine optimizer updates {longer[2]}"
        )
    if profile.switch is not None:
        s = profile.switch
        found["phase switch"] = f"to train {numbers.seconds(s.train_s)}, to generate {numbers.seconds(s.generate_s)}"
    return found


def residuals(title: str, series: Series, q: Quality) -> str:
    """Measured seconds (logarithmic) against the relative residual of each point."""
    width, height, left, right, top, bottom = float(HALF), 150.0, 48.0, 10.0, 8.0, 32.0
    points = [(seconds, fitted(q, terms) / seconds - 1) for terms, seconds in series.points]
    low = math.log10(min(s for s, _ in points))
    span = max(math.log10(max(s for s, _ in points)) - low, 1e-6)
    most = max(0.1, *(abs(r) for _, r in points))
    c = Canvas(width, height)

    def at(seconds: float, residual: float) -> tuple[float, float]:
        x = left + (math.log10(seconds) - low) / span * (width - left - right)
        return x, top + (0.5 - residual / (2 * most)) * (height - top - bottom)

    for residual in (-most, 0.0, most):
        y = at(10**low, residual)[1]
        c.line(left, y, width - right, y, "line2" if residual == 0 else "line", "grid", under=True)
        c.text(left - 6, y + 4, numbers.signed_percent(residual), "mute", "right")
    for power in range(math.ceil(low - 1e-9), math.floor(low + span + 1e-9) + 1):
        c.text(at(10.0**power, 0)[0], height - bottom + 14, f"{numbers.tick(10.0**power)} s", "mute", "center")
    for seconds, residual in points:
        x, y = at(seconds, residual)
        c.rect(x - 2, y - 2, 4, 4, "generate", f"{seconds:.3g} s, {numbers.signed_percent(residual)}")
    c.text(left + (width - left - right) / 2, height - 3, "measured", "mute", "center")
    return c.svg(f"residuals of {title}")


def markdown(profile: Profile, name: str, command: str) -> str:
    lines = [f"# Calibration of {name}", "", f"**{headline(profile)}** {BY_NAME['calibrated'].mark}", ""]
    for fit, q in profile.quality.items():
        lines += [f"## {TITLES[fit]}", "", words(q), "", *table(HEAD, rows(q)), ""]
    if profile.updates:
        lines += ["## Weight updates, means", "", *table(UPDATE_HEAD, update_rows(profile)), ""]
    lines += ["## What it is of", "", *(f"- {k}: {v}" for k, v in facts(profile).items()), ""]
    lines += ["## Limits of this result", "", *(f"- {s}" for s in LIMITS), ""]
    lines += ["## Reproduce", "", "```", command, "```", ""]
    return "\n".join(lines)


def render(profile: Profile, series: Mapping[str, Series], name: str, command: str) -> str:
    """The page."""
    fits = [
        (TITLES[fit], words(q), rows(q), Markup(residuals(TITLES[fit], series[fit], q)))
        for fit, q in profile.quality.items()
    ]
    return page(
        "calibration.html.j2",
        name=name,
        headline=headline(profile),
        fits=fits,
        head=HEAD,
        update_head=UPDATE_HEAD,
        updates=update_rows(profile),
        facts=facts(profile),
        server=profile.server,
        limits=LIMITS,
        command=command,
    )
