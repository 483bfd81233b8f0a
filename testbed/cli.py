"""The command line: `testbed run | compare | replay | report | schema | doctor`.

This is where the pieces meet: a command imports the backend or the reports that it needs, and nothing else may. Every user error is
one message and exit code 2; a run that got stuck or a replay that differs is exit code 1.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.console import bar, err, figures_of, out, run_bar, show_run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A testbed for LLM reinforcement-learning systems: what-if placement, validation and comparison reports.",
)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the scenario, e.g. run.seed=3.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the printed figures to FILE.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Where to write (default: runs/NAME).")]


class UserError(Exception):
    """One message, exit code 2."""


def _user_errors() -> tuple[type[BaseException], ...]:
    from testbed.journal import JournalError
    from testbed.scenario.catalogue import CatalogueError
    from testbed.scenario.errors import ScenarioError

    errors: list[type[BaseException]] = [UserError, ScenarioError, CatalogueError, JournalError]
    if "sim" in sys.modules:
        from sim.costs.errors import CostModelError
        from sim.workloads import WorkloadError

        errors += [CostModelError, WorkloadError]
    if "reports" in sys.modules:
        from reports.comparison import ComparisonError

        errors.append(ComparisonError)
    return tuple(errors)


def main() -> None:
    """Entry point: turns user errors into one message and an exit code."""
    try:
        app(standalone_mode=False)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        err.print("interrupted")
        sys.exit(130)
    except BaseException as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a wrong option or argument
            err.print(f"testbed: {error.format_message()} (see testbed --help)", markup=False)
            sys.exit(2)
        if isinstance(error, _user_errors()):
            err.print(f"testbed: {error}", markup=False)
            sys.exit(2)
        if isinstance(error, OSError) and error.filename is not None:
            err.print(f"testbed: {error.filename}: {error.strerror}", markup=False)
            sys.exit(2)
        raise


# --- helpers ----------------------------------------------------------------------------------------------------------------


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "run"


def _write_json(path: Path | None, figures: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _command() -> str:
    return "testbed " + " ".join(sys.argv[1:])


def _fresh(folder: Path, marker: str) -> Path:
    """Refuse to write into a folder that holds something else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / marker).exists():
        raise UserError(f"{folder} exists and holds something else: name another folder with --out")
    return folder


def _with_seed(scenario: Any, seed: int) -> Any:
    return scenario.model_copy(update={"run": scenario.run.model_copy(update={"seed": seed})})


def _seeds(text: str | None, default: Sequence[int]) -> list[int]:
    """`3`, `1,2,3` or `1..5`."""
    if text is None:
        return list(default)
    try:
        if ".." in text:
            first, last = (int(x) for x in text.split("..", 1))
            seeds = list(range(first, last + 1))
        else:
            seeds = [int(x) for x in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text}: not seeds (nearest: --seeds 1..5 or --seeds 1,2,3)") from None
    if not seeds or min(seeds) < 0:
        raise UserError(f"--seeds {text}: seeds are whole numbers >= 0, at least one (nearest: --seeds 1..5)")
    return seeds


def _remarks(remarks: Sequence[str]) -> None:
    for remark in dict.fromkeys(remarks):
        err.print(f"note: {remark}", markup=False)


