"""The command line: `testbed run | compare | replay | report | schema | doctor`.

This is where the pieces meet: a command imports the backend or the reports that it needs, and nothing else may. What
needs neither is in `testbed.commands`. A user error is one message and exit code 2; a run that got stuck or a replay
that differs is exit code 1; Ctrl-C is 130.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.commands.errors import CommandError, Interrupted, RunFailed, UserError
from testbed.console import (
    bar,
    comparison_figures,
    complain,
    err,
    figures_of,
    notes,
    run_bar,
    say,
    show_comparison,
    show_run,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A testbed for LLM reinforcement-learning systems: what-if placement, validation and comparison reports.",
    epilog="Start with: testbed run scenarios/examples/maths_colocated_8xh100.yaml",
)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value of the scenario, e.g. run.seed=3; may be given again."
    ),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the printed figures to FILE.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Where to write (default: runs/NAME).")]


def main(args: Sequence[str] | None = None) -> None:
    """Entry point: turns user errors into one message and an exit code. No arguments: help."""
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        code = app(args, prog_name="testbed", standalone_mode=False, obj=shlex.join(["testbed", *args]))
        sys.stdout.flush()
    except BrokenPipeError:  # `testbed schema | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        said = _message(error)
        if said is None:
            raise
        complain(f"testbed: {said}")
        sys.exit(error.code if isinstance(error, CommandError) else 2)
    if code == 130:  # Ctrl-C where no command took it up
        complain("testbed: interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _message(error: Exception) -> str | None:
    """What to tell the user, or None for a bug of ours."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a wrong option or argument
        context = getattr(error, "ctx", None)
        return f"{error.format_message()} (see {context.command_path if context else 'testbed'} --help)"
    if isinstance(error, _user_errors()):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return None


def _user_errors() -> tuple[type[BaseException], ...]:
    from testbed.journal import JournalError
    from testbed.scenario.catalogue import CatalogueError
    from testbed.scenario.errors import ScenarioError

    errors: list[type[BaseException]] = [CommandError, ScenarioError, CatalogueError, JournalError]
    if "sim" in sys.modules:
        from sim.costs.errors import CostModelError
        from testbed.workloads import WorkloadError

        errors += [CostModelError, WorkloadError]
    if "reports" in sys.modules:
        from reports.comparison import ComparisonError

        errors.append(ComparisonError)
    return tuple(errors)


# --- run --------------------------------------------------------------------------------------------------------------


@app.command(short_help="Run one scenario, write its run folder and report.")
def run(
    ctx: typer.Context,
    scenario: Annotated[Path, typer.Argument(metavar="FILE", help="A scenario, or a study with --variant.")],
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which variant of a study (default: its baseline).")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed (default: the scenario's).", min=0)] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a Perfetto / Chrome trace.")] = None,
    report_: Annotated[bool, typer.Option("--report/--no-report", help="Write the HTML report.")] = True,
) -> None:
    """Run one scenario in the simulator and write its run folder: scenario.yaml, journal, metrics and report.

    Ctrl-C ends the run early; what it did until then is in the folder.
    """
    from sim.run import versions
    from testbed.commands import folders
    from testbed.commands.chosen import facts_of, one, with_seed
    from testbed.commands.jobs import stop_asked

    chosen = one(scenario, set_ or (), variant)
    config, name = chosen.scenario, chosen.name
    if seed is not None:
        config = with_seed(config, seed)
    if trace is not None and config.run.journal != "full":
        raise UserError(f"--trace {trace}: needs the whole journal (nearest: --set run.journal=full)")
    folder = folders.fresh(out_ or Path("runs") / folders.slug(name), folders.SCENARIO)
    folders.target("--json", json_)
    folders.target("--trace", trace)
    with run_bar(config.run.num_rollout) as progress:
        done = _simulate(config, chosen.base_dir, folder, name, progress)
    show_run(done.summary)
    folders.write_json(
        json_, {**figures_of(done.summary), "cpu_s": done.cpu_s, "problem": done.problem, "folder": str(folder)}
    )
    if stop_asked() and not done.problem:
        raise Interrupted(
            f"{name}: interrupted, but the run in {folder} is complete (nearest: testbed report {folder})"
        )
    if trace is not None:
        _write_trace(folder / folders.JOURNAL, trace)
    if report_ and done.summary.measured_steps:
        from reports.write import write_run_report

        paths = write_run_report(
            done.summary,
            folder / "report",
            question=chosen.question,
            command=_command(ctx),
            versions=versions(),
            seconds=done.cpu_s,
            facts=facts_of(config),
        )
        say(f"report   {paths['index']}")
    say(f"run      {folder}")
    if done.problem == "interrupted":
        raise Interrupted(f"{name}: interrupted; {folder} holds what it did until then")
    if done.problem:
        raise RunFailed(f"{name}: {done.problem}")


