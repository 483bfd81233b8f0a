"""The command that measures how far the simulation is from a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.app import Json, Out, Overrides, Seed, VariantName, WithReport, app, command_of
from testbed.commands.errors import Interrupted, RunFailed, UserError
from testbed.console import complain, err, notes, run_bar, say
from testbed.run_files import JOURNAL, SCENARIO

MARKER = "validation.json"
"""The figures, in the folder of an earlier validation."""


@app.command(short_help="Run a scenario really, simulate it, and report how far the simulation is off.")
def validate(
    ctx: typer.Context,
    scenario: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A scenario, or a study with --variant. With --run: what is simulated."),
    ] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option("--run", metavar="FOLDER", help="A real run made already (or a folder of them); may be repeated."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(metavar="N", help="Real runs of the same scenario and seed, for the real side's spread.", min=1),
    ] = 1,
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
    variant: VariantName = None,
    seed: Seed = None,
    report_: WithReport = True,
) -> None:
    """Run a scenario on actual engines (or take runs that are there already), and compare it with its simulation.

    Three ways, to tell where an error comes from: (a) the real journal's events through the scheduling core, whose
    decisions must be the same; (b) the real run's own prompts, lengths, tool times and rewards with simulated times;
    (c) the scenario's own work model. Exit code 1 if a decision differs, or as --max-error says.
    """
    from testbed.commands import folders
    from testbed.machine import busy
    from testbed.validation.result import beyond, figures_of

    if run and (repeats > 1 or seed is not None):
        option = "--repeats" if repeats > 1 else "--seed"
        raise UserError(f"{option}: the real runs are given (nearest: --run FOLDER once for each, and no {option})")
    if scenario is None and not run:
        raise UserError("which scenario? (nearest: testbed validate FILE, or --run FOLDER for a run made already)")
    if scenario is None and variant is not None:
        raise UserError(f"--variant {variant}: belongs to a study (nearest: testbed validate FILE --variant {variant})")
    given = folders.journals(run) if run else []
    disturbed = ""
    chosen = _chosen(scenario if scenario is not None else _scenario_beside(given[0]), set_ or (), variant, not run)
    config = chosen.scenario if seed is None else _seeded(chosen.scenario, seed)
    folder = folders.fresh(out_ or Path("runs") / f"{folders.slug(chosen.name)}-validation", MARKER)
    folders.target("--json", json_)
    if not given:
        _refuse_foreign_profile(config, chosen.base_dir, None)
        _precheck(config, chosen.base_dir)
        folders.write_json(folder / MARKER, {})  # an interrupted validation's folder may be used again
        disturbed = busy()
        given = _made(config, chosen, folder, repeats)
    result = _validated(given, config, chosen, folder)
    result.remarks += filter(None, [disturbed])
    result.command = command_of(ctx)
    figures = figures_of(result)
    folders.write_json(folder / MARKER, figures)
    folders.write_json(json_, {**figures, "folder": str(folder)})
    notes(result.remarks)
    _show(result)
    if report_:
        from reports.validation import write_validation

        say(f"report   {write_validation(result, folder / 'report')['index']}")
    say(f"runs     {folder}")
    if not result.decided_alike:
        first = next(d for d in result.decisions if d.difference)
        raise RunFailed(f"{first.run}: the core answers differently\n{first.difference}")
    if max_error is not None and (rows := beyond(result, max_error / 100)):
        said = ", ".join(f"{r.quantity.label} {_percent(r.timing_error)}" for r in rows)
        raise RunFailed(f"off by more than {max_error:g} % and the real side's own spread: {said}")


# --- what is compared -------------------------------------------------------------------------------------------------


def _chosen(path: Path, overrides: Sequence[str], variant: str | None, to_be_run: bool) -> Any:
    from testbed.commands.chosen import one

    if to_be_run:  # what a real run refuses is said now; what the simulator refuses, by the second reading
        one(path, overrides, variant, simulated=False)
    return one(path, overrides, variant)


def _scenario_beside(journal: Path) -> Path:
    path = journal.parent / SCENARIO
    if not path.is_file():
        raise UserError(f"{path}: missing, so nothing says what to simulate (nearest: testbed validate FILE --run ...)")
    return path


def _seeded(config: Any, seed: int) -> Any:
    from testbed.commands.chosen import with_seed

    return with_seed(config, seed)


def _precheck(config: Any, base_dir: Path) -> None:
    """Raise what the simulations would, before minutes are spent on real runs."""
    from sim.driver import SimulatedBackend

    if config.run.journal != "full":
        raise UserError(f"run.journal: {config.run.journal}: a validation needs the whole journal (nearest: full)")
    SimulatedBackend(config, base_dir)


def _refuse_foreign_profile(config: Any, base_dir: Path, real_versions: dict[str, str] | None) -> None:
    """A calibration of another engine version, or of another machine than the one that is to run, says nothing here.
    `real_versions`: of a run that was made already; None: of one to be made on this machine."""
    costs = config.simulation.engine_costs
    if costs.type != "calibrated":
        return
    from sim.costs.calibrated import read_profile, refuse_other

    profile = read_profile(base_dir / costs.profile)
    if real_versions is None:
        from testbed.machine import machine
        from testbed.recording import versions_of

        refuse_other(profile, costs.profile, versions_of(profile.versions), machine())
    else:
        refuse_other(profile, costs.profile, real_versions)


def _made(config: Any, chosen: Any, folder: Path, repeats: int) -> list[Path]:
    """Make the real runs; their journals."""
    from testbed.cli.real import real_runs

    places = [folder / f"real-{i}" for i in range(1, repeats + 1)]
    results, _ = real_runs([(config, chosen.base_dir, place, chosen.name) for place in places])
    problem = next((r.problem for r in results if r.problem), "")
    if len(results) < repeats or problem == "interrupted":
        complete = [str(p) for p, r in zip(places, results, strict=False) if not r.problem]
        hint = f"; testbed validate --run {' --run '.join(complete)} takes those" if complete else ""
        raise Interrupted(f"interrupted, {len(complete)} of {repeats} real runs are complete{hint}")
    if problem:
        raise RunFailed(f"{chosen.name}: the real run did not come to its end: {problem}")
    return [place / JOURNAL for place in places]


def _validated(journals: Sequence[Path], config: Any, chosen: Any, folder: Path) -> Any:
    """Replay, simulate and compare."""
    from sim.run import versions
    from testbed.commands.recorded import scenario_of
    from testbed.journal import read_journal
    from testbed.scenario.load import scenario_hash
    from testbed.validation import plan
    from testbed.validation import result as found
    from testbed.validation.observed import observe

    decisions, remarks = [], []
    real: list[Any] = []
    timing: list[Any] = []
    full: list[Any] = []
    sims: list[Any] = []
    runs: list[Any] = []
    for journal in journals:
        header, _ = read_journal(journal)
        own = scenario_of(journal, header)
        _same_experiment(config, own, str(journal.parent), chosen)
        _refuse_foreign_profile(config, chosen.base_dir, header.versions)
        runs.append((journal, own, header))
    for i, (journal, own, header) in enumerate(runs, 1):
        run = str(journal.parent)
        if header.backend != "real":
            remarks.append(f"{run} is a simulated run: this checks the validation, not the simulator")
        decisions.append(_replayed(journal, own, run))
        observed = observe(journal, own)
        if observed.truncated:
            remarks.append(f"{observed.truncated}; compared up to there")
        real.append(observed)
        batches = len(observed.summary.steps)
        for kind, side, scenario in (
            ("timing", timing, plan.timing(config, own, batches, journal)),
            ("full", full, plan.full(config, own, batches)),
        ):
            done = _simulated(scenario, chosen.base_dir, folder / f"{kind}-{i}", f"{kind} {i}/{len(journals)}")
            sims.append(done)
            if done.summary.finish_reason == "tasks_exhausted":
                trained = len(done.summary.steps)
                remarks.append(
                    f"{kind} {i}: the tasks of the real run gave {trained} of its {batches} batches: groups that it "
                    "left unfinished at its end have no lengths"
                )
            side.append(observe(folder / f"{kind}-{i}" / journal.name, scenario))
    turns, worst = found.turns_of([str(j.parent) for j in journals], real, timing)
    measure = config.experience.staleness.measure
    return found.Validation(
        name=chosen.name,
        question=chosen.question,
        runs=[str(j.parent) for j in journals],
        measure=measure,
        steps=real[0].summary.measured_steps,
        decisions=decisions,
        rows=found.rows_of(real, timing, full),
        staleness=found.staleness_of(measure, real, timing, full),
        turns=turns,
        worst=worst,
        running={"real": found.running_of(real[0]), "timing": found.running_of(timing[0])},
        kinds=dict(sims[0].summary.kinds) | {"work": sims[-1].summary.kinds.get("reply_lengths", "assumed")},
        marks={k: max(s.summary.marks.get(k, 0.0) for s in sims) for k in sims[0].summary.marks},
        real_versions=dict(runs[0][2].versions),
        versions=versions(),
        scenario=scenario_hash(config),
        seconds=sum(s.cpu_s for s in sims),
        remarks=remarks,
    )


def _same_experiment(config: Any, own: Any, run: str, chosen: Any) -> None:
    from testbed.validation.plan import first_difference

    different = first_difference(config, own)
    if different:
        raise UserError(
            f"{run}: not a run of {chosen.name}: {different} (nearest: testbed validate --run {run}, which simulates "
            "what the run says of itself)"
        )


def _replayed(journal: Path, own: Any, run: str) -> Any:
    from testbed.journal.replay import replay
    from testbed.validation.result import Decisions

    try:
        found = replay(journal, own)
    except LookupError as lost:
        return Decisions(run, 0, 0, f"an event names what this run does not have ({lost!r})")
    difference = "" if found.difference is None else str(found.difference)
    return Decisions(run, found.events, found.actions, difference, found.truncated)


def _simulated(scenario: Any, base_dir: Path, folder: Path, name: str) -> Any:
    from sim.run import simulate
    from testbed.commands import folders
    from testbed.commands.jobs import stoppable

    if not err.is_terminal:
        complain(f"simulating {name}")
    with run_bar(scenario.run.num_rollout) as progress, stoppable(progress) as tick:
        done = simulate(scenario, base_dir, folder, progress=tick, name=name)
    folders.drop_report(folder)
    if done.problem == "interrupted":
        raise Interrupted(f"{name}: interrupted; the real runs are whole (nearest: testbed validate --run FOLDER)")
    if done.problem:
        raise RunFailed(f"{name}: the simulation did not come to its end: {done.problem}")
    return done


# --- what it prints ---------------------------------------------------------------------------------------------------


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"


def _show(v: Any) -> None:
    from statistics import fmean

    from rich.table import Table

    from testbed.console import show_table
    from testbed.validation.result import causes

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for head in ("real", "± std", "own work", "error", "full", "error", "limit", ""):
        table.add_column(head, justify="right", no_wrap=True)
    shown = [r for r in v.rows if r.quantity.group in ("steps", "turns") or r.quantity.name == "update/total"]
    for r in shown:
        limit = r.quantity.limit
        table.add_row(
            r.quantity.label,
            f"{fmean(r.real):.4g}",
            "-" if r.spread is None else f"{r.spread:.2g}",
            f"{fmean(r.timing):.4g}",
            _percent(r.timing_error),
            f"{fmean(r.full):.4g}",
            _percent(r.full_error),
            "" if limit is None else f"{100 * limit:.0f} %",
            r.verdict(r.timing, limit),
        )
    show_table(table)
    for h in v.staleness:
        own = f"{h.timing_variation:.3f} with the run's own work, {h.full_variation:.3f} in full"
        spread = "" if h.spread is None else f" (between real runs {h.spread:.3f})"
        say(f"staleness at {h.event} ({v.measure}): total variation {own}{spread}")
    m = v.turns
    say(
        f"turns    {m.pairs:,} of {m.turns:,} matched; cached tokens equal in {100 * m.same_cached:.1f} %, latency off "
        f"by {100 * m.latency_error_median:+.1f} % in the median, {100 * m.latency_error_p95:.0f} % at p95 without sign"
    )
    alike = sum(not d.difference for d in v.decisions)
    actions = sum(d.actions for d in v.decisions)
    say(f"decisions identical in {alike} of {len(v.decisions)} runs, {actions:,} actions")
    parts = [f"{cause} {100 * t:+.1f} % times, {100 * w:+.1f} % work" for cause, t, w in causes(v)[:3]]
    if parts:
        say(f"of a step: {'; '.join(parts)}")
