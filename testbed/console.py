"""What the command line shows: progress, short tables, one-message errors. It refuses to know what a command does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from testbed.metrics.summary import RunSummary

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 132)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class RunBar:
    """One run's line: steps done, simulated time, events per second."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task
        self._started = time.monotonic()

    def __call__(self, simulated_s: float, steps: int, events: int) -> None:
        rate = events / max(time.monotonic() - self._started, 1e-9)
        detail = f"{duration(simulated_s)} simulated, {events:,} events, {rate:,.0f} events/s"
        self._bar.update(self._task, completed=steps, detail=detail)


def bar() -> Progress:
    """A progress display; its tasks take a `detail`. Silent when the output is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


@contextmanager
def run_bar(name: str, steps: int) -> Iterator[RunBar]:
    with bar() as progress:
        yield RunBar(progress, progress.add_task(name, total=steps, detail=""))


def duration(seconds: float) -> str:
    """`42.1 s`, `12 min 05 s`, `3 h 20 min`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def figures_of(summary: RunSummary) -> dict[str, Any]:
    """The figures that `testbed run` prints, plain, for `--json`."""
    reading = summary.staleness.get(summary.staleness_measure)
    return {
        "name": summary.name,
        "backend": summary.backend,
        "seed": summary.seed,
        "finish_reason": summary.finish_reason,
        "num_gpus": summary.num_gpus,
        "measured_steps": summary.measured_steps,
        "warmup_steps": summary.warmup_steps,
        "step_time_s": summary.step_time_mean_s,
        "trained_tokens_per_s_per_gpu": summary.trained_tokens_per_s_per_gpu,
        "generated_tokens_per_s_per_gpu": summary.generated_tokens_per_s_per_gpu,
        "trajectories_per_s": summary.trajectories_per_s,
        "cost_usd_per_1000_steps": summary.cost_usd_per_1000_steps,
        "staleness_measure": summary.staleness_measure,
        "staleness_mean_at_completion": reading.completion.mean if reading else None,
        "staleness_mean_at_dequeue": reading.dequeue.mean if reading else None,
        "staleness_max_at_dequeue": reading.dequeue.max if reading else None,
        "waste_share": summary.waste.share,
        "gpu_seconds": {p.name: dict(p.gpu_seconds) for p in summary.pools},
        "kv_cached_share": summary.kv.cached_tokens / max(summary.kv.prompt_tokens, 1),
        "weight_update_total_s": summary.weight_update.total_s,
        "weight_update_pause_s": summary.weight_update.pause_s,
        "simulated_s": summary.wall_s,
        "core_events": summary.events,
        "backend_events": summary.backend_events,
        "scenario_hash": summary.scenario_hash,
        "workload_hash": summary.workload_hash,
        "kinds": dict(summary.kinds),
        "outside_table_share": dict(summary.marks),
    }


def show_run(summary: RunSummary) -> None:
    """The short table of one run."""
    f = figures_of(summary)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    rows = [
        ("step time", f"{f['step_time_s']:.1f} s (mean of {f['measured_steps']} steps after {f['warmup_steps']} of warm-up)"),
        ("trained tokens", f"{f['trained_tokens_per_s_per_gpu']:.0f} per s and GPU (actor tokens that carry loss)"),
        ("cost", f"${f['cost_usd_per_1000_steps']:,.0f} per 1,000 steps on {f['num_gpus']} GPUs"),
        (
            "staleness",
            f"{f['staleness_mean_at_dequeue'] or 0:.2f} mean, {f['staleness_max_at_dequeue'] or 0:.0f} max at dequeue; "
            f"{f['staleness_mean_at_completion'] or 0:.2f} mean at completion ({f['staleness_measure']})",
        ),
        ("waste", f"{100 * f['waste_share']:.1f} % of generated tokens"),
        ("KV reuse", f"{100 * f['kv_cached_share']:.1f} % of prompt tokens"),
        ("weight update", f"{f['weight_update_total_s']:.2f} s, engines paused {f['weight_update_pause_s']:.2f} s"),
    ]
    total = sum(sum(p.values()) for p in f["gpu_seconds"].values())
    if total:
        by_cause: dict[str, float] = {}
        for lane in f["gpu_seconds"].values():
            for cause, s in lane.items():
                by_cause[cause] = by_cause.get(cause, 0.0) + s
        top = sorted(by_cause.items(), key=lambda x: -x[1])[:6]
        rows.append(("GPU time", ", ".join(f"{c.replace('_', ' ')} {100 * s / total:.1f} %" for c, s in top if s > 0)))
    rows.append(("ended", f"{f['finish_reason']} after {duration(f['simulated_s'])} simulated; {f['core_events']:,} core events"))
    for row in rows:
        table.add_row(*row)
    out.print(table)
