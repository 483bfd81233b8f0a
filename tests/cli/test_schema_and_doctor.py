"""`testbed schema`, `testbed doctor`, help, and what a first call costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.scenario import source
from tests.cli.conftest import Cli, read_json

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "scenarios").glob("*/*.yaml"))


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> Iterator[str]:
    """What JSON Schema forbids in `value`: the keywords that these schemas use, an assertion at any other."""
    if "$ref" in schema:
        target = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        yield from faults(value, target, root, at)
    for keyword, wanted in (("anyOf", range(1, 99)), ("oneOf", range(1, 2))):
        if keyword in schema:
            found = [list(faults(value, option, root, at)) for option in schema[keyword]]
            if sum(not f for f in found) not in wanted:
                yield f"{at}: none of {keyword}: {min(found, key=len)}"
    for option in schema.get("allOf", ()):
        yield from faults(value, option, root, at)
    for keyword, rule in schema.items():
        yield from (f"{at}: {value!r} breaks {keyword} {rule!r}" for _ in range(not KEYWORDS[keyword](value, rule)))
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{at}.{k}: missing" for k in schema.get("required", ()) if k not in value)
        for k, v in value.items():
            more = schema.get("additionalProperties", True)
            if k in known:
                yield from faults(v, known[k], root, f"{at}.{k}")
            elif more is False:
                yield f"{at}.{k}: unknown"
            elif isinstance(more, dict):
                yield from faults(v, more, root, f"{at}.{k}")
    if isinstance(value, list):
        prefix = schema.get("prefixItems", [])
        for i, v in enumerate(value):
            rule = prefix[i] if i < len(prefix) else schema.get("items", {})
            if isinstance(rule, dict):
                yield from faults(v, rule, root, f"{at}[{i}]")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "number": is_number,
    "integer": lambda v: is_number(v) and float(v).is_integer(),
}
KEYWORDS: dict[str, Any] = {
    "type": lambda v, rule: any(TYPES[t](v) for t in ([rule] if isinstance(rule, str) else rule)),
    "const": lambda v, rule: v == rule and isinstance(v, bool) == isinstance(rule, bool),
    "enum": lambda v, rule: v in rule,
    "minimum": lambda v, rule: not is_number(v) or v >= rule,
    "maximum": lambda v, rule: not is_number(v) or v <= rule,
    "exclusiveMinimum": lambda v, rule: not is_number(v) or v > rule,
    "exclusiveMaximum": lambda v, rule: not is_number(v) or v < rule,
    "minLength": lambda v, rule: not isinstance(v, str) or len(v) >= rule,
    "pattern": lambda v, rule: not isinstance(v, str) or re.search(rule, v) is not None,
    "minItems": lambda v, rule: not isinstance(v, list) or len(v) >= rule,
    "maxItems": lambda v, rule: not isinstance(v, list) or len(v) <= rule,
    "minProperties": lambda v, rule: not isinstance(v, dict) or len(v) >= rule,
    **dict.fromkeys(
        ("$ref", "anyOf", "oneOf", "allOf", "properties", "required", "additionalProperties", "items", "prefixItems"),
        lambda v, rule: True,  # followed by `faults`
    ),
    **dict.fromkeys(
        ("$schema", "$defs", "title", "description", "default", "discriminator", "examples"), lambda v, rule: True
    ),
}


@pytest.fixture
def schemas(cli: Cli) -> dict[str, dict[str, Any]]:
    return {what: json.loads(cli("schema", what).out) for what in ("scenario", "study", "stages")}


def test_schema_is_json_schema_and_the_json_file_is_equal(cli: Cli, tmp_path: Path) -> None:
    for what in ("scenario", "study", "stages"):
        said = cli("schema", what, "--json", f"{what}.json")
        assert (said.code, said.err) == (0, "")
        schema = json.loads(said.out)
        assert schema == read_json(tmp_path / f"{what}.json")
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert schema["type"] == "object" and schema["additionalProperties"] is False
    assert json.loads(cli("schema").out) == read_json(tmp_path / "scenario.json")


def test_every_reference_of_the_schemas_leads_somewhere(schemas: dict[str, dict[str, Any]]) -> None:
    for schema in schemas.values():
        for name in re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(schema)):
            assert name in schema["$defs"]


def test_the_schemas_accept_the_files_of_this_repository(schemas: dict[str, dict[str, Any]]) -> None:
    assert len(FILES) > 10
    for file in FILES:
        data = source.read(file).data
        schema = schemas[next((k for k in ("study", "stages") if k in data), "scenario")]
        assert list(faults(data, schema, schema)) == [], file.name


def test_the_schema_refuses_what_the_reader_refuses(
    cli: Cli, schemas: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    schema = schemas["scenario"]
    for key, value in (
        ("run.sed", 3),
        ("run.seed", "three"),
        ("run.num_rollout", 0),
        ("cluster.gpu", "Q9"),
        ("rollout.routing", {"type": "nearest"}),
        ("placement", {"num_gpus": 4}),
    ):
        data = source.read(tmp_path / "small.yaml").data
        assert list(faults(data, schema, schema)) == []
        *path, last = key.split(".")
        section = data
        for part in path:
            section = section[part]
        section[last] = value
        assert list(faults(data, schema, schema)), key


def test_doctor(cli: Cli, tmp_path: Path) -> None:
    said = cli("doctor", "--json", "f.json")
    figures = read_json(tmp_path / "f.json")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0] == f"python {sys.version.split()[0]}, {figures['cores']} cores"
    assert lines[1] == "simulator: ready" and figures["simulator_missing"] == []
    assert f"GPUs: {', '.join(figures['gpus'])}" in lines and "H100" in figures["gpus"]
    assert f"model presets: {', '.join(figures['models'])}" in lines and "Qwen3-32B" in figures["models"]
    for extra, state in figures["extras"].items():
        (line,) = (line for line in lines if line.startswith(f"extra {extra} "))
        assert line.endswith(f"pip install -e '.[{extra}]'" if state["missing"] else ": ready")


def test_doctor_names_what_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from testbed.commands import installed

    monkeypatch.setattr(installed, "SIMULATOR", ("json", "surely_not_a_package"))
    said = cli("doctor")
    assert said.code == 1
    assert "simulator: MISSING surely_not_a_package: pip install -e ." in said.out.splitlines()


def test_no_arguments_is_help(cli: Cli) -> None:
    assert cli() == cli("--help")
    said = cli()
    assert said.code == 0 and said.out.startswith("Usage: testbed ")
    for command in ("run", "compare", "replay", "report", "schema", "doctor"):
        assert re.search(rf"^  {command} +\S.*\.$", said.out, re.M), "a command with a whole sentence"
        assert cli(command, "--help").out.startswith(f"Usage: testbed {command} ")


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["runn"]])
def test_help_and_wrong_commands_import_nothing_heavy(args: list[str]) -> None:
    heavy = ("matplotlib", "numpy", "pandas", "pyarrow", "scipy", "simpy", "torch", "jinja2")
    if args != ["runn"]:
        heavy += ("yaml", "msgspec", "zstandard", "testbed.scenario", "testbed.metrics")
    code = (
        "import sys\nfrom testbed.cli import main\n"
        f"try: main({args!r})\nexcept SystemExit: pass\n"
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
