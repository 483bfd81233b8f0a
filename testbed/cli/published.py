"""The command that simulates what others measured: published."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.cli.app import Json, Out, app, command_of
from testbed.commands.errors import Interrupted, RunFailed, UserError
from testbed.console import bar, complain, err, say

if TYPE_CHECKING:
    from testbed.commands.published.results import Result
    from testbed.commands.published.tables import Case, Table


@app.command(short_help="Simulate what others measured, and say how far off it is.")
def published(
    ctx: typer.Context,
    only: Annotated[
        list[str] | None, typer.Option(metavar="TABLE", help="Only this table; may be given again.")
    ] = None,
    out_: Out = None,
    json_: Json = None,
    doc: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the Markdown to FILE.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 if a sign or ranking is wrong or the median error too large.")
    ] = False,
    max_error: Annotated[
        float, typer.Option(metavar="SHARE", help="Largest median error of predicted numbers, for --check.", min=0.0)
    ] = 0.10,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the tables' parameters again on their fitted rows, and show them.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Simulations at a time (default: the number of cores).", min=1)
    ] = None,
    scenarios: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the scenarios are (default: scenarios/published).")
    ] = None,
) -> None:
    """Simulate every published table and write what was published, what was simulated, the error, and which numbers
    were fitted.

    Errors count for predicted numbers alone. The report goes to --out (default: runs/published).
    """
    from testbed.commands import folders
    from testbed.commands.published.results import compare_table, figures
    from testbed.commands.published.tables import cases, load_tables

    tables = load_tables(only=only or ())
    place = scenarios or folders.shipped("published")
    if fit:
        _fit(tables, place)
        return
    folder = folders.fresh(out_ or Path("runs") / "published", "published.json")
    folders.target("--json", json_)
    folders.target("--doc", doc)
    work = [case for table in tables for case in cases(table, place)]
    _known(work)
    started = time.perf_counter()
    values = _simulated(work, jobs)
    results = [compare_table(t, values.get(t.table, {})) for t in tables]
    said = figures(results)
    said["seconds"] = time.perf_counter() - started
    folders.write_json(folder / "published.json", said)
    folders.write_json(json_, said)
    paths = _write(ctx, results, folder, doc)
    _show(results)
    say(f"report   {paths['index']}")
    if check:
        _check(results, max_error)


def _known(work: Sequence[Case]) -> None:
    from sim.quantities import OF_A_MODEL, OF_A_RUN
    from testbed.scenario.fields import closest

    known = [*OF_A_RUN, *OF_A_MODEL]
    for case in work:
        for name in case.quantities:
            if name not in known:
                raise UserError(f"{case.table}: no such quantity: {name} (nearest: {closest(name, known, 0.0)})")


def _job(case: Case) -> dict[str, float]:
    from sim.quantities import values
    from testbed.commands.jobs import stoppable

    with stoppable() as tick:
        found: dict[str, float] = values(case.variant.scenario, case.base_dir, case.quantities, progress=tick)
    return found


def _simulated(work: Sequence[Case], jobs: int | None) -> dict[str, dict[tuple[str, str], float]]:
    """Table -> (variant, quantity) -> value."""
    from testbed.commands.jobs import run_jobs

    found: dict[str, dict[tuple[str, str], float]] = {}
    progress = bar()
    line = progress.add_task("cases", total=len(work), detail="")
    ended = 0

    def done(index: int, values: dict[str, float]) -> None:
        nonlocal ended
        ended += 1
        case = work[index]
        found.setdefault(case.table, {}).update({(case.variant.name, q): v for q, v in values.items()})
        detail = f"{case.table}: {case.variant.name}".rstrip(": ")
        progress.update(line, advance=1, detail=detail)
        if not err.is_terminal:
            complain(f"[{ended}/{len(work)}] {detail}")

    try:
        run_jobs(_job, work, max(1, min(jobs or os.cpu_count() or 1, len(work))), progress.start, done)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted, {ended} of {len(work)} cases were simulated; nothing is written") from None
    finally:
        progress.stop()
    return found


def _write(ctx: typer.Context, results: Sequence[Result], folder: Path, doc: Path | None) -> dict[str, Path]:
    from reports.published import markdown, write_published
    from sim.coefficients import provenance

    paths: dict[str, Path] = write_published(results, provenance(), folder, command_of(ctx))
    if doc is not None:
        doc.parent.mkdir(parents=True, exist_ok=True)
        doc.write_text(markdown(results, provenance(), "testbed published --doc docs/published.md"), encoding="utf-8")
        say(f"document {doc}")
    return paths


def _show(results: Sequence[Result]) -> None:
    from reports.published import headline, line_of

    for r in results:
        say(line_of(r))
    say(headline(results))


def _check(results: Sequence[Result], max_error: float) -> None:
    from testbed.commands.published.results import median_error, wrong_orders

    problems = [f"{table}: does not hold: {says}" for table, says in wrong_orders(results)]
    median = median_error(results)
    if median is not None and median > max_error:
        problems.append(f"median error of predicted numbers {100 * median:.1f} %, above {100 * max_error:.1f} %")
    if problems:
        raise RunFailed("\n".join(problems))


def _fit(tables: Sequence[Table], place: Path) -> None:
    """Fit and show; stored values stay as they are."""
    import msgspec

    from sim.coefficients import coefficients
    from sim.quantities import values
    from testbed.commands.published.fitting import fit, key_of, only_fitted
    from testbed.commands.published.tables import cases

    for table in tables:
        if not table.fit:
            say(f"{table.table}: nothing is fitted")
            continue
        rows = only_fitted(table)
        first = cases(rows, place)
        start = {
            p.name: getattr(coefficients(), p.coefficient) if p.coefficient else key_of(first, p.key) for p in table.fit
        }

        def simulate(point: Mapping[str, float], rows: Table = rows) -> dict[tuple[str, str], float]:
            ours = {k: v for k, v in point.items() if "." not in k}
            keys = [f"{k}={float(v)!r}" for k, v in point.items() if "." in k]
            fitted = msgspec.structs.replace(coefficients(), **ours)
            found: dict[tuple[str, str], float] = {}
            for case in cases(rows, place, keys):
                got = values(case.variant.scenario, case.base_dir, case.quantities, fitted)
                found |= {(case.variant.name, q): v for q, v in got.items()}
            return found

        complain(f"{table.table}: fitting {', '.join(start)}")
        wide = any(p.key for p in table.fit)
        for f in fit(table, start, simulate, 0.05 if wide else 1e-3):
            between = f", 95 % between {f.low:.4g} and {f.high:.4g}" if f.low is not None else ""
            say(f"{table.table}: {f.name} {f.value:.4g} (stored: {start[f.name]:.4g}{between})")
