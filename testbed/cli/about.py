"""Commands that explain: schema, presets, doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from testbed.cli.app import Json, app
from testbed.commands.errors import UserError
from testbed.console import say


@app.command(short_help="Print the JSON Schema of scenario, study or stages files.")
def schema(
    what: Annotated[str, typer.Argument(metavar="scenario|study|stages", help="Of which files.")] = "scenario",
    json_: Json = None,
) -> None:
    """Print the JSON Schema of scenario, study or stages files, for editors that check and complete YAML."""
    from testbed.commands import folders
    from testbed.scenario.schema import scenario_schema, stages_schema, study_schema

    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "scenario": scenario_schema,
        "study": study_schema,
        "stages": stages_schema,
    }
    if what not in makers:
        raise UserError(f"schema {what}: no such schema (nearest: {', '.join(makers)})")
    folders.target("--json", json_)
    made = makers[what]()
    folders.write_json(json_, made)
    print(json.dumps(made, indent=1))


@app.command(short_help="List the framework presets, or say where one's settings were read.")
def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One preset, with the source of each key.")] = None,
    json_: Json = None,
) -> None:
    """List the framework presets: scenarios with the defaults of a framework, read at one commit of its repository.

    It is a map of where each has what all of them have, in the order of the alphabet, and no ranking. Check the version
    that you have before you rely on one.
    """
    from testbed.commands import folders
    from testbed.commands.presets import preset, preset_names

    folders.target("--json", json_)
    found = [preset(n) for n in ([name] if name else preset_names())]
    for one in found:
        p = one.provenance
        say(f"{one.name}: {p.framework}, {p.repository} at {p.commit[:9]} ({p.date}); testbed run {one.path}")
        for part, words in p.parts.model_dump().items():
            say(f"  {part.replace('_', ' ')}: {words}")
        if name is None:
            continue
        for key, s in p.settings.items():
            default = f" ({s.default})" if s.default else ""
            say(f"  {key} = {json.dumps(one.values[key])}: {s.option}{default}{f', {s.path}' if s.path else ''}")
        for words in p.left_out:
            say(f"  left out: {words}")
    folders.write_json(
        json_, [{"name": o.name, "path": str(o.path), **o.provenance.model_dump(mode="json")} for o in found]
    )


@app.command(short_help="Say what is installed and what is missing.")
def doctor(json_: Json = None) -> None:
    """Say what is installed, what is missing and how to get it, which GPUs, models and presets are known by name."""
    from testbed.commands import folders
    from testbed.commands.installed import EXTRAS, installed
    from testbed.commands.real_parts import doctor_lines

    folders.target("--json", json_)
    figures = installed()
    missing = figures["simulator_missing"]
    say(f"python {figures['python']}, {figures['cores']} cores")
    say(f"simulator: MISSING {', '.join(missing)}: pip install -e ." if missing else "simulator: ready")
    for extra, (_, use) in EXTRAS.items():
        lacking = figures["extras"][extra]["missing"]
        state = f"not installed ({', '.join(lacking)}): pip install -e '.[{extra}]'" if lacking else "ready"
        say(f"extra {extra} ({use}): {state}")
    for said in doctor_lines(figures["real"]):
        say(said)
    say(f"GPUs: {', '.join(figures['gpus'])}")
    say(f"model presets: {', '.join(figures['models'])}")
    if figures["presets"]:
        say(f"framework presets: {', '.join(figures['presets'])} (testbed presets)")
    folders.write_json(json_, figures)
    if missing or figures["real"]["error"]:
        raise typer.Exit(1)
