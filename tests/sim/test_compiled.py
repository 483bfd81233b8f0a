"""Compiled modules say what their sources say: the same records to the last bit. `make test-compiled` runs this."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.compiled import compiled, outdated, warning
from tests.support.fingerprint import SCENARIOS, fingerprint

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("INTERPRETED_SOURCES", "")


@pytest.mark.skipif(not INTERPRETED or not compiled(), reason="nothing is compiled here")
def test_compiled_runs_equal_interpreted_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fingerprint"],
        cwd=INTERPRETED,
        env={**os.environ, "PYTHONPATH": INTERPRETED},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(done.stdout)
    assert expected.pop("compiled") == 0
    assert {name: fingerprint(config) for name, config in SCENARIOS.items()} == expected


def hot_modules() -> set[str]:
    """The modules that setup.py lists, as paths."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "HOT":
            listed: dict[str, str] = ast.literal_eval(node.value)
            return {f"{folder}/{name}.py" for folder, names in listed.items() for name in names.split()}
    raise AssertionError("setup.py lists no modules")


def classes() -> list[tuple[str, str, list[str]]]:
    """(module, class, names of its bases) of every class in the packages that hold hot modules."""
    found = []
    for package in ("sim", "testbed"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                    found.append((path.relative_to(ROOT).as_posix(), node.name, bases))
    return found


def test_a_class_that_extends_a_compiled_one_is_compiled_too() -> None:
    """Else making it would fail, and only where modules are compiled."""
    hot, found = hot_modules(), classes()
    assert [module for module in hot if not (ROOT / module).is_file()] == []
    native = {name for module, name, bases in found if module in hot and "Protocol" not in bases}
    left = [f"{module}: {name}" for module, name, bases in found if module not in hot and native & set(bases)]
    assert left == [], f"add to HOT in setup.py: {left}"


def test_no_hot_module_holds_a_class_that_cannot_be_native() -> None:
    """Structs, named tuples and exceptions."""
    hot, refused = hot_modules(), {"Struct", "NamedTuple", "Exception", "RuntimeError", "ValueError", "Event", "Action"}
    assert [f"{m}: {name}" for m, name, bases in classes() if m in hot and refused & set(bases)] == []


def test_a_source_that_was_edited_after_it_was_compiled_is_reported(tmp_path: Path) -> None:
    from importlib.machinery import EXTENSION_SUFFIXES

    source, module = tmp_path / "sim" / "engine.py", tmp_path / "sim" / f"engine{EXTENSION_SUFFIXES[0]}"
    source.parent.mkdir()
    for file in (source, module):
        file.write_text("")
    os.utime(source, (1000.0, 1000.0))
    os.utime(module, (1000.0, 1000.0))
    assert compiled(tmp_path) == [(source, module)]
    assert outdated(tmp_path) == [] and warning(tmp_path) == ""
    os.utime(source, (1001.0, 1001.0))
    assert outdated(tmp_path) == [source]
    assert warning(tmp_path) == (
        "1 compiled modules are older than their sources (sim/engine.py): run `make compile` or `make interpret`"
    )


def test_without_compiled_modules_nothing_is_reported(tmp_path: Path) -> None:
    assert compiled(tmp_path) == [] and warning(tmp_path) == ""
