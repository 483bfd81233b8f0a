"""What the command line shows: progress, short tables, one-line notes, and the same figures as plain data for `--json`.

It refuses to know what a command does, and imports no metrics: `testbed --help` is quick.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

if TYPE_CHECKING:
    from testbed.metrics.summary import RunSummary

NARROWEST = 78
"""Columns a comparison takes at least: a smaller window wraps its lines, no figure is cut."""
PLAIN = 132
"""Columns where the output is no terminal."""

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of a command's answer."""
    out.print(text, markup=False)


def complain(text: str) -> None:
    """What the user should know and a script should not read: goes to stderr."""
    err.print(text, markup=False)


def notes(remarks: Iterable[str]) -> None:
    for remark in dict.fromkeys(remarks):
        complain(f"note: {remark}")


# --- progress ---------------------------------------------------------------------------------------------------------


class RunBar:
    """One run's line: steps done, simulated time, events per second."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task
        self._started = time.monotonic()

    def __call__(self, simulated_s: float, steps: int, events: int) -> None:
        rate = events / max(time.monotonic() - self._started, 1e-9)
        detail = f"{duration(simulated_s)} simulated, {rate:,.0f} events/s"
        self._bar.update(self._task, completed=steps, detail=detail)


def bar() -> Progress:
    """A progress display; its tasks take a `detail`. Silent when the output is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[detail]}"),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


@contextmanager
def run_bar(steps: int) -> Iterator[RunBar]:
    with bar() as progress:
        yield RunBar(progress, progress.add_task("step", total=steps, detail="starts"))


def said_of(name: str, result: Any) -> str:
    """One line about a run that has ended."""
    step = f"step {result.summary.step_time_mean_s:.1f} s" if not result.problem else result.problem
    return f"{name:.40}, seed {result.summary.seed}: {step}"