# --- run --------------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="A scenario file, or a study with --variant.")],
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    variant: Annotated[str | None, typer.Option(help="Which variant of a study (default: its baseline).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (default: the scenario's).", min=0)] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a Perfetto / Chrome trace.")] = None,
    report_: Annotated[bool, typer.Option("--report/--no-report", help="Write the HTML report.")] = True,
) -> None:
    """Run one scenario in the simulator and write its run folder."""
    from sim.run import simulate, versions
    from testbed.scenario.load import load_scenario
    from testbed.scenario.study import is_study, load_study

    overrides = list(set_ or ())
    if is_study(scenario):
        study = load_study(scenario, overrides)
        wanted = variant or study.baseline
        found = [v for v in study.variants if v.name == wanted]
        if not found:
            raise UserError(f"{scenario}: no variant {wanted!r} (there are: {', '.join(v.name for v in study.variants)})")
        config, base_dir = found[0].scenario, study.base_dir
        name, question = f"{study.name}-{wanted}", study.question
        _remarks(found[0].remarks)
    else:
        if variant is not None:
            raise UserError(f"{scenario} is a scenario and has no variants: leave --variant out")
        loaded = load_scenario(scenario, overrides)
        config, base_dir, question = loaded.scenario, loaded.base_dir, loaded.scenario.question
        name = config.name if config.name != "unnamed" else scenario.stem
        _remarks(loaded.remarks)
    if seed is not None:
        config = _with_seed(config, seed)
    if trace is not None and config.run.journal != "full":
        raise UserError("--trace needs the whole journal (nearest: --set run.journal=full)")
    folder = _fresh(out_ or Path("runs") / _slug(name), "scenario.yaml")
    with run_bar(name, config.run.num_rollout) as progress:
        done = simulate(config, base_dir, folder, progress=progress, name=name)
    show_run(done.summary)
    _write_json(json_, {**figures_of(done.summary), "cpu_s": done.cpu_s, "problem": done.problem})
    if trace is not None:
        from reports.perfetto import write_trace
        from testbed.journal import read_journal

        _, records = read_journal(folder / "journal.jsonl.zst")
        write_trace(((r.event, r.actions) for r in records), config, trace)
        out.print(f"trace    {trace}", markup=False)
    if report_ and done.summary.measured_steps:
        from reports.write import write_run_report

        paths = write_run_report(
            done.summary, folder / "report", question=question, command=_command(), versions=versions(), seconds=done.cpu_s
        )
        out.print(f"report   {paths['index']}", markup=False)
    out.print(f"run      {folder}", markup=False)
    if done.problem:
        err.print(f"testbed: {name}: {done.problem}", markup=False)
        raise typer.Exit(130 if done.problem == "interrupted" else 1)


# --- compare ----------------------------------------------------------------------------------------------------------------


def _study_of(files: Sequence[Path], overrides: Sequence[str]) -> Any:
    """A study file, or scenario files as variants of one."""
    from testbed.scenario.load import load_scenario
    from testbed.scenario.study import Study, Variant, is_study, load_study

    if len(files) == 1 and is_study(files[0]):
        return load_study(files[0], overrides)
    loaded = [(f, load_scenario(f, overrides)) for f in files]
    names = [one.scenario.name if one.scenario.name != "unnamed" else f.stem for f, one in loaded]
    if len(set(names)) != len(names):
        raise UserError(f"two of the scenarios have the same name: {', '.join(names)} (nearest: give each its `name`)")
    folders = {one.base_dir.resolve() for _, one in loaded}
    if len(folders) > 1:
        raise UserError("scenarios to compare lie in one folder (file names in them are relative to it)")
    first = loaded[0][1].scenario
    variants = [
        Variant(name, "", {}, one.scenario, one.remarks) for name, (_, one) in zip(names, loaded, strict=True)
    ]
    study = "-against-".join(names[:2]) if len(names) > 1 else names[0]
    return Study(study, first.question, (first.run.seed,), names[0], variants, loaded[0][1].base_dir)


def _job(arg: tuple[Any, str, str, str]) -> Any:
    """One run of a comparison, in a worker process."""
    from sim.run import simulate

    scenario, base_dir, folder, name = arg
    return simulate(scenario, Path(base_dir), Path(folder), name=name)


