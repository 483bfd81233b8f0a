"""Commands over what runs left behind: replay, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.app import Json, app, command_of, report_comparison, write_trace
from testbed.commands.errors import RunFailed, UserError
from testbed.console import complain, figures_of, notes, say, show_run
from testbed.run_files import JOURNAL


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
        folder = journal.parent if journal.name == JOURNAL else journal
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
    from testbed.commands.chosen import facts_of, one_framework
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
        write_trace(found[0] / JOURNAL, trace)
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
            command=command_of(ctx),
            facts=facts_of(scenario, real=summary.backend == "real") if scenario else None,
        )
        say(f"report   {paths['index']}")
        return
    recorded = gather(found)
    variants, remarks = variants_of(recorded, found)
    notes(remarks)
    known = {v["name"]: v for v in about["variants"]} if about else {}
    order = list(known)
    variants.sort(key=lambda v: order.index(v[0]) if v[0] in known else len(order))
    report_comparison(
        {
            "study": "report",
            "question": "How do these runs compare?",
            "baseline": variants[0][0],
            "facts": {},
            "allow_unequal": [],
            "alternatives": one_framework(scenario for _, scenario, _ in recorded if scenario is not None),
            **(about or {}),
            "command": command_of(ctx),
        },
        [
            VariantRuns("", name, known.get(name, {}).get("note", ""), of_name, known.get(name, {}).get("changes", {}))
            for name, of_name in variants
        ],
        place,
        json_,
    )
