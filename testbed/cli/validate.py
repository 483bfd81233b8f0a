"""The command that measures how far the simulation is from real runs, of one scenario or of a suite of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.app import Json, Out, Overrides, Seed, WithReport, app, command_of
from testbed.cli.validating import Calibration, RealSide, Wanted, compared, made, precheck, with_profile
from testbed.commands.errors import RunFailed, UserError
from testbed.console import notes, say
from testbed.run_files import CALIBRATION, SCENARIO

MARKER = "validation.json"
"""The figures, in the folder of an earlier validation."""
SUITE = "validation"
"""Folder of several scenarios' runs, below `runs`."""


@app.command(short_help="Run scenarios really, simulate them, and report how far the simulation is off.")
def validate(
    ctx: typer.Context,
    scenarios: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]", help="Scenarios, and studies with all their variants. With --run: what is simulated."
        ),
    ] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option("--run", metavar="FOLDER", help="A real run made already (or a folder of them); may be repeated."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(metavar="N", help="Real runs of the same scenario and seed, for the real side's spread.", min=1),
    ] = 1,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Simulate with the coefficients of this profile of `testbed calibrate`; of several, with that of as "
            "many engines as the scenario has.",
        ),
    ] = None,
    calibrate: Annotated[
        int | None,
        typer.Option(
            "--calibrate",
            metavar="N",
            help="Calibrate on the way, on the deployments of the runs: N measurements of every experiment, at the "
            "least. Simulate with the profiles, one for each number of engines.",
            min=1,
        ),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit code 1 if step time, throughput or turn latency (p50, p95) of the simulation with the real "
            "run's own work is off by more than this, and by more than the real side's own spread.",
            min=0,
        ),
    ] = None,
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this variant of a study (default: all of them).")
    ] = None,
    doc: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the suite's Markdown to FILE.")] = None,
    seed: Seed = None,
    report_: WithReport = True,
) -> None:
    """Run scenarios on actual engines (or take runs that are there already), and compare them with their simulation.

    Three ways, to tell where an error comes from: (a) the real journal's events through the scheduling core, whose
    decisions must be the same; (b) the real run's own prompts, lengths, tool times and rewards with simulated times;
    (c) the scenario's own work model. Exit code 1 if a decision differs, or as --max-error says.
    """
    from testbed.commands import folders
    from testbed.machine import busy
    from testbed.validation.spread import pool_spread
    from testbed.validation.suite import Suite

    started = time.monotonic()
    files = scenarios or []
    _check(files, run or (), repeats, seed, variant)
    if calibrate is not None and (run or profile):
        option = "--run" if run else "--profile"
        raise UserError(f"--calibrate: goes with runs to be made and no profile (nearest: leave out {option})")
    for option, path in (("--json", json_), ("--doc", doc)):
        folders.target(option, path)
    for path in profile or ():
        if not path.is_file():
            raise UserError(f"--profile {path}: no such file (nearest: make one with `testbed calibrate`)")
    given = _given(run, bool(files)) if run else []
    chosen = _chosen(files, given, set_ or (), variant)
    folder = folders.fresh(out_ or Path("runs") / _slug(chosen), MARKER)
    work = _work(chosen, folder, profile or (), seed)
    disturbed = ""
    if not given:
        for w in work:
            precheck(w)
        folders.write_json(folder / MARKER, {})  # an interrupted validation's folder may be used again
        disturbed = busy()
        real = made(work, repeats, calibrate, folder)
        if profiles := [c.profile for c in real.calibrations]:
            work = [replace(w, scenario=with_profile(w.scenario, profiles)) for w in work]
        _keep(real.calibrations, command_of(ctx), report_)
    else:
        real = RealSide(dict(zip([w.name for w in work], given, strict=True)))
    found = []
    for w in work:
        if w.name not in real.problems:
            found.append(compared(real.journals[w.name], w))
            found[-1].remarks += filter(None, [disturbed])
            found[-1].command = command_of(ctx)
    suite = Suite(
        validations=found,
        pooled=pool_spread(found),
        failed=real.problems,
        repeats=max((len(v.runs) for v in found), default=0),
        seconds=time.monotonic() - started,
        command=command_of(ctx),
        remarks=list(filter(None, [disturbed])),
    )
    _write(suite, work, folder, json_, doc, report_)
    _judge(suite, max_error)


# --- what is validated ------------------------------------------------------------------------------------------------


def _check(files: Sequence[Path], run: Sequence[Path], repeats: int, seed: int | None, variant: str | None) -> None:
    if run and (repeats > 1 or seed is not None):
        option = "--repeats" if repeats > 1 else "--seed"
        raise UserError(f"{option}: the real runs are given (nearest: --run FOLDER once for each, and no {option})")
    if not files and not run:
        raise UserError("which scenario? (nearest: testbed validate FILE, or --run FOLDER for a run made already)")
    if not files and variant is not None:
        raise UserError(f"--variant {variant}: belongs to a study (nearest: testbed validate FILE --variant {variant})")
    if len(files) > 1 and (run or variant is not None):
        option = "--run" if run else "--variant"
        raise UserError(
            f"{option}: goes with one FILE, and there are {len(files)} (nearest: {option} with one of them)"
        )


