"""Prints which requirements the passing tests show, by backend, at the end of a run over the whole suite (or with
`--requirements`)."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.requirements_map import backend_of, ids_in, table


@pytest.fixture(autouse=True)
def without_optional_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite says the same whether or not the `tables` extra is installed; tests of the extra bring a stand-in."""
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requirements", action="store_true", help="print which requirements the tests show")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "backend(name): the backend (CORE, SIM or REAL) on which a test shows its requirement"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        try:
            ids = ids_in(name)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        marker = item.get_closest_marker("backend")
        where = Path(item.path).relative_to(config.rootpath).as_posix()
        backend = marker.args[0] if marker else backend_of(where)
        item.user_properties.extend(("requirement", (i, backend)) for i in ids)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    whole_suite = config.args_source is not pytest.Config.ArgsSource.ARGS
    if not (whole_suite or config.getoption("--requirements")):
        return
    shown: dict[str, set[str]] = defaultdict(set)
    failed: set[tuple[str, str]] = set()
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, value in report.user_properties:
                if key == "requirement":
                    requirement, backend = value
                    shown[requirement].add(backend)
                    if outcome != "passed":
                        failed.add((requirement, backend))
    for requirement, backend in failed:
        shown[requirement].discard(backend)
    terminalreporter.section("requirements")
    for line in table(shown):
        terminalreporter.write_line(line)
