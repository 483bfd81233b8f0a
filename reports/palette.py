"""Colours by meaning, light and dark, and the words for every cause: one table for styles, plots and glossary.

Blue is an engine at work, orange a trainer at work, ink a weight update, red-brown wasted work, grey always waiting. It
refuses to know geometry and numbers.
"""

from __future__ import annotations

from msgspec import Struct

from testbed.metrics.summary import CAUSES


class Shade(Struct, frozen=True):
    """A fill and the text on it, light and dark."""

    light: str
    dark: str
    on_light: str = "#1B1F24"
    on_dark: str = "#E4E8ED"


class Cause(Struct, frozen=True):
    label: str
    short: str
    shade: Shade
    definition: str
    stripes: tuple[str, str, float, float] | None = None
    """(CSS colour of the ground, of the stripe, pitch px, stripe width px) where the fill is striped."""


_INK = Shade("#24292F", "#E2E6EA", "#FFFFFF", "#14171B")
_RED = Shade("#A8442F", "#D9735C", "#FFFFFF", "#14171B")

GPU_TIME: dict[str, Cause] = {
    "generate": Cause(
        "generate",
        "generate",
        Shade("#3A6FB0", "#5A92D8", "#FFFFFF", "#0F1317"),
        "Prefill and decode of tokens that are used later.",
    ),
    "generate_tail": Cause(
        "generate, under ¼ full",
        "under ¼ full",
        Shade("#B4CDE9", "#2F5078"),
        "Generating with less than a quarter of the engine's slots in use: the long tail of a step.",
    ),
    "train": Cause(
        "train",
        "train",
        Shade("#E0A030", "#D9A441", "#1B1F24", "#14171B"),
        "Forward, backward and optimizer of the actor.",
    ),
    "signals": Cause(
        "log-probs, reference, critic",
        "signals",
        Shade("#F3DBAE", "#7A5B25"),
        "Forward passes on the training pool for signals: old log-probs, reference, critic.",
    ),
    "weight_update": Cause(
        "weight update",
        "update",
        _INK,
        "Engines: paused for a publication (copy, requantise, barrier). Trainer: its part of it, preparing included.",
    ),
    "phase_switch": Cause(
        "phase switch",
        "switch",
        Shade("#24292F", "#E2E6EA"),
        "A shared pool changes phase: KV cleared, training state moved.",
        ("--bg", "--weight_update", 4, 1.8),
    ),
    "recompute_kv": Cause(
        "recompute KV",
        "recompute",
        _RED,
        "Prefill of prompt tokens that had been computed before: flushed, evicted or retracted.",
    ),
    "generate_dropped": Cause(
        "generate, later dropped",
        "dropped",
        Shade("#A8442F", "#D9735C"),
        "Generation of tokens that no batch used: dropped, aborted or filtered.",
        ("--bg", "--recompute_kv", 4, 2),
    ),
    "idle_longest": Cause(
        "idle: waits for the longest",
        "idle, longest",
        Shade("#D3D8DE", "#3A4149"),
        "This engine is empty; another still runs the batch's last trajectories.",
    ),
    "idle_trainer": Cause(
        "idle: waits for the trainer",
        "idle, trainer",
        Shade("#B4BCC5", "#525B66"),
        "The engines may not start new groups before the trainer's update.",
    ),
    "idle_data": Cause(
        "idle: waits for data",
        "idle, data",
        Shade("#D3D8DE", "#3A4149"),
        "The trainer is free and fewer groups are ready than a batch needs.",
        ("--lane", "--idle_trainer", 5, 1.6),
    ),
    "idle_buffer_full": Cause(
        "idle: buffer full",
        "idle, full",
        Shade("#8E98A3", "#727C88", "#14171B", "#0F1317"),
        "Admission is closed because the buffer is full.",
    ),
    "idle_no_work": Cause(
        "idle: no work",
        "idle, no work",
        Shade("#E9ECEF", "#272D34"),
        "The data source is empty, or tools hold every trajectory.",
    ),
}
assert tuple(GPU_TIME) == CAUSES, "every cause of the metrics needs a colour and a word"

IDLE: tuple[str, ...] = tuple(c for c in CAUSES if c.startswith("idle_"))


class PartOf(Struct, frozen=True):
    """One part of a stacked bar that is not GPU time."""

    label: str
    role: str
    """Colour role in `ROLES`."""


TRAJECTORY: dict[str, PartOf] = {
    "queue": PartOf("queue", "q0"),
    "prefill": PartOf("prefill", "q1"),
    "decode": PartOf("decode", "generate"),
    "tool": PartOf("tool", "tool"),
    "environment": PartOf("environment", "tool2"),
    "paused": PartOf("paused", "weight_update"),
    "held": PartOf("program paused", "q4"),
    "waits_for_signals": PartOf("waits for signals", "signals"),
    "waits_for_group": PartOf("waits for its group", "q2"),
    "in_buffer": PartOf("in the buffer", "q3"),
}
UPDATE: dict[str, PartOf] = {
    "prepare_s": PartOf("prepare", "u1"),
    "drain_s": PartOf("drain", "u5"),
    "copy_s": PartOf("copy", "u2"),
    "requantize_s": PartOf("requantise", "u3"),
    "barrier_s": PartOf("barrier", "u4"),
}