def _run_all(jobs: list[tuple[Any, str, str, str]], workers: int) -> list[Any]:
    """All runs, `workers` at a time, with one progress line. Results in the order of `jobs`."""
    from concurrent.futures import ProcessPoolExecutor, as_completed

    results: list[Any] = [None] * len(jobs)
    with bar() as progress:
        task = progress.add_task("runs", total=len(jobs), detail="")

        def done(index: int, result: Any) -> None:
            results[index] = result
            name, seed = jobs[index][3], result.summary.seed
            progress.update(task, advance=1, detail=f"{name}, seed {seed}: step {result.summary.step_time_mean_s:.1f} s")

        if workers == 1:
            for i, job in enumerate(jobs):
                done(i, _job(job))
            return results
        with ProcessPoolExecutor(max_workers=workers) as pool:
            futures = {pool.submit(_job, job): i for i, job in enumerate(jobs)}
            try:
                for future in as_completed(futures):
                    done(futures[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return results


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(help="A study, or two or more scenarios.")],
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    seeds: Annotated[str | None, typer.Option(help="1..5 or 1,2,3 (default: the study's).")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this variant (may be given again).")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time (default: the number of cores).", min=1)] = None,
) -> None:
    """Run every variant with every seed and write one comparison report."""
    import time

    from reports.comparison import VariantRuns, build_comparison
    from reports.write import write_report
    from sim.run import versions

    study = _study_of(files, list(set_ or ()))
    variants = list(study.variants)
    if only:
        unknown = [o for o in only if o not in {v.name for v in variants}]
        if unknown:
            raise UserError(f"no variant {unknown[0]!r} (there are: {', '.join(v.name for v in variants)})")
        variants = [v for v in variants if v.name in only]
    for v in variants:
        _remarks([f"{v.name}: {r}" for r in v.remarks])
    wanted = _seeds(seeds, study.seeds)
    folder = _fresh(out_ or Path("runs") / _slug(study.name), "study.json")
    _write_json(
        folder / "study.json",
        {"study": study.name, "command": _command(), "seeds": wanted, "variants": [v.name for v in variants]},
    )
    work = [
        (_with_seed(v.scenario, s), str(study.base_dir), str(folder / _slug(v.name) / f"seed-{s}"), v.name)
        for v in variants
        for s in wanted
    ]
    workers = min(jobs or os.cpu_count() or 1, len(work))
    started = time.perf_counter()
    results = _run_all(work, workers)
    took = time.perf_counter() - started
    problems = [(job, r.problem) for job, r in zip(work, results, strict=True) if r.problem]
    if problems:
        for job, problem in problems:
            err.print(f"testbed: {job[3]}, {job[2]}: {problem}", markup=False)
        raise typer.Exit(1)
    runs = [
        VariantRuns("", v.name, v.note, [r.summary for r in results[i * len(wanted) : (i + 1) * len(wanted)]], dict(v.changes))
        for i, v in enumerate(variants)
    ]
    names = [v.name for v in variants]
    comparison = build_comparison(
        study=study.name,
        question=study.question,
        variants=runs,
        baseline=names.index(study.baseline) if study.baseline in names else 0,
        command=_command(),
        versions=versions(),
        seconds=sum(r.cpu_s for r in results),
        facts=_facts(variants[0].scenario, results),
        allow_unequal=study.allow_unequal,
    )
    paths = write_report(comparison, folder / "report")
    _show_comparison(comparison, took, workers)
    _write_json(json_, _comparison_json(comparison))
    out.print(f"report   {paths['index']}", markup=False)


def _facts(scenario: Any, results: Sequence[Any]) -> dict[str, str]:
    """Sentences for the part of the report that says what the figures rest on."""
    costs = scenario.simulation.engine_costs
    tables = {
        "measured": f"aiconfigurator SGLang step latencies (SGLang 0.5.14 kernels on {scenario.cluster.gpu})",
        "analytic": f"roofline of {scenario.cluster.gpu}",
        "linear": "linear coefficients of the scenario",
        "calibrated": "coefficients fitted to one machine",
    }
    trainer = scenario.training.cost
    facts = {
        "engine_step": tables[costs.type],
        "trainer": f"6 N FLOPs a token at {100 * trainer.mfu:.0f} % MFU" if trainer.type == "analytic" else "a given rate",
        "price": f"{scenario.cluster.price_usd_per_gpu_hour:.2f} USD per GPU-hour",
    }
    source = getattr(getattr(scenario.workload, "reply", None), "source", "")
    if source:
        facts["reply_lengths"] = source
    return facts