def _simulate(config: Any, base_dir: Path, folder: Path, name: str, progress: Any = None) -> Any:
    """One run, stopped by Ctrl-C between two events. Nothing of an earlier run in the folder outlives it."""
    from sim.run import simulate
    from testbed.commands import folders
    from testbed.commands.jobs import stoppable

    with stoppable(progress) as tick:
        done = simulate(config, base_dir, folder, progress=tick, name=name)
    folders.drop_report(folder)
    if config.run.journal == "off":
        (folder / folders.JOURNAL).unlink(missing_ok=True)
    return done


def _write_trace(journal: Path, trace: Path) -> None:
    from reports.perfetto import write_trace
    from testbed.commands.recorded import scenario_of
    from testbed.journal import read_journal, require_complete

    header, records = read_journal(journal)
    require_complete(journal, header, "drawn")
    trace.parent.mkdir(parents=True, exist_ok=True)
    write_trace(((r.event, r.actions) for r in records), scenario_of(journal, header), trace)
    say(f"trace    {trace}")


def _command(ctx: typer.Context) -> str:
    return str(ctx.obj or ctx.command_path)


# --- compare ----------------------------------------------------------------------------------------------------------


@app.command(short_help="Run every variant of a study, write one comparison.")
def compare(
    ctx: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="A study, or two or more scenarios.")],
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    seeds: Annotated[str | None, typer.Option(metavar="SEEDS", help="1..5 or 1,2,3 (default: the study's).")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this variant; may be given again.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Runs at a time (default: the number of cores).", min=1)
    ] = None,
) -> None:
    """Run every variant with every seed and write one comparison report.

    Ctrl-C ends it early; `testbed report FOLDER` then compares the runs that are complete.
    """
    import time

    from reports.comparison import VariantRuns
    from sim.run import versions
    from testbed.commands import folders
    from testbed.commands.chosen import about_comparison, named, seeds_of, study_of, with_seed
    from testbed.commands.jobs import run_jobs

    study = study_of(files, set_ or (), seeds is not None)
    variants = named(only, study.variants, "--only") if only else list(study.variants)
    wanted = seeds_of(seeds, study.seeds)
    notes(f"{v.name}: {r}" for v in variants for r in v.remarks)
    folder = folders.fresh(out_ or Path("runs") / folders.slug(study.name), folders.STUDY)
    folders.target("--json", json_)
    _precheck(study, variants, wanted[0])
    places = [folder / place for place in folders.slugs(v.name for v in variants)]
    work = [
        (with_seed(v.scenario, s), str(study.base_dir), str(place / f"seed-{s}"), v.name)
        for v, place in zip(variants, places, strict=True)
        for s in wanted
    ]
    about = about_comparison(study, variants, wanted, _command(ctx))
    folders.drop_report(folder)
    folders.drop_other_runs(folder, {Path(job[2]) for job in work})
    folders.write_json(folder / folders.STUDY, about)
    workers = min(jobs or os.cpu_count() or 1, len(work))
    results: list[Any] = [None] * len(work)
    started = time.perf_counter()
    progress = bar()
    line = progress.add_task("runs", total=len(work), detail="")

    def done(index: int, result: Any) -> None:
        results[index] = result
        step = f"step {result.summary.step_time_mean_s:.1f} s" if not result.problem else result.problem
        detail = f"{work[index][3]:.40}, seed {result.summary.seed}: {step}"
        progress.update(line, advance=1, detail=detail)
        if not err.is_terminal:
            complain(f"[{sum(r is not None for r in results)}/{len(work)}] {detail}")

    try:
        run_jobs(_job, work, workers, progress.start, done)
    except KeyboardInterrupt:
        complete = sum(r is not None for r in results)
        hint = f": testbed report {folder} compares them" if complete else ""
        raise Interrupted(f"interrupted, {complete} of {len(work)} runs are complete{hint}") from None
    finally:
        progress.stop()
    took = time.perf_counter() - started
    problems = [f"{job[3]}, {job[2]}: {r.problem}" for job, r in zip(work, results, strict=True) if r.problem]
    if problems:
        raise RunFailed("\n".join(problems))
    runs = [
        VariantRuns(
            "", v.name, v.note, [r.summary for r in results[i * len(wanted) : (i + 1) * len(wanted)]], dict(v.changes)
        )
        for i, v in enumerate(variants)
    ]
    _report_comparison(about, runs, folder / "report", json_, versions(), sum(r.cpu_s for r in results))
    say(f"runs     {folder} ({len(work)} in {took:.1f} s, {workers} at a time)")


