"""Several runs at once, and how they end: Ctrl-C leaves every run written down as far as it came, and no worker.

A first Ctrl-C is taken up between two events of a run, so that its journal ends with a whole record; a second one ends
the command at once. It refuses to know what a run is.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from testbed.commands.errors import RunFailed

Job = TypeVar("Job")
Tick = Callable[[float, int, int], None]
"""Progress of a run: simulated seconds, steps, events."""

GRACE_S = 15.0
"""How long a worker may take to write down what it has."""


class _Stop:
    """Whether a signal has asked this process to end. Signals belong to the process, so there is one."""

    asked = False


def stop_asked() -> bool:
    return _Stop.asked


@contextmanager
def stoppable(progress: Tick | None = None) -> Iterator[Tick]:
    """A progress callback that raises KeyboardInterrupt once Ctrl-C was pressed; a second one raises it on the spot."""

    def tick(simulated_s: float, steps: int, events: int) -> None:
        if _Stop.asked:
            raise KeyboardInterrupt
        if progress is not None:
            progress(simulated_s, steps, events)

    in_worker = multiprocessing.parent_process() is not None
    if in_worker or threading.current_thread() is not threading.main_thread():
        yield tick
        return

    def ask(number: int, frame: object) -> None:
        _Stop.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    _Stop.asked = False
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield tick
    finally:
        signal.signal(signal.SIGINT, before)


def run_jobs(
    work: Callable[[Job], Any],
    jobs: Sequence[Job],
    workers: int,
    begun: Callable[[], None],
    done: Callable[[int, Any], None],
) -> None:
    """`work(job)` for every job, `workers` at a time; `begun()` once they are started (a thread that shows progress is
    not forked with them), `done(index, result)` as each one ends.

    `work` is a function of a module; with more than one worker it runs in processes of their own and calls `stoppable`.
    Raises what `work` raises, KeyboardInterrupt on Ctrl-C (both after all workers have ended), and `RunFailed` if a
    worker was ended from outside.
    """
    if workers == 1:
        begun()
        for index, job in enumerate(jobs):
            done(index, work(job))
        return
    pool = ProcessPoolExecutor(max_workers=workers, initializer=_in_worker)
    try:
        futures = {pool.submit(work, job): index for index, job in enumerate(jobs)}
        begun()
        for future in as_completed(futures):
            done(futures[future], future.result())
    except BrokenProcessPool:
        raise RunFailed("a worker process was ended by the system, out of memory? (nearest: --jobs 1)") from None
    except BaseException:
        _end(pool)
        raise
    pool.shutdown()


def _in_worker() -> None:
    """Ctrl-C reaches the whole group of processes; only the parent takes it up, and asks its workers with SIGTERM."""

    def ask(number: int, frame: object) -> None:
        _Stop.asked = True

    _Stop.asked = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask)


def _end(pool: ProcessPoolExecutor) -> None:
    """Start nothing more, ask the workers to stop, wait for them, end those that do not."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pool.shutdown(wait=False, cancel_futures=True)
        workers = multiprocessing.active_children()
        for worker in workers:
            worker.terminate()
        until = time.monotonic() + GRACE_S
        for worker in workers:
            worker.join(max(until - time.monotonic(), 0.0))
            if worker.is_alive():
                worker.kill()
    finally:
        signal.signal(signal.SIGINT, before)
