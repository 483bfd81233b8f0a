"""The command that fits the simulator's coefficients to this machine's engines and trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.app import Json, Out, Overrides, WithReport, app, command_of
from testbed.cli.calibrating import PROFILE, fitted_to, store, updates_only, whole
from testbed.console import bar, complain, err, notes, say


@app.command(short_help="Fit the simulator's coefficients to this machine's engines and trainer.")
def calibrate(
    ctx: typer.Context,
    scenario: Annotated[Path, typer.Argument(metavar="FILE", help="A scenario, or a study of several deployments.")],
    repeats: Annotated[int, typer.Option(metavar="N", help="Measurements of every experiment.", min=1)] = 3,
    trainer: Annotated[
        bool, typer.Option("--trainer/--no-trainer", help="Measure optimizer updates of several sizes.")
    ] = True,
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this variant of a study (default: all of them).")
    ] = None,
    report_: WithReport = True,
) -> None:
    """Bring up the scenario's engines and trainer, drive them through a designed experiment, and store a profile.

    Measured: prefill tokens x cached tokens, decode batch x context, requests at once, pausing, flushing and resuming,
    train step x tokens, engine and trainer side by side, and a short run for weight updates by the scenario's path and
    phase switches. Of a study, the
    first variant's engine and trainer are measured; the others add weight updates (other paths, models of other sizes)
    and phase switches. Several engines are measured side by side, as they will work. A scenario uses the profile with
    `simulation.engine_costs: {type: calibrated, profile: FILE}` and `training.cost: {type: calibrated, profile: FILE}`;
    `testbed validate --profile FILE` sets both.
    """
    from testbed.cli.real import ready_for_real
    from testbed.commands import folders
    from testbed.commands.chosen import every
    from testbed.commands.errors import Interrupted, RunFailed
    from testbed.machine import busy

    chosen = every(scenario, set_ or (), variant, simulated=False)
    first = chosen[0]
    ready_for_real(first.scenario)
    folder = folders.fresh(out_ or Path("runs") / f"{folders.slug(first.name)}-calibration", PROFILE)
    folders.target("--json", json_)
    folder.mkdir(parents=True, exist_ok=True)
    notes(filter(None, [busy()]))
    try:
        measured = _measured(chosen, folder, repeats, trainer)
    except KeyboardInterrupt:
        raise Interrupted(f"{first.name}: interrupted, nothing is calibrated") from None
    fitted = fitted_to(measured, first.scenario, first.base_dir)
    profile, series = fitted.profile, fitted.series
    path = store(fitted, measured[0], folder)
    folders.write_json(json_, _figures(profile) | {"folder": str(folder)})
    _show(profile)
    if report_:
        from reports.calibration import write_calibration

        say(f"report   {write_calibration(profile, series, first.name, command_of(ctx), folder / 'report')['index']}")
    say(f"profile  {path}")
    if not profile.updates:
        raise RunFailed("no weight update was measured: the short runs published nothing")


def _measured(chosen: Sequence[Any], folder: Path, repeats: int, trainer: bool) -> list[Any]:
    """What every deployment gave, in order."""
    from real.calibration.carry_out import calibrate as carry_out
    from testbed.commands import folders

    first = chosen[0]
    plans = [
        whole(first.scenario, first.base_dir, repeats, trainer),
        *(updates_only(c.scenario, c.base_dir) for c in chosen[1:]),
    ]
    places = [folder] if len(chosen) == 1 else [folder / s for s in folders.slugs(c.name for c in chosen)]
    progress = bar()
    line = progress.add_task("calibrate", total=sum(plan.parts for plan in plans), detail="starting")

    def stage(what: str) -> None:
        progress.update(line, detail=what)
        if not err.is_terminal:
            complain(what)

    def done(what: str) -> None:
        progress.update(line, advance=1, detail=what)

    measured = []
    with progress:
        for c, plan, place in zip(chosen, plans, places, strict=True):
            measured.append(asyncio.run(carry_out(c.scenario, c.base_dir, place, plan, stage, done)))
    return measured


def _figures(profile: Any) -> dict[str, Any]:
    from msgspec import to_builtins

    figures: dict[str, Any] = to_builtins(profile)
    return figures


def _show(profile: Any) -> None:
    from rich.table import Table

    from testbed.console import show_table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("fit", "coefficient"):
        table.add_column(head, no_wrap=True)
    for head in ("value", "95 % interval", "points", "residual: median", "largest"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, q in profile.quality.items():
        for i, (what, c) in enumerate(q.coefficients.items()):
            rest = (str(q.points), f"{100 * q.residual_median:.1f} %", f"{100 * q.residual_max:.0f} %")
            table.add_row(
                name if not i else "",
                what,
                f"{c.value:.3g}",
                f"{c.low:.2g} .. {c.high:.2g}",
                *(rest if not i else ("", "", "")),
            )
    show_table(table)
    for path, u in profile.updates.items():
        parts = "prepare", "pause", "copy", "requantize", "resume"
        said = ", ".join(f"{part} {1000 * getattr(u, part + '_s'):.0f} ms" for part in parts)
        more = f"; copy {1e9 * u.copy_per_byte_s:.2f} ms each further MB" if u.copy_per_byte_s else ""
        say(f"weight update by {path}, {u.engines} engine{'s' * (u.engines > 1)}, {u.bytes / 1e6:.1f} MB: {said}{more}")
    say(f"traffic  a request of a closed loop costs {1000 * profile.traffic_s:.1f} ms beyond these steps")
    if (c := profile.crowd) is not None:
        more = f"{1000 * c.base_s:.1f} ms + {1000 * c.per_sequence_s:.2f} ms a sequence"
        say(f"other engines that work: decode steps + {more}, prefill batches {100 * (c.prefill - 1):.1f} % longer")
    if profile.beside is not None:
        b = profile.beside
        engine = f"decode steps {100 * (b.decode - 1):.1f} % longer, prefill {100 * (b.prefill - 1):.1f} %"
        say(f"engine beside a working trainer: {engine}; trainer beside a working engine: {100 * (b.train - 1):.1f} %")
    for mode, c in profile.controls.items():
        busy = f"{1000 * c.running_s:.0f} ms with {c.running} running"
        after = f"flush {1000 * c.flush_s:.0f} ms, resume {1000 * c.resume_s:.0f} ms"
        say(f"pause {mode}: {1000 * c.idle_s:.0f} ms idle, {busy}; {after}")
    if profile.start_s is not None:
        say(f"start    {profile.start_s:.0f} s from nothing to a deployment that is ready")
    if profile.switch is not None:
        say(f"phase switch: to train {profile.switch.train_s:.3f} s, to generate {profile.switch.generate_s:.3f} s")
