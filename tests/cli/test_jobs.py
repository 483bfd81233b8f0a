"""`testbed.commands.jobs`: several jobs at once, and what one of them can do to the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from testbed.commands.errors import RunFailed
from testbed.commands.jobs import run_jobs, stop_asked, stoppable


def square(x: int) -> int:
    return x * x


def killed(x: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def refuse_the_first_while_the_second_runs(job: tuple[int, str]) -> str:
    """Job 0 fails once job 1 has begun; job 1 goes on until it is asked to stop, and leaves a note."""
    index, note = job
    begun = Path(note + ".begun")
    if index == 0:
        while not begun.exists():
            time.sleep(0.01)
        raise ValueError("no")
    begun.touch()
    with stoppable() as tick:
        try:
            for _ in range(6000):
                tick(0.0, 0, 0)
                time.sleep(0.01)
        except KeyboardInterrupt:
            Path(note).touch()
    return note


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_with_the_index_of_their_job(workers: int) -> None:
    found: dict[int, int] = {}
    calls: list[str] = []

    def done(index: int, result: int) -> None:
        calls.append("done")
        found[index] = result

    run_jobs(square, [3, 4, 5, 6], workers, lambda: calls.append("begun"), done)
    assert found == {0: 9, 1: 16, 2: 25, 3: 36}
    assert calls == ["begun"] + 4 * ["done"]


def test_a_worker_that_is_killed_is_a_message() -> None:
    with pytest.raises(RunFailed, match=r"ended by the system.*--jobs 1"):
        run_jobs(killed, [1, 2], 2, lambda: None, lambda index, result: None)


def test_an_error_of_one_job_stops_the_others_and_is_raised(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pytest.raises(ValueError, match="no"):
        run_jobs(
            refuse_the_first_while_the_second_runs, [(0, str(note)), (1, str(note))], 2, lambda: None, lambda i, r: None
        )
    assert note.exists()
    assert not multiprocessing.active_children()


def test_the_first_ctrl_c_waits_for_the_next_tick_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[tuple[float, int, int]] = []
    with stoppable(lambda *progress: seen.append(progress)) as tick:
        tick(1.0, 2, 3)
        signal.raise_signal(signal.SIGINT)
        assert stop_asked()
        with pytest.raises(KeyboardInterrupt):
            tick(4.0, 5, 6)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert seen == [(1.0, 2, 3)]
    assert signal.getsignal(signal.SIGINT) is before
    with stoppable() as tick:
        tick(0.0, 0, 0)
    assert not stop_asked()
