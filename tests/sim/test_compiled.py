"""Compiled modules say what their sources say: the same records to the last bit. `make test-compiled` runs this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.compiled import compiled, outdated, warning
from tests.support.fingerprint import SCENARIOS, fingerprint

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