def _precheck(study: Any, variants: Sequence[Any], seed: int) -> None:
    """Raise what would make the comparison impossible before hours are spent on its runs."""
    from reports.palette import LETTERS
    from sim.driver import SimulatedBackend
    from testbed.commands.chosen import with_seed

    if len(variants) > len(LETTERS):
        several = f"--only {shlex.quote(variants[0].name)} --only {shlex.quote(variants[1].name)} ..."
        raise UserError(f"{len(variants)} variants are more than a report shows, {len(LETTERS)} (nearest: {several})")
    backends = [SimulatedBackend(with_seed(v.scenario, seed), study.base_dir) for v in variants]
    allowed = set(study.allow_unequal)
    for what, values, excused, near in (
        (
            "workloads",
            [b.workload.fingerprint for b in backends],
            bool(allowed & {"workload", "batch"}),
            "a study with allow_unequal: [workload]",
        ),
        (
            "numbers of GPUs",
            [b.core.layout.num_gpus for b in backends],
            "gpus" in allowed,
            "a study with allow_unequal: [gpus]",
        ),
        (
            "staleness measures",
            [v.scenario.experience.staleness.measure for v in variants],
            False,
            f"--set experience.staleness.measure={variants[0].scenario.experience.staleness.measure}",
        ),
    ):
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None and not excused:
            pair = f"{variants[0].name!r} has {values[0]}, {variants[other].name!r} has {values[other]}"
            raise UserError(f"different {what}: {pair} (nearest: {near})")


def _job(arg: tuple[Any, str, str, str]) -> Any:
    """One run of a comparison, perhaps in a worker process. A run that was asked to stop is no result."""
    from testbed.commands.jobs import stop_asked

    scenario, base_dir, folder, name = arg
    done = None if stop_asked() else _simulate(scenario, Path(base_dir), Path(folder), name)
    if done is None or done.problem == "interrupted" or stop_asked():
        raise KeyboardInterrupt
    return done


def _report_comparison(
    about: dict[str, Any],
    runs: Sequence[Any],
    folder: Path,
    json_: Path | None,
    versions: dict[str, str] | None = None,
    seconds: float = 0.0,
) -> None:
    """Write the report of a comparison, show its table, say where the report is."""
    from reports.comparison import build_comparison
    from reports.write import write_report
    from testbed.commands.folders import write_json

    names = [v.name for v in runs]
    comparison = build_comparison(
        study=about["study"],
        question=about["question"],
        variants=runs,
        baseline=names.index(about["baseline"]) if about["baseline"] in names else 0,
        command=about["command"],
        versions=versions,
        seconds=seconds,
        facts=about["facts"],
        allow_unequal=about["allow_unequal"],
        alternatives=about["alternatives"],
    )
    paths = write_report(comparison, folder)
    show_comparison(comparison)
    write_json(json_, comparison_figures(comparison))
    say(f"report   {paths['index']}")


# --- replay, report ---------------------------------------------------------------------------------------------------


@app.command(short_help="Repeat a run's decisions from its journal and compare.")
def replay(
    runs: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Run folders (or folders of runs, or journals).")
    ],
    json_: Json = None,
) -> None:
    """Feed a run's events back through the core and compare every action; exit code 1 at the first difference."""
    from testbed.commands import folders
    from testbed.commands.recorded import scenario_of
    from testbed.journal import read_journal
    from testbed.journal.replay import replay as replay_journal

    folders.target("--json", json_)
    figures = []
    for journal in folders.journals(runs):
        header, _ = read_journal(journal)
        scenario = scenario_of(journal, header) if header.scenario is not None else None
        try:
            result = replay_journal(journal, scenario)
        except LookupError as lost:
            raise RunFailed(f"{journal}: an event names what this run does not have ({lost!r})") from None
        folder = journal.parent if journal.name == folders.JOURNAL else journal
        figures.append(
            {
                "run": str(folder),
                "events": result.events,
                "actions": result.actions,
                "equal": result.difference is None,
                "truncated": result.truncated,
                "difference": None if result.difference is None else str(result.difference),
            }
        )
        if result.difference is not None:
            complain(f"{folder}: the core answers differently\n{result.difference}")
            break
        note = f" ({result.truncated})" if result.truncated else ""
        say(f"{folder}: {result.events:,} events, {result.actions:,} actions, all equal{note}")
    folders.write_json(json_, figures)
    if not all(f["equal"] for f in figures):
        raise typer.Exit(1)


