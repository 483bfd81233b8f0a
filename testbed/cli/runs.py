"""Commands that make runs: run (in the simulator) and compare (on either backend)."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.app import (
    Json,
    Out,
    Overrides,
    Seed,
    VariantName,
    WithReport,
    app,
    command_of,
    report_comparison,
    write_trace,
)
from testbed.commands.errors import Interrupted, RunFailed, UserError
from testbed.console import bar, complain, err, figures_of, notes, run_bar, said_of, say, show_run
from testbed.run_files import JOURNAL, SCENARIO

BACKENDS = ("sim", "real")


@app.command(short_help="Run one scenario, write its run folder and report.")
def run(
    ctx: typer.Context,
    scenario: Annotated[Path, typer.Argument(metavar="FILE", help="A scenario, or a study with --variant.")],
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    variant: VariantName = None,
    seed: Seed = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a Perfetto / Chrome trace.")] = None,
    report_: WithReport = True,
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
    folder = folders.fresh(out_ or Path("runs") / folders.slug(name), SCENARIO)
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
        write_trace(folder / JOURNAL, trace)
    if report_ and done.summary.measured_steps:
        from reports.write import write_run_report

        paths = write_run_report(
            done.summary,
            folder / "report",
            question=chosen.question,
            command=command_of(ctx),
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
    return done


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
        int | None, typer.Option(metavar="N", help="Simulated runs at a time (default: the number of cores).", min=1)
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="sim|real", help="The simulator, or actual engines and trainers, one run at a time.")
    ] = "sim",
) -> None:
    """Run every variant with every seed and write one comparison report.

    Ctrl-C ends it early; `testbed report FOLDER` then compares the runs that are complete.
    """
    from reports.comparison import VariantRuns
    from testbed.commands import folders
    from testbed.commands.chosen import about_comparison, named, seeds_of, study_of, with_seed
    from testbed.scenario.fields import closest

    if backend not in BACKENDS:
        raise UserError(f"--backend {backend}: no such backend (nearest: --backend {closest(backend, BACKENDS, 0.0)})")
    real = backend == "real"
    study = study_of(files, set_ or (), seeds is not None, simulated=not real)
    variants = named(only, study.variants, "--only") if only else list(study.variants)
    wanted = seeds_of(seeds, study.seeds)
    notes(f"{v.name}: {r}" for v in variants for r in v.remarks)
    folder = folders.fresh(out_ or Path("runs") / folders.slug(study.name), folders.STUDY)
    folders.target("--json", json_)
    _precheck(study, variants, wanted[0], real)
    places = [folder / place for place in folders.slugs(v.name for v in variants)]
    work = [
        (with_seed(v.scenario, s), str(study.base_dir), str(place / f"seed-{s}"), v.name)
        for v, place in zip(variants, places, strict=True)
        for s in wanted
    ]
    about = about_comparison(study, variants, wanted, command_of(ctx), real=real)
    folders.drop_report(folder)
    folders.drop_other_runs(folder, {Path(job[2]) for job in work})
    folders.write_json(folder / folders.STUDY, about)
    started = time.perf_counter()
    results, versions = _real_runs(work) if real else _simulated_runs(work, jobs, folder)
    took = time.perf_counter() - started
    problems = [f"{job[3]}, {job[2]}: {r.problem}" for job, r in zip(work, results, strict=False) if r.problem]
    if len(results) < len(work) or any(r.problem == "interrupted" for r in results):
        raise Interrupted(_cut_short(sum(not r.problem for r in results), len(work), folder))
    if problems:
        raise RunFailed("\n".join(problems))
    runs = [
        VariantRuns(
            "", v.name, v.note, [r.summary for r in results[i * len(wanted) : (i + 1) * len(wanted)]], dict(v.changes)
        )
        for i, v in enumerate(variants)
    ]
    seconds = took if real else sum(r.cpu_s for r in results)
    report_comparison(about, runs, folder / "report", json_, versions, seconds)
    say(f"runs     {folder} ({len(work)} in {took:.1f} s)")


def _cut_short(complete: int, of: int, folder: Path) -> str:
    hint = f": testbed report {folder} compares them" if complete else ""
    return f"interrupted, {complete} of {of} runs are complete{hint}"


def _simulated_runs(work: list[Any], jobs: int | None, folder: Path) -> tuple[list[Any], dict[str, str]]:
    """Every run in the simulator, several at a time; with the versions of what made them."""
    from sim.run import versions
    from testbed.commands.jobs import run_jobs

    results: list[Any] = [None] * len(work)
    progress = bar()
    line = progress.add_task("runs", total=len(work), detail="")

    def done(index: int, result: Any) -> None:
        results[index] = result
        detail = said_of(work[index][3], result)
        progress.update(line, advance=1, detail=detail)
        if not err.is_terminal:
            complain(f"[{sum(r is not None for r in results)}/{len(work)}] {detail}")

    try:
        run_jobs(_job, work, min(jobs or os.cpu_count() or 1, len(work)), progress.start, done)
    except KeyboardInterrupt:
        raise Interrupted(_cut_short(sum(r is not None for r in results), len(work), folder)) from None
    finally:
        progress.stop()
    return results, versions()


def _real_runs(work: list[Any]) -> tuple[list[Any], dict[str, str]]:
    """Every run on actual engines, one after another; fewer results than `work` after Ctrl-C."""
    from testbed.cli.real import real_runs

    return real_runs([(scenario, Path(base), Path(folder), name) for scenario, base, folder, name in work])


def _precheck(study: Any, variants: Sequence[Any], seed: int, real: bool) -> None:
    """Raise what would make the comparison impossible before hours are spent on its runs."""
    from reports.palette import LETTERS
    from testbed.commands.chosen import with_seed
    from testbed.scenario.layout import layout_of

    if len(variants) > len(LETTERS):
        several = f"--only {shlex.quote(variants[0].name)} --only {shlex.quote(variants[1].name)} ..."
        raise UserError(f"{len(variants)} variants are more than a report shows, {len(LETTERS)} (nearest: {several})")
    scenarios = [with_seed(v.scenario, seed) for v in variants]
    allowed = set(study.allow_unequal)
    for what, values, excused, near in (
        (
            "workloads",
            _asked(scenarios, study.base_dir, real),
            bool(allowed & {"workload", "batch"}),
            "a study with allow_unequal: [workload]",
        ),
        (
            "numbers of GPUs",
            [layout_of(s).num_gpus for s in scenarios],
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


def _asked(scenarios: Sequence[Any], base_dir: Path, real: bool) -> list[str]:
    """What tells whether variants are asked the same: the workload's fingerprint. Building a simulated backend also
    raises what only shows then (files, tables)."""
    from sim.driver import SimulatedBackend
    from testbed.workloads import workload

    if real:
        return [workload(s, base_dir).fingerprint for s in scenarios]
    return [SimulatedBackend(s, base_dir).workload.fingerprint for s in scenarios]


def _job(arg: tuple[Any, str, str, str]) -> Any:
    """One run of a comparison, perhaps in a worker process. A run that was asked to stop is no result."""
    from testbed.commands.jobs import stop_asked

    scenario, base_dir, folder, name = arg
    done = None if stop_asked() else _simulate(scenario, Path(base_dir), Path(folder), name)
    if done is None or done.problem == "interrupted" or stop_asked():
        raise KeyboardInterrupt
    return done