def _given(run: Sequence[Path], one_experiment: bool) -> list[list[Path]]:
    """Journals of the real runs below these folders, grouped by experiment (the scenario apart from its seed), or all
    in one group if a FILE says that they are one.

    Simulations that an earlier validation made beside them are left out, unless there is nothing else; so are the short
    runs of calibrations.
    """
    from testbed.commands import folders
    from testbed.journal import read_journal

    headers = [(j, read_journal(j)[0]) for j in folders.journals(run) if j.parent.parent.name != CALIBRATION]
    groups: dict[str, list[Path]] = {}
    for journal, header in [(j, h) for j, h in headers if h.backend == "real"] or headers:
        tree = dict(header.scenario or {})
        tree["run"] = {k: v for k, v in tree.get("run", {}).items() if k != "seed"}
        groups.setdefault("" if one_experiment else str(tree), []).append(journal)
    return list(groups.values())


def _chosen(
    files: Sequence[Path], given: Sequence[Sequence[Path]], overrides: Sequence[str], variant: str | None
) -> list[Any]:
    """The scenarios that are simulated (and run, where no run is given), as the files or the runs themselves say."""
    from testbed.commands.chosen import every, one

    if files and given:
        return [one(files[0], overrides, variant)]
    if files:
        for path in files:  # what a real run refuses is said now; what the simulator refuses, by the second reading
            every(path, overrides, variant, simulated=False)
        return [c for path in files for c in every(path, overrides, variant)]
    found = []
    for journals in given:
        path = journals[0].parent / SCENARIO
        if not path.is_file():
            near = "testbed validate FILE --run ..."
            raise UserError(f"{path}: missing, so nothing says what to simulate (nearest: {near})")
        said = one(path, overrides, None)
        found.append(replace(said, name=_name_of(path.parent)) if len(given) > 1 else said)
    return found


def _name_of(run: Path) -> str:
    """Of a run among others: its folder's, or that of the folder of its repeats."""
    folder = run.resolve()
    return folder.parent.name if folder.name.startswith(("real-", "seed-")) else folder.name


def _slug(chosen: Sequence[Any]) -> str:
    from testbed.commands import folders

    return f"{folders.slug(chosen[0].name)}-validation" if len(chosen) == 1 else SUITE


def _work(chosen: Sequence[Any], folder: Path, profiles: Sequence[Path], seed: int | None) -> list[Wanted]:
    from testbed.commands import folders
    from testbed.commands.chosen import with_seed

    places = [folder] if len(chosen) == 1 else [folder / s for s in folders.slugs(c.name for c in chosen)]
    work = []
    for c, place in zip(chosen, places, strict=True):
        scenario = c.scenario if seed is None else with_seed(c.scenario, seed)
        scenario = with_profile(scenario, profiles) if profiles else scenario
        work.append(Wanted(scenario, c.base_dir, c.name, c.question, place))
    return work


def _keep(calibrations: Sequence[Calibration], command: str, report: bool) -> None:
    """Say where the profiles are, and write their pages."""
    for c in calibrations:
        say(f"profile  {c.profile}")
        if report:
            from reports.calibration import write_calibration

            fitted = c.fitted
            pages = write_calibration(fitted.profile, fitted.series, c.name, command, c.profile.parent / "report")
            say(f"report   {pages['index']}")


# --- what comes out ---------------------------------------------------------------------------------------------------


def _write(
    suite: Any, work: Sequence[Wanted], folder: Path, json_: Path | None, doc: Path | None, report: bool
) -> None:
    """Figures, tables and pages: of one scenario its own, of several a page of all in front of them."""
    from testbed.cli.validation_tables import show, show_suite
    from testbed.commands import folders
    from testbed.validation.result import figures_of
    from testbed.validation.suite import figures

    places = {w.name: w.folder for w in work}
    alone = len(work) == 1
    if alone and suite.validations:
        said = figures_of(suite.validations[0])
        notes(suite.validations[0].remarks)
        show(suite.validations[0])
    else:
        said = figures(suite)
        for v in suite.validations:
            folders.write_json(places[v.name] / MARKER, figures_of(v))
        notes([f"{v.name}: {remark}" for v in suite.validations for remark in v.remarks if remark not in suite.remarks])
        notes(suite.remarks)
        show_suite(suite)
    folders.write_json(folder / MARKER, said)
    folders.write_json(json_, {**said, "folder": str(folder)})
    if report:
        from reports.validation import write_validation

        indexes = {v.name: write_validation(v, places[v.name] / "report")["index"] for v in suite.validations}
        if not alone:
            from reports.validation_suite import write_suite

            pages = {name: path.relative_to(folder) for name, path in indexes.items()}
            indexes = {"suite": write_suite(suite, pages, folder / "report")["index"]}
        for path in indexes.values():
            say(f"report   {path}")
    if doc is not None:
        from reports.validation_suite import markdown

        doc.parent.mkdir(parents=True, exist_ok=True)
        doc.write_text(markdown(suite), encoding="utf-8")
        say(f"document {doc}")
    say(f"runs     {folder}")


def _judge(suite: Any, max_error: float | None) -> None:
    """Raise `RunFailed` for a run that did not end, a decision that differs, or an error above `max_error`."""
    from testbed.cli.validation_tables import percent
    from testbed.validation.result import beyond

    for name, problem in suite.failed.items():
        raise RunFailed(f"{name}: the real run did not come to its end: {problem}")
    for v in suite.validations:
        for d in v.decisions:
            if d.difference:
                raise RunFailed(f"{d.run}: the core answers differently\n{d.difference}")
    if max_error is None:
        return
    several = len(suite.validations) > 1
    wrong = [
        f"{f'{v.name}: ' if several else ''}{r.quantity.label} {percent(r.timing_error)}"
        for v in suite.validations
        for r in beyond(v, max_error / 100)
    ]
    if wrong:
        raise RunFailed(f"off by more than {max_error:g} % and the real side's own spread: {', '.join(wrong)}")
