"""The command that checks the engine model against a real engine, or against what one has written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.app import Json, Out, app
from testbed.commands.errors import RunFailed, UserError
from testbed.console import complain, say

MARKER = "engine-check.json"
"""The figures, in the folder of an earlier check."""


@app.command("check-engine", short_help="Check the engine model against a real SGLang engine, batch by batch.")
def check_engine(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help="Which cases (default: all; see --list).")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say what the cases are, and end.")] = False,
    rules: Annotated[
        bool, typer.Option("--rules", help="Say which rules the model states and what is not modelled, and end.")
    ] = False,
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", metavar="FILE", help="Replay this recorded trace, or all of this folder; no engine."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model of the engine: a preset or a folder.")
    ] = "tiny-llama",
    engine_command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="What starts a server, e.g. of another SGLang (default: this Python's)."),
    ] = None,
    out_: Out = None,
    json_: Json = None,
) -> None:
    """Start a real engine for each case, send a workload, and replay its scheduler's decisions on the engine model.

    Every batch is compared: kind, requests, order, cached and new tokens, KV slots, evictions, retractions, ends. The
    first difference is shown with the state around it and the rule that is behind it; then the exit code is 1. The
    traces are kept in the folder and can be replayed with --trace.
    """
    from testbed.commands import folders

    if rules:
        _say_rules()
        return
    if list_:
        _say_cases()
        return
    folders.target("--json", json_)
    if trace:
        if cases or engine_command:
            raise UserError("--trace: no engine is started (nearest: leave out the cases and --engine-command)")
        checked = [_checked(path.name.removesuffix(".json.gz"), _loaded(path)) for path in _files(trace)]
        folder = None
    else:
        folder = folders.fresh(out_ or Path("runs") / "check-engine", MARKER)
        chosen = _chosen(cases or ())
        folders.write_json(folder / MARKER, {"cases": []})  # an interrupted check's folder may be used again
        checked = list(_recorded(chosen, model, engine_command, folder))
    figures = {"cases": checked, "differences": sum(len(c["differences"]) for c in checked)}
    batches = sum(c["batches"] for c in checked)
    bad = [c for c in checked if c["differences"]]
    say(f"{len(checked)} case{'s' * (len(checked) > 1)}, {batches:,} batches, {len(bad)} with differences")
    if folder is not None:
        folders.write_json(folder / MARKER, figures)
        say(f"traces   {folder}")
    folders.write_json(json_, figures)
    if bad:
        raise RunFailed("the engine does not do what the model says: " + "; ".join(_said(c) for c in bad))


# --- cases ------------------------------------------------------------------------------------------------------------


def _chosen(names: Sequence[str]) -> list[Any]:
    _ready()
    from real.engines.schedtrace_cases import CASES
    from testbed.scenario.fields import closest

    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise UserError(
                f"{name}: no such case (nearest: {closest(name, known, 0.0)}; all: testbed check-engine --list)"
            )
    return [known[name] for name in dict.fromkeys(names)] if names else list(CASES)


def _ready() -> None:
    """Raises UserError where the packages that send requests to an engine are missing."""
    from importlib.util import find_spec

    lacking = [name for name in ("aiohttp", "psutil", "torch", "transformers") if find_spec(name) is None]
    if lacking:
        from testbed.commands.real_parts import how_to_get_real

        raise UserError(
            f"check-engine needs {', '.join(lacking)} (nearest: {how_to_get_real()}, or --trace FILE, which needs none)"
        )


def _recorded(cases: Sequence[Any], model: str, engine_command: str | None, folder: Path) -> Iterator[dict[str, Any]]:
    """Run each case on an engine of its own, one after another."""
    import shlex
    import warnings

    warnings.filterwarnings("ignore", message="Failed to load image Python extension")
    from real.deployment import cache_folder
    from real.engines.schedtrace_run import record, save
    from real.engines.server import gpu_count
    from real.models.prepare import prepare_model

    path = prepare_model(model, cache_folder(), 0).path
    gpu = gpu_count() > 0
    for number, case in enumerate(cases, 1):

        def status(what: str, number: int = number) -> None:
            complain(f"[{number}/{len(cases)}] {what}")

        trace = record(
            case,
            path,
            folder / case.name,
            command=tuple(shlex.split(engine_command or "")),
            device="cuda" if gpu else "cpu",
            dtype="bfloat16" if gpu else "float32",
            status=status,
        )
        save(trace, folder / f"{case.name}.json.gz")
        yield _checked(case.name, trace)


# --- traces -----------------------------------------------------------------------------------------------------------


def _files(given: Sequence[Path]) -> Iterator[Path]:
    from testbed.scenario.fields import closest

    for path in given:
        if path.is_dir():
            found = sorted(path.glob("*.json.gz"))
            if not found:
                raise UserError(f"--trace {path}: the folder holds no trace (*.json.gz)")
            yield from found
        elif path.is_file():
            yield path
        else:
            near = closest(path.name, [p.name for p in path.parent.glob("*.json.gz")], 0.0)
            raise UserError(f"--trace {path}: no such file" + (f" (nearest: {path.parent / near})" if near else ""))


def _loaded(path: Path) -> dict[str, Any]:
    from sim.trace_replay import TraceError, load

    try:
        trace: dict[str, Any] = load(path)
        return trace
    except TraceError as error:
        raise UserError(f"--trace {error}") from None


def _checked(name: str, trace: dict[str, Any]) -> dict[str, Any]:
    """Replay a trace iteration by iteration and in runs, and say what was found."""
    from sim.trace_replay import TraceError, replay
    from sim.trace_replay.trace import version

    try:
        found = replay(trace)
        if not found.differences:
            found = replay(trace, skip=True)
    except TraceError as error:
        raise UserError(f"{name}: {error}") from None
    counts = {key: n for key, n in found.counts.items() if n}
    batches = counts.get("prefills", 0) + counts.get("decodes", 0)
    said = ", ".join(f"{n} {key.replace('_', ' ')}" for key, n in counts.items())
    figures: dict[str, Any] = {
        "case": name,
        "sglang": version(trace),
        "batches": batches,
        "counts": counts,
        "differences": [str(d) for d in found.differences],
        "rule": None,
    }
    if found.rule is None:
        say(f"{name}: SGLang {version(trace)}: {batches:,} batches, no difference ({said})")
        return figures
    rule = found.rule
    figures["rule"] = rule.name
    figures["around"] = found.around
    say(f"{name}: SGLang {version(trace)}: DIFFERENT ({said})")
    say(f"  rule {rule.name!r}: the model says: {rule.states} ({rule.where})")
    for line in [*found.around.splitlines(), *figures["differences"][:5]]:
        say(f"  {line}")
    return figures


def _said(c: dict[str, Any]) -> str:
    from sim.trace_replay.trace import MODELLED_VERSION

    other = "" if c["sglang"] == MODELLED_VERSION else f" of SGLang {MODELLED_VERSION}"
    return f"{c['case']} (SGLang {c['sglang']}): {c['rule']}{other}; first: {c['differences'][0]}"


# --- lists ------------------------------------------------------------------------------------------------------------


def _say_cases() -> None:
    _ready()
    from real.engines.schedtrace_cases import CASES

    for case in CASES:
        say(f"{case.name:<24} {case.about}")


def _say_rules() -> None:
    from sim.trace_replay import RULES
    from sim.trace_replay.trace import MODELLED_VERSION, NOT_DETERMINED, NOT_MODELLED

    say(f"rules of SGLang {MODELLED_VERSION} that the engine model states:")
    for rule in RULES.values():
        say(f"  {rule.name}: {rule.states} ({rule.where})")
    say("not modelled, and refused where a server has it:")
    for name, (_, needs) in NOT_MODELLED.items():
        say(f"  {name}: {needs}")
    say("what no rule gives:")
    for name, why in NOT_DETERMINED.items():
        say(f"  {name}: {why}")
