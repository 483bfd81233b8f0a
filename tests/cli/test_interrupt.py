"""Ctrl-C: exit code 130, one message, no worker left, and folders that `report` and `replay` read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, dump, read_json
from tests.support.scenarios import tree

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(cli: Cli, tmp_path: Path) -> Iterator[Start]:
    """Starts a command in a process of its own; the inputs have a run without end."""
    dump(tmp_path / "endless.yaml", tree(name="endless", run__num_rollout=10_000_000))
    variants = [{"name": "short", "set": {"run.num_rollout": 3}}, {"name": "endless", "set": {}}]
    dump(tmp_path / "half.yaml", {"study": "half", "base": "endless.yaml", "seeds": [1, 2], "variants": variants})
    started: list[subprocess.Popen[str]] = []

    def begin(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "testbed.cli", *args]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment,
                text=True,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                preexec_fn=_listen,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            process.wait()


def _listen() -> None:
    """A shell that runs the tests in the background makes them, and so the command, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def grows(path: Path) -> bool:
    """The header and at least one batch of records are on the disk."""
    return path.is_file() and path.stat().st_size > 20_000


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ctrl-C to this process alone. Workers hold the same pipes: that both end here says that no worker is left."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    return out, err


def test_an_interrupted_run_is_written_down(start: Start, cli: Cli, tmp_path: Path) -> None:
    process = start("run", "endless.yaml", "--out", "r", "--json", "f.json")
    until(lambda: grows(tmp_path / "r" / "journal.jsonl.zst"))
    out, err = interrupt(process)
    assert err == "testbed: endless: interrupted; r holds what it did until then\n"
    figures = read_json(tmp_path / "f.json")
    assert (figures["finish_reason"], figures["problem"]) == ("interrupted", "interrupted")
    assert "ended           interrupted after" in out
    replayed = cli("replay", "r")
    assert replayed.code == 0
    assert re.search(r"([\d,]+) events", replayed.out)[1].replace(",", "") == str(figures["core_events"])  # type: ignore[index]
    assert "breaks off" not in replayed.out
    reported = cli("report", "r")
    assert reported.code == 0 and (tmp_path / "r/report/index.html").is_file()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_comparison_ends_its_workers(start: Start, cli: Cli, tmp_path: Path, jobs: str) -> None:
    process = start("compare", "half.yaml", "--out", "c", "--jobs", jobs)
    until(lambda: grows(tmp_path / "c/endless/seed-1/journal.jsonl.zst"))
    if jobs == "2":
        until(lambda: grows(tmp_path / "c/endless/seed-2/journal.jsonl.zst"))
    out, err = interrupt(process)
    assert out == ""
    assert err.endswith("testbed: interrupted, 2 of 4 runs are complete: testbed report c compares them\n")
    replayed = cli("replay", "c")
    assert replayed.code == 0
    assert len(replayed.out.splitlines()) == (4 if jobs == "2" else 3)
    assert "breaks off" not in replayed.out
    reported = cli("report", "c", "--json", "f.json")
    assert reported.code == 0 and "c/endless/seed-1 is left out: interrupted" in reported.err
    assert [v["name"] for v in read_json(tmp_path / "f.json")["variants"]] == ["short"]


def test_a_killed_run_is_replayed_as_far_as_it_was_written(start: Start, cli: Cli, tmp_path: Path) -> None:
    process = start("run", "endless.yaml", "--out", "r")
    until(lambda: grows(tmp_path / "r" / "journal.jsonl.zst"))
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    replayed = cli("replay", "r")
    assert replayed.code == 0 and "breaks off after line" in replayed.out
    reported = cli("report", "r")
    assert reported.code == 0 and "the figures are made from the journal" in reported.err