BASE: dict[str, tuple[str, str]] = {
    "bg": ("#FFFFFF", "#14171B"),
    "bg2": ("#F4F6F8", "#1B1F24"),
    "ink": ("#1B1F24", "#E4E8ED"),
    "mute": ("#59626E", "#9CA6B2"),
    "line": ("#D9DEE4", "#30363E"),
    "line2": ("#AEB6BF", "#4A525C"),
    "focus": ("#0B62C4", "#7DB4F5"),
    "lane": ("#EEF1F4", "#1F242A"),
}
"""Ground, text and lines: name -> (light, dark)."""

VARIANTS: dict[str, Shade] = {
    "A": Shade("#787F88", "#98A0A9", "#FFFFFF", "#14171B"),
    "B": Shade("#A08A1A", "#BBA53A", "#14171B", "#14171B"),
    "C": Shade("#2F8F4E", "#4FB06E", "#FFFFFF", "#14171B"),
    "D": Shade("#9C1F60", "#C23B7A", "#FFFFFF", "#FFFFFF"),
    "E": Shade("#E58BB5", "#F3BFD8", "#14171B", "#14171B"),
}
"""From the sixth variant on a letter stands on the ground colour with an ink outline."""

LETTERS = "ABCDEFGHIJKL"

OTHERS: dict[str, Shade] = {
    "tool": Shade("#2E8B84", "#45B3AA", "#FFFFFF", "#14171B"),
    "tool2": Shade("#A5D3CF", "#245E59"),
    "q0": Shade("#C9CED5", "#4A525C"),
    "q1": Shade("#1F3F6B", "#9DBFE8", "#FFFFFF", "#14171B"),
    "q2": Shade("#E3E6EA", "#333A42"),
    "q3": Shade("#F4F6F8", "#1F242A"),
    "q4": Shade("#6B4E9B", "#B79FE0", "#FFFFFF", "#14171B"),
    "u1": Shade("#AEB6BF", "#59626E"),
    "u2": Shade("#59626E", "#AEB6BF", "#FFFFFF", "#14171B"),
    "u3": Shade("#24292F", "#E2E6EA", "#FFFFFF", "#14171B"),
    "u4": Shade("#D9DEE4", "#3A4149"),
    "u5": Shade("#8E98A3", "#727C88", "#14171B", "#0F1317"),
    "rest": Shade("#EEF1F4", "#1F242A"),
}
"""Parts of a trajectory's time and of a weight update."""

SHADES: dict[str, Shade] = {
    **{name: cause.shade for name, cause in GPU_TIME.items()},
    **OTHERS,
    **{f"v{letter}": shade for letter, shade in VARIANTS.items()},
}
"""Every fill that has text on it, by role."""


def variables(dark: bool) -> str:
    """CSS custom properties of one theme."""
    out = [f"--{name}:{pair[dark]}" for name, pair in BASE.items()]
    for name, shade in SHADES.items():
        out.append(f"--{name}:{shade.dark if dark else shade.light}")
        out.append(f"--on-{name}:{shade.on_dark if dark else shade.on_light}")
    return ";".join(out)


def rules() -> str:
    """CSS rules of fills, of text on fills, and of chips."""
    out = []
    for name in SHADES:
        fill = f"url(#h-{name})" if name in GPU_TIME and GPU_TIME[name].stripes else f"var(--{name})"
        out.append(f".c-{name}{{fill:{fill}}}svg text.t-{name}{{fill:var(--on-{name})}}")
    for name in BASE:
        out.append(
            f".c-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name});fill:none}}svg "
            f"text.t-{name}{{fill:var(--{name})}}"
        )
    out.append(".s-weight_update{stroke:var(--weight_update);fill:none}")
    for letter in LETTERS:
        out.append(f".s-v{letter}{{stroke:var(--{f'v{letter}' if letter in VARIANTS else 'ink'});fill:none}}")
        if letter in VARIANTS:
            out.append(f".chip.v{letter}{{background:var(--v{letter});color:var(--on-v{letter})}}")
        else:
            out.append(
                f".chip.v{letter}{{background:var(--bg);color:var(--ink);box-shadow:inset 0 0 0 1px var(--ink)}}"
                f".c-v{letter}{{fill:var(--line2);stroke:var(--ink);stroke-width:.8}}.k-v{letter}{{fill:var(--bg);stroke:var(--ink)}}"
                f"svg text.t-v{letter}{{fill:var(--ink)}}"
            )
    return "\n".join(out)


def chip_role(letter: str) -> str:
    """Role of the square behind a letter in a plot."""
    return f"v{letter}"