def duration(seconds: float) -> str:
    """`42.1 s`, `12 min 05 s`, `3 h 20 min`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


# --- figures ----------------------------------------------------------------------------------------------------------


def figures_of(summary: RunSummary) -> dict[str, Any]:
    """The figures that `testbed run` prints, plain, for `--json`. What was not measured is None."""
    reading = summary.staleness.get(summary.staleness_measure)
    measured = summary.measured_steps > 0
    return {
        "name": summary.name,
        "backend": summary.backend,
        "seed": summary.seed,
        "finish_reason": summary.finish_reason,
        "num_gpus": summary.num_gpus,
        "measured_steps": summary.measured_steps,
        "warmup_steps": summary.warmup_steps,
        "step_time_s": summary.step_time_mean_s if measured else None,
        "trained_tokens_per_s_per_gpu": summary.trained_tokens_per_s_per_gpu if measured else None,
        "generated_tokens_per_s_per_gpu": summary.generated_tokens_per_s_per_gpu if measured else None,
        "trajectories_per_s": summary.trajectories_per_s if measured else None,
        "cost_usd_per_1000_steps": summary.cost_usd_per_1000_steps if measured else None,
        "staleness_measure": summary.staleness_measure,
        "staleness_mean_at_completion": reading.completion.mean if reading else None,
        "staleness_mean_at_dequeue": reading.dequeue.mean if reading else None,
        "staleness_max_at_dequeue": reading.dequeue.max if reading else None,
        "waste_share": summary.waste.share,
        "gpu_seconds": {p.name: dict(p.gpu_seconds) for p in summary.pools},
        "idle_share": idle_share(summary),
        "kv_cached_share": summary.kv.cached_tokens / max(summary.kv.prompt_tokens, 1),
        "weight_update_total_s": summary.weight_update.total_s,
        "weight_update_pause_s": summary.weight_update.pause_s,
        "wall_s": summary.wall_s,
        "core_events": summary.events,
        "backend_events": summary.backend_events,
        "scenario_hash": summary.scenario_hash,
        "workload_hash": summary.workload_hash,
        "kinds": dict(summary.kinds),
        "outside_table_share": dict(summary.marks),
    }


def idle_share(summary: RunSummary) -> float:
    """GPU time of the causes called `idle_…`, over all GPU time of the measured steps."""
    idle = sum(s for p in summary.pools for cause, s in p.gpu_seconds.items() if cause.startswith("idle"))
    total = sum(s for p in summary.pools for s in p.gpu_seconds.values())
    return idle / total if total else 0.0


def comparison_figures(comparison: Any) -> dict[str, Any]:
    """The figures of a `reports.comparison.Comparison`: per variant those the table shows, and those of its runs."""
    return {
        "study": comparison.study,
        "question": comparison.question,
        "seeds": comparison.seeds,
        "variants": [
            {
                "letter": v.letter,
                "name": v.name,
                "note": v.note,
                **variant_figures(v.runs),
                "runs": [figures_of(r) for r in v.runs],
            }
            for v in comparison.variants
        ],
    }


def variant_figures(runs: Sequence[RunSummary]) -> dict[str, float | None]:
    """One row of the comparison: means over the seeds; the spread is the sample standard deviation."""
    steps = [r.step_time_mean_s for r in runs]
    readings = [r.staleness[r.staleness_measure].dequeue for r in runs]
    return {
        "step_time_s": mean(steps),
        "step_time_std_s": stdev(steps) if len(steps) > 1 else None,
        "trained_tokens_per_s_per_gpu": mean(r.trained_tokens_per_s_per_gpu for r in runs),
        "cost_usd_per_1000_steps": mean(r.cost_usd_per_1000_steps for r in runs),
        "staleness_mean_at_dequeue": mean(d.mean for d in readings),
        "staleness_max_at_dequeue": max(d.max for d in readings),
        "waste_share": mean(r.waste.share for r in runs),
        "idle_share": mean(idle_share(r) for r in runs),
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def show_run(summary: RunSummary) -> None:
    """The short table of one run."""
    f = figures_of(summary)
    rows: list[tuple[str, str]] = []
    if summary.measured_steps:
        rows += [
            ("step time", f"{f['step_time_s']:.1f} s ({_steps(f['measured_steps'], f['warmup_steps'])})"),
            ("trained tokens", f"{f['trained_tokens_per_s_per_gpu']:.0f} per s and GPU (actor tokens that carry loss)"),
            ("cost", f"${f['cost_usd_per_1000_steps']:,.0f} per 1,000 steps on {f['num_gpus']} GPUs"),
            (
                "staleness",
                f"{f['staleness_mean_at_dequeue'] or 0:.2f} mean, {f['staleness_max_at_dequeue'] or 0:.0f} max "
                f"at dequeue; "
                f"{f['staleness_mean_at_completion'] or 0:.2f} mean at completion ({f['staleness_measure']})",
            ),
            ("waste", f"{100 * f['waste_share']:.1f} % of generated tokens"),
            ("KV reuse", f"{100 * f['kv_cached_share']:.1f} % of prompt tokens"),
            ("weight update", f"{f['weight_update_total_s']:.2f} s, engines paused {f['weight_update_pause_s']:.2f} s"),
            ("GPU time", _gpu_time(f["gpu_seconds"])),
        ]
    else:
        rows.append(("step time", "not measured: no step after the warm-up"))
    clock = " simulated" if f["backend"] == "simulated" else ""
    rows.append(
        (
            "ended",
            f"{f['finish_reason']} after {duration(f['wall_s'])}{clock}; {f['core_events']:,} core events",
        )
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    show_table(table)


def _steps(measured: int, warmup: int) -> str:
    steps = "1 step" if measured == 1 else f"mean of {measured} steps"
    return f"{steps} after {warmup} of warm-up"


def _gpu_time(lanes: dict[str, dict[str, float]]) -> str:
    """The six largest causes, in percent of all GPU time, and what is left."""
    by_cause: dict[str, float] = {}
    for lane in lanes.values():
        for cause, s in lane.items():
            by_cause[cause] = by_cause.get(cause, 0.0) + s
    total = sum(by_cause.values()) or 1.0
    shares = sorted(((c.replace("_", " "), 100 * s / total) for c, s in by_cause.items()), key=lambda x: -x[1])
    text = [f"{cause} {share:.1f} %" for cause, share in shares[:6] if share >= 0.05]
    rest = sum(share for _, share in shares[6:])
    return ", ".join([*text, f"other {rest:.1f} %"] if rest >= 0.05 else text)


def show_comparison(comparison: Any) -> None:
    """One row per variant of a `reports.comparison.Comparison`. Fits into 80 columns; long names take two lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 1 if _width() < 100 else 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("variant", vertical="top", overflow="fold", min_width=16, max_width=40)
    for head in (
        "step\ntime",
        "±\nstd",
        "trained\ntok/s/GPU",
        "USD per\n1,000 st.",
        "staleness\nmean/max",
        "waste",
        "idle",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for v in comparison.variants:
        f: dict[str, Any] = variant_figures(v.runs)
        spread = f["step_time_std_s"]
        table.add_row(
            v.letter,
            v.name,
            f"{f['step_time_s']:.1f} s",
            "-" if spread is None else f"{spread:.1f}",
            f"{f['trained_tokens_per_s_per_gpu']:.0f}",
            f"{f['cost_usd_per_1000_steps']:,.0f}",
            f"{f['staleness_mean_at_dequeue']:.2f}/{f['staleness_max_at_dequeue']:.0f}",
            f"{100 * f['waste_share']:.1f} %",
            f"{100 * f['idle_share']:.1f} %",
        )
    show_table(table, NARROWEST)


def _width() -> int:
    return out.width if out.is_terminal else PLAIN


def show_table(table: Table, narrowest: int = 1) -> None:
    """Print a table at least `narrowest` columns wide. Without blanks at the ends of lines where that cannot show."""
    text = io.StringIO()
    Console(file=text, width=max(_width(), narrowest), force_terminal=out.is_terminal).print(table)
    lines = text.getvalue().splitlines()
    sys.stdout.writelines((line if out.is_terminal else line.rstrip()) + "\n" for line in lines)
