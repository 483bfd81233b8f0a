"""Marks the tests of the real backend, and prints which requirements the passing tests show, by backend, at the end of
a run over the whole suite (or with `--requirements`).

`make test` runs the suite in two parts, those marked `real` after the others: `--requirements-part first` keeps its
outcomes in pytest's cache, `--requirements-part last` prints them together with its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.requirements_map import Outcome, backend_of, ids_in, shown, table

KEPT = "requirements/outcomes"
"""Key in pytest's cache."""


@pytest.fixture(autouse=True)
def without_optional_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite says the same whether or not the `tables` extra is installed; tests of the extra bring a stand-in."""
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requirements", action="store_true", help="print which requirements the tests show")
    parser.addoption(
        "--requirements-part",
        choices=("first", "last"),
        help="one map of two runs: the first one's is kept, not printed",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "backend(name): the backend (CORE, SIM or REAL) on which a test shows its requirement"
    )
    config.addinivalue_line("markers", "real: set by itself on tests below tests/real and on those of backend REAL")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        try:
            ids = ids_in(name)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        marker = item.get_closest_marker("backend")
        of_folder = backend_of(Path(item.path).relative_to(config.rootpath).as_posix())
        backend = marker.args[0] if marker else of_folder
        item.user_properties.extend(("requirement", (i, backend)) for i in ids)
        if "REAL" in (of_folder, backend):
            item.add_marker("real")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    part = config.getoption("--requirements-part")
    whole_suite = config.args_source is not pytest.Config.ArgsSource.ARGS and not config.getoption("markexpr")
    if not (whole_suite or part or config.getoption("--requirements")):
        return
    outcomes: set[Outcome] = {
        (*value, outcome == "passed")
        for outcome in ("passed", "failed", "error")
        for report in terminalreporter.stats.get(outcome, ())
        for key, value in getattr(report, "user_properties", ())  # a file that could not be collected has none
        if key == "requirement"
    }
    if part == "first":
        config.cache.set(KEPT, sorted(outcomes))
        return
    if part == "last":
        outcomes |= {tuple(kept) for kept in config.cache.get(KEPT, [])}
    terminalreporter.section("requirements")
    for line in table(shown(outcomes)):
        terminalreporter.write_line(line)