@app.command(short_help="Make the report of runs from their folders.")
def report(
    ctx: typer.Context,
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER", help="Run folders, or the folder of a comparison; several are compared."),
    ],
    out_: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where to write (default: FOLDER/report; of several: runs/report)."
        ),
    ] = None,
    json_: Json = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a Perfetto trace (one run).")] = None,
) -> None:
    """Make the report of one run, or compare several, from their folders."""
    from reports.comparison import VariantRuns
    from reports.write import write_run_report
    from testbed.commands import folders
    from testbed.commands.chosen import facts_of
    from testbed.commands.recorded import about_of, gather, variants_of

    found = folders.runs(runs)
    place = out_ or (runs[0] / "report" if len(runs) == 1 else Path("runs") / "report")
    folders.fresh(place, "index.html")
    folders.target("--json", json_)
    folders.target("--trace", trace)
    about = about_of(runs[0]) if len(runs) == 1 else None
    if trace is not None:
        if len(found) != 1:
            raise UserError(
                f"--trace {trace}: takes one run, not {len(found)} (nearest: testbed report {found[0]} --trace {trace})"
            )
        _write_trace(found[0] / folders.JOURNAL, trace)
    if len(found) == 1 and about is None:
        summary, scenario, remarks = gather(found)[0]
        notes(remarks)
        show_run(summary)
        folders.write_json(json_, {**figures_of(summary), "folder": str(found[0])})
        if not summary.measured_steps:
            raise UserError(f"{found[0]}: no step was measured, there is nothing to report ({summary.finish_reason})")
        paths = write_run_report(
            summary,
            place,
            question=scenario.question if scenario else "",
            command=_command(ctx),
            facts=facts_of(scenario) if scenario else None,
        )
        say(f"report   {paths['index']}")
        return
    variants, remarks = variants_of(gather(found), found)
    notes(remarks)
    known = {v["name"]: v for v in about["variants"]} if about else {}
    order = list(known)
    variants.sort(key=lambda v: order.index(v[0]) if v[0] in known else len(order))
    _report_comparison(
        {
            "study": "report",
            "question": "How do these runs compare?",
            "baseline": variants[0][0],
            "facts": {},
            "allow_unequal": [],
            "alternatives": True,
            **(about or {}),
            "command": _command(ctx),
        },
        [
            VariantRuns("", name, known.get(name, {}).get("note", ""), of_name, known.get(name, {}).get("changes", {}))
            for name, of_name in variants
        ],
        place,
        json_,
    )


# --- schema, doctor ---------------------------------------------------------------------------------------------------


@app.command(short_help="Print the JSON Schema of scenario or study files.")
def schema(
    what: Annotated[str, typer.Argument(metavar="scenario|study", help="Of which files.")] = "scenario",
    json_: Json = None,
) -> None:
    """Print the JSON Schema of scenario or study files, for editors that check and complete YAML."""
    from testbed.commands import folders
    from testbed.scenario.schema import scenario_schema, study_schema

    makers: dict[str, Callable[[], dict[str, Any]]] = {"scenario": scenario_schema, "study": study_schema}
    if what not in makers:
        raise UserError(f"schema {what}: no such schema (nearest: scenario, study)")
    folders.target("--json", json_)
    made = makers[what]()
    folders.write_json(json_, made)
    print(json.dumps(made, indent=1))


@app.command(short_help="Say what is installed and what is missing.")
def doctor(json_: Json = None) -> None:
    """Say what is installed, what is missing and how to get it, and which GPUs and models are known by name."""
    from testbed.commands import folders
    from testbed.commands.installed import EXTRAS, installed

    folders.target("--json", json_)
    figures = installed()
    missing = figures["simulator_missing"]
    say(f"python {figures['python']}, {figures['cores']} cores")
    say(f"simulator: MISSING {', '.join(missing)}: pip install -e ." if missing else "simulator: ready")
    for extra, (_, use) in EXTRAS.items():
        lacking = figures["extras"][extra]["missing"]
        state = f"not installed ({', '.join(lacking)}): pip install -e '.[{extra}]'" if lacking else "ready"
        say(f"extra {extra} ({use}): {state}")
    say(f"GPUs: {', '.join(figures['gpus'])}")
    say(f"model presets: {', '.join(figures['models'])}")
    folders.write_json(json_, figures)
    if missing:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
