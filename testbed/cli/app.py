"""The command line's frame: the application, options that several commands take, a comparison's report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.console import comparison_figures, say, show_comparison

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A testbed for LLM reinforcement-learning systems: what-if placement, validation and comparison reports.",
    epilog="Start with: testbed run scenarios/examples/maths_colocated_8xh100.yaml, or with the defaults of your "
    "framework: testbed presets",
)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value of the scenario, e.g. run.seed=3; may be given again."
    ),
]
VariantName = Annotated[
    str | None, typer.Option("--variant", metavar="NAME", help="Which variant of a study (default: its baseline).")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed (default: the scenario's).", min=0)]
WithReport = Annotated[bool, typer.Option("--report/--no-report", help="Write the HTML report.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the printed figures to FILE.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Where to write (default: runs/NAME).")]


def command_of(ctx: typer.Context) -> str:
    """The command line as it was given."""
    return str(ctx.obj or ctx.command_path)


def write_trace(journal: Path, trace: Path) -> None:
    from reports.perfetto import write_trace as write_perfetto
    from testbed.commands.recorded import scenario_of
    from testbed.journal import read_journal, require_complete

    header, records = read_journal(journal)
    require_complete(journal, header, "drawn")
    trace.parent.mkdir(parents=True, exist_ok=True)
    write_perfetto(((r.event, r.actions) for r in records), scenario_of(journal, header), trace)
    say(f"trace    {trace}")


def report_comparison(
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