def _comparison_json(comparison: Any) -> dict[str, Any]:
    return {
        "study": comparison.study,
        "question": comparison.question,
        "seeds": comparison.seeds,
        "variants": [
            {"letter": v.letter, "name": v.name, "note": v.note, "runs": [figures_of(r) for r in v.runs]}
            for v in comparison.variants
        ],
    }


def _show_comparison(comparison: Any, took: float, workers: int) -> None:
    from rich.table import Table
    from statistics import mean, stdev

    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(("", "variant", "step time", "± std", "trained tok/s/GPU", "USD/1,000 steps", "staleness", "waste", "idle")):
        table.add_column(head, justify="left" if i < 2 else "right")
    for v in comparison.variants:
        steps = [r.step_time_mean_s for r in v.runs]
        spread = f"{stdev(steps):.1f}" if len(steps) > 1 else "-"
        idle = mean(
            sum(s for p in r.pools for c, s in p.gpu_seconds.items() if c.startswith("idle"))
            / max(sum(s for p in r.pools for s in p.gpu_seconds.values()), 1e-12)
            for r in v.runs
        )
        readings = [r.staleness[r.staleness_measure].dequeue for r in v.runs]
        table.add_row(
            v.letter,
            v.name,
            f"{mean(steps):.1f} s",
            spread,
            f"{mean(r.trained_tokens_per_s_per_gpu for r in v.runs):.0f}",
            f"{mean(r.cost_usd_per_1000_steps for r in v.runs):,.0f}",
            f"{mean(d.mean for d in readings):.2f} / {max(d.max for d in readings):.0f}",
            f"{100 * mean(r.waste.share for r in v.runs):.1f} %",
            f"{100 * idle:.1f} %",
        )
    out.print(table)
    runs = sum(len(v.runs) for v in comparison.variants)
    out.print(f"{runs} runs in {took:.1f} s ({workers} at a time); staleness: mean / max at dequeue, simulated", markup=False)


# --- replay, report -----------------------------------------------------------------------------------------------------------


def _run_folders(paths: Sequence[Path]) -> list[Path]:
    """Run folders at or below the given ones."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such run folder")
        journal = path if path.is_file() else path / "journal.jsonl.zst"
        if journal.is_file():
            found.append(journal.parent)
            continue
        below = sorted(j.parent for j in path.rglob("journal.jsonl.zst"))
        if not below:
            raise UserError(f"{path}: holds no journal.jsonl.zst (a run with `run.journal: off` cannot be replayed)")
        found += below
    return found


@app.command()
def replay(
    runs: Annotated[list[Path], typer.Argument(help="Run folders (or folders of runs, or journals).")],
    json_: Json = None,
) -> None:
    """Feed a run's events back through the core and compare every action; exit 1 at the first difference."""
    from testbed.journal.replay import replay as replay_journal

    figures = []
    differs = False
    for folder in _run_folders(runs):
        result = replay_journal(folder / "journal.jsonl.zst")
        figures.append(
            {
                "run": str(folder),
                "events": result.events,
                "actions": result.actions,
                "equal": result.difference is None,
                "truncated": result.truncated,
            }
        )
        if result.difference is not None:
            differs = True
            err.print(f"{folder}: the core answers differently\n{result.difference}", markup=False)
            break
        note = f" ({result.truncated})" if result.truncated else ""
        out.print(f"{folder}: {result.events:,} events, {result.actions:,} actions, all equal{note}", markup=False)
    _write_json(json_, figures)
    if differs:
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are compared.")],
    out_: Out = None,
    json_: Json = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a Perfetto trace (one run).")] = None,
) -> None:
    """Make the report of one run, or compare several, from their folders."""
    from reports.comparison import VariantRuns, build_comparison
    from reports.write import write_report, write_run_report
    from testbed.metrics.files import read_summary

    summaries = []
    for folder in runs:
        path = folder / "summary.json"
        if not path.is_file():
            raise UserError(f"{folder}: holds no summary.json (a run folder is what `testbed run` writes)")
        summaries.append((folder, read_summary(path)))
    if trace is not None:
        from reports.perfetto import write_trace
        from testbed.journal import read_journal, require_complete
        from testbed.scenario import Scenario

        if len(runs) != 1:
            raise UserError("--trace takes one run")
        journal = runs[0] / "journal.jsonl.zst"
        header, records = read_journal(journal)
        require_complete(journal, header, "drawn")
        write_trace(((r.event, r.actions) for r in records), Scenario.model_validate(header.scenario), trace)
        out.print(f"trace    {trace}", markup=False)
    if len(summaries) == 1:
        folder, summary = summaries[0]
        paths = write_run_report(summary, out_ or folder / "report", command=_command())
        show_run(summary)
        _write_json(json_, figures_of(summary))
    else:
        by_name: dict[str, list[Any]] = {}
        for _, summary in summaries:
            by_name.setdefault(summary.name, []).append(summary)
        comparison = build_comparison(
            study="report",
            question="How do these runs compare?",
            variants=[VariantRuns("", name, "", found) for name, found in by_name.items()],
            command=_command(),
        )
        paths = write_report(comparison, out_ or Path("runs") / "report")
        _show_comparison(comparison, 0.0, 1)
        _write_json(json_, _comparison_json(comparison))
    out.print(f"report   {paths['index']}", markup=False)


