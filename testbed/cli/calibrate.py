"""The command that fits the simulator's coefficients to this machine's engines and trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.app import Json, Out, Overrides, VariantName, WithReport, app, command_of
from testbed.console import bar, complain, err, notes, say

PROFILE = "profile.json"
MEASURED = ("sglang", "torch")
"""Packages whose versions a profile is of."""
POINTS = "points.json"
"""The measurements that the profile was fitted to."""


@app.command(short_help="Fit the simulator's coefficients to this machine's engines and trainer.")
def calibrate(
    ctx: typer.Context,
    scenario: Annotated[Path, typer.Argument(metavar="FILE", help="A scenario, or a study with --variant.")],
    repeats: Annotated[int, typer.Option(metavar="N", help="Times that every experiment is made.", min=1)] = 3,
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    variant: VariantName = None,
    report_: WithReport = True,
) -> None:
    """Bring up the scenario's engines and trainer, drive them through a designed experiment, and store a profile.

    Measured: prefill tokens x cached tokens, decode batch x context, requests at once, and short runs for train step x
    tokens, weight updates by the scenario's path and phase switches. A scenario uses the profile with
    `simulation.engine_costs: {type: calibrated, profile: FILE}` and `training.cost: {type: calibrated, profile: FILE}`.
    """
    from testbed.calibration.make import make_profile, series_of
    from testbed.calibration.phases import Phases
    from testbed.calibration.profile import write_profile
    from testbed.cli.real import ready_for_real
    from testbed.commands import folders
    from testbed.commands.chosen import one
    from testbed.commands.errors import Interrupted, RunFailed
    from testbed.journal import read_journal
    from testbed.machine import busy, machine
    from testbed.recording import versions_of

    chosen = one(scenario, set_ or (), variant, simulated=False)
    config = chosen.scenario
    ready_for_real(config)
    folder = folders.fresh(out_ or Path("runs") / f"{folders.slug(chosen.name)}-calibration", PROFILE)
    folders.target("--json", json_)
    folder.mkdir(parents=True, exist_ok=True)
    notes(filter(None, [busy()]))
    try:
        measured = _measured(config, chosen.base_dir, folder, repeats)
    except KeyboardInterrupt:
        raise Interrupted(f"{chosen.name}: interrupted, nothing is calibrated") from None
    runs = []
    for journal in measured.runs:
        phases = Phases()
        for record in read_journal(journal)[1]:
            phases.observe(record.event, record.actions)
        runs.append(phases)
    engine = config.rollout.engine
    one_batch = engine.max_prefill_tokens
    if engine.chunked_prefill_size > 0:
        one_batch = min(one_batch, engine.chunked_prefill_size)
    series = series_of(measured.engine, runs, one_batch)
    profile = make_profile(
        series,
        measured.engine,
        runs,
        machine=machine(),
        model=getattr(config.model, "name", "") or getattr(config.model, "path", ""),
        versions={k: v for k, v in versions_of(MEASURED).items() if k in MEASURED},
        server=measured.server,
        max_total_num_tokens=measured.max_total_num_tokens,
    )
    write_profile(folder / PROFILE, profile)
    folders.write_json(folder / POINTS, _points(measured.engine, series))
    folders.write_json(json_, _figures(profile) | {"folder": str(folder)})
    _show(profile)
    if report_:
        from reports.calibration import write_calibration

        say(f"report   {write_calibration(profile, series, chosen.name, command_of(ctx), folder / 'report')['index']}")
    say(f"profile  {folder / PROFILE}")
    if not profile.updates:
        raise RunFailed("no weight update was measured: the short runs published nothing")


def _measured(config: Any, base_dir: Path, folder: Path, repeats: int) -> Any:
    from real.calibrate import calibrate as carry_out
    from testbed.calibration.design import design, short_runs
    from testbed.scenario.catalogue import gpu_spec, kv_pool_tokens, model_spec

    engine = config.rollout.engine
    slots = engine.max_total_num_tokens or kv_pool_tokens(
        config, model_spec(config.model, base_dir), gpu_spec(config.cluster.gpu)
    )
    context = min(engine.context_length or slots, slots)
    experiments = list(design(engine.max_running_requests, slots, context, repeats))
    runs = short_runs(config)
    progress = bar()
    line = progress.add_task("calibrate", total=len(experiments) + len(runs), detail="starting")

    def stage(what: str) -> None:
        progress.update(line, detail=what)
        if not err.is_terminal:
            complain(what)

    def done(what: str) -> None:
        progress.update(line, advance=1, detail=what)

    with progress:
        return asyncio.run(carry_out(config, base_dir, folder, experiments, runs, stage, done))


def _points(engine: Any, series: Any) -> dict[str, Any]:
    from msgspec import to_builtins

    return {"engine": to_builtins(engine), "series": to_builtins(series)}


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
        say(f"weight update by {path}, {u.engines} engine{'s' * (u.engines > 1)}: {said}")
    if profile.switch is not None:
        say(f"phase switch: to train {profile.switch.train_s:.3f} s, to generate {profile.switch.generate_s:.3f} s")
