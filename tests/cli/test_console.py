"""Tables and progress on terminals of different widths, and without one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from testbed import console
from tests.cli.conftest import Cli


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output counts as a terminal without colours, as wide as COLUMNS says."""
    monkeypatch.setattr(console, "out", Console(highlight=False, soft_wrap=True, force_terminal=True))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (42.14, "42.1 s"),
        (119.9, "119.9 s"),
        (725, "12 min 05 s"),
        (7200, "2 h 00 min"),
        (1e6, "277 h 46 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def test_the_comparison_fits_into_80_columns(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: None
) -> None:
    """No line is wider, no figure is cut, a name takes two lines at most."""
    text = (tmp_path / "study.yaml").read_text()
    (tmp_path / "study.yaml").write_text(text.replace("slow, 20 ms", "split 40 + 24, one step ahead of the trainer"))
    wide = cli("compare", "study.yaml", "--out", "c")
    monkeypatch.setenv("COLUMNS", "80")
    said = cli("report", "c")
    lines = said.out.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("report "))]
    assert wide.code == said.code == 0
    assert max(map(len, table)) <= 80
    assert "…" not in said.out
    assert len(table) <= 2 + 1 + 2
    assert " ".join(table[3].split()).startswith("B split 40 + 24, one")
    assert "step ahead" in table[4] or "trainer" in table[4]


def test_no_width_cuts_a_figure(cli: Cli, monkeypatch: pytest.MonkeyPatch, terminal: None) -> None:
    cli("compare", "study.yaml", "--out", "c")
    said = {}
    for columns in ("1", "40", "132", "400"):
        monkeypatch.setenv("COLUMNS", columns)
        said[columns] = [line.split() for line in cli("report", "c").out.splitlines()]
    assert said["1"] == said["40"] == said["132"] == said["400"]


def test_without_a_terminal_there_are_no_colours_no_bars_and_no_blanks_at_line_ends(cli: Cli) -> None:
    for args in (("run", "small.yaml"), ("compare", "study.yaml"), ("report", "runs/speeds")):
        said = cli(*args)
        assert "\x1b" not in said.out + said.err
        assert all(line == line.rstrip() for line in said.out.splitlines())


def test_progress_shows_steps_simulated_time_and_events_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 events in the 4 seconds since the bar was made are 5,000 a second; all of it in 80 columns."""
    shown = io.StringIO()
    progress: Progress
    monkeypatch.setattr(console, "err", Console(file=shown, force_terminal=True, width=80, color_system=None))
    now = iter([100.0, 104.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now, 104.0))
    progress = console.bar()
    with progress:
        one = console.RunBar(progress, progress.add_task("step", total=100_000, detail=""))
        one(725.0, 138, 20_000)
        progress.refresh()
    lines = [line.split("\x1b[2K")[-1] for line in shown.getvalue().splitlines()]
    assert any(
        "138/100000" in line and "0:00:" in line and "12 min 05 s simulated, 5,000 events/s" in line for line in lines
    )