# --- schema, doctor -----------------------------------------------------------------------------------------------------------


@app.command()
def schema(
    what: Annotated[str, typer.Argument(help="`scenario` or `study`.")] = "scenario",
    json_: Json = None,
) -> None:
    """Print the JSON Schema of scenario or study files."""
    from testbed.scenario.schema import scenario_schema, study_schema

    makers: dict[str, Callable[[], dict[str, Any]]] = {"scenario": scenario_schema, "study": study_schema}
    if what not in makers:
        raise UserError(f"no schema {what!r} (nearest: scenario, study)")
    made = makers[what]()
    _write_json(json_, made)
    print(json.dumps(made, indent=1))


@app.command()
def doctor(json_: Json = None) -> None:
    """Say what is installed, what is missing and how to get it, and which presets there are."""
    from importlib.util import find_spec

    from testbed.scenario.catalogue import gpu_names, model_names

    simulator = ("simpy", "msgspec", "pydantic", "pyarrow", "matplotlib", "jinja2", "scipy", "zstandard")
    optional = {
        "tables": (("aiconfigurator_core",), "step latencies of other models and GPUs"),
        "real": (("torch", "transformers", "sglang"), "the real backend"),
        "cluster": (("ray",), "engines and trainers on several machines"),
    }
    missing = [p for p in simulator if find_spec(p) is None]
    figures: dict[str, Any] = {
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "simulator_missing": missing,
        "gpus": gpu_names(),
        "models": model_names(),
        "extras": {},
    }
    out.print(f"python {figures['python']}, {figures['cores']} cores", markup=False)
    if missing:
        out.print(f"simulator: MISSING {', '.join(missing)}: pip install rl-testbed", markup=False)
    else:
        out.print("simulator: ready", markup=False)
    for extra, (packages, use) in optional.items():
        lacking = [p for p in packages if find_spec(p) is None]
        figures["extras"][extra] = {"missing": lacking}
        state = "ready" if not lacking else f"not installed ({', '.join(lacking)}): pip install 'rl-testbed[{extra}]'"
        out.print(f"extra {extra} ({use}): {state}", markup=False)
    out.print(f"GPUs: {', '.join(gpu_names())}", markup=False)
    out.print(f"model presets: {', '.join(model_names())}", markup=False)
    _write_json(json_, figures)
    if missing:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
