"""The command that compares simulated serving points with measured ones: serving-points."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.cli.app import Json, app, command_of
from testbed.commands.errors import Interrupted, RunFailed, UserError
from testbed.console import bar, complain, err, notes, say

if TYPE_CHECKING:
    from testbed.commands.serving_points import Case, Point


@app.command("serving-points", short_help="Simulate measured serving points, report the error of TTFT and TPOT.")
def serving_points(
    ctx: typer.Context,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Only points with TEXT in their id, model, backend or GPU; all given must match."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Points at a time (default: the number of cores).", min=1)
    ] = None,
    json_: Json = None,
    out_: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write a Markdown page to FILE.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Exit code 1 if the mean TPOT error is above.", min=0)
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the overheads of a step again first (to the stated part).")
    ] = False,
    tabulate: Annotated[
        bool, typer.Option("--tabulate", help="Make the step tables again first (needs the extra `tables`).")
    ] = False,
) -> None:
    """Simulate the measured serving points of H100 and H200 servers: a closed loop of clients before SGLang's or vLLM's
    scheduler, with steps from tables of measured kernels. Reports the error of TTFT and TPOT by engine, GPU, backend,
    precision, clients and lengths.
    """
    from sim.costs.overheads import fitted
    from sim.serving.points import has_table
    from testbed.commands import folders
    from testbed.commands import serving_errors as errors
    from testbed.commands.serving_page import markdown
    from testbed.commands.serving_points import LeftOut, cases, points

    folders.target("--json", json_)
    folders.target("--out", out_)
    found, left_out = cases(_chosen(points(), only or ()))
    if tabulate:
        _tabulate()
    left_out += [LeftOut(c.point, _no_table(c)) for c in found if not has_table(c)]
    found = [c for c in found if has_table(c)]
    if fit:
        _fit()
    if not found:
        raise UserError(f"no point is left to simulate: {left_out[0].reason}")
    compared = errors.compare(found, _answers(found, jobs))
    heads = errors.headlines(compared)
    for g in heads:
        say(
            f"{g.name:<45} {g.tpot.points:4d} points, TPOT {_said(g.tpot)} (tables alone {_said(g.bare_tpot)}), "
            f"TTFT {_said(g.ttft)}"
        )
    notes(f"{n} left out: {reason}" for reason, n in errors.reasons(left_out))
    folders.write_json(json_, errors.figures(compared, left_out, fitted()))
    if out_ is not None:
        out_.parent.mkdir(parents=True, exist_ok=True)
        out_.write_text(markdown(compared, left_out, fitted(), command_of(ctx)), "utf-8")
        say(f"page     {out_}")
    if max_error is not None and 100 * heads[0].tpot.mean > max_error:
        raise RunFailed(f"mean TPOT error {100 * heads[0].tpot.mean:.1f} % is above --max-error {max_error:g}")


def _said(s: Any) -> str:
    return f"{100 * s.mean:.1f} % mean, {100 * s.median:.1f} % median"


def _chosen(points: Sequence[Point], only: Sequence[str]) -> list[Point]:
    """Raises `UserError` for a text that no point has."""
    from testbed.scenario.fields import closest

    def words(p: Point) -> str:
        return f"{p.id} {p.model_path} {p.backend} {p.gpu} {p.precision} {p.mode}".lower()

    for text in only:
        if not any(text.lower() in words(p) for p in points):
            names = sorted({p.model for p in points} | {p.backend for p in points} | {p.gpu for p in points})
            raise UserError(f"--only {text}: no point has that (nearest: --only {closest(text, names, 0.0)})")
    chosen = [p for p in points if all(text.lower() in words(p) for text in only)]
    if not chosen:
        raise UserError(f"no point has all of {', '.join(only)} (nearest: --only {only[0]})")
    return chosen


def _no_table(case: Case) -> str:
    k = case.kind
    split = f"TP {k.tp_size}" + (f", MoE TP {k.moe_tp_size} x EP {k.moe_ep_size}" if k.moe else "")
    p = case.point
    return f"no step table of {p.model} in {p.precision or 'bf16'}, {k.backend}, {p.gpu}, {split}"


def _answers(found: Sequence[Case], jobs: int | None) -> list[Any]:
    """Every point simulated, several at a time."""
    from testbed.commands.jobs import run_jobs

    results: list[Any] = [None] * len(found)
    progress = bar()
    line = progress.add_task("points", total=len(found), detail="")
    done = 0

    def one_done(index: int, result: Any) -> None:
        nonlocal done
        done += 1
        results[index] = result
        progress.update(line, advance=1, detail=found[index].point.model)
        if not err.is_terminal and (done % 50 == 0 or done == len(found)):
            complain(f"[{done}/{len(found)}]")

    try:
        run_jobs(_job, found, min(jobs or os.cpu_count() or 1, len(found)), progress.start, one_done)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted, {done} of {len(found)} points were simulated") from None
    finally:
        progress.stop()
    return results


def _job(case: Case) -> Any:
    from sim.serving.points import answer
    from testbed.commands.jobs import stop_asked

    if stop_asked():
        raise KeyboardInterrupt
    return answer(case)


def _tabulate() -> None:
    from sim.serving import tables
    from testbed.commands.serving_points import cases, points

    kinds = sorted({c.kind for c in cases(points())[0]}, key=str)
    tables.tabulate(kinds, _data(tables.TABLES), complain)
    tables.tables.cache_clear()


def _fit() -> None:
    from sim.costs import overheads
    from sim.serving.fit import fit, overheads_text
    from sim.serving.points import has_table
    from testbed.commands.serving_points import cases, points

    found = [c for c in cases(points())[0] if c.point.fitted and has_table(c)]
    progress = bar()
    line = progress.add_task("fit", total=len(found), detail="")
    with progress:
        coefficients = fit(found, _data(overheads.FILE), lambda: progress.update(line, advance=1))
    overheads.fitted.cache_clear()
    for text in overheads_text(coefficients):
        say(f"fitted   {text}")


def _data(name: str) -> Path:
    import testbed

    return Path(testbed.__file__ or "").parent / "data" / name
