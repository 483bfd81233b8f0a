"""`testbed real` of a graph of stages: the plan, progress, one line a stage, the report of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.commands.errors import Interrupted, RunFailed, UserError
from testbed.console import bar, complain, duration, err, notes, say
from testbed.metrics.scores import Mean
from testbed.metrics.stages import STAGES, StageResult, StagesResult
from testbed.run_files import SUMMARY
from testbed.scenario.stages import Stage, Stages, load_stages


def real_stages(
    file: Path,
    overrides: Sequence[str],
    only: Sequence[str],
    out: Path | None,
    json_: Path | None,
    command: str,
    *,
    plan_only: bool,
    report: bool,
) -> None:
    """Run the stages of `file` one after another and write checkpoints, run folders and one report."""
    from testbed.commands import folders

    stages = load_stages(file, overrides)
    chosen = chosen_of(stages, only)
    notes(f"stage {s.name}: {remark}" for s in chosen for remark in s.remarks)
    folder = out or Path("runs") / folders.slug(stages.name)
    for line in plan_lines(stages, chosen, folder):
        say(line)
    if plan_only:
        return
    folder = folders.fresh(folder, STAGES)
    folders.target("--json", json_)
    results = _run(stages, chosen, folder, command, report=report)
    folders.write_json(json_, {"stages": stages.name, "folder": str(folder), "results": [_plain(r) for r in results]})
    if report:
        say(f"report   {folder / 'index.html'}")
    say(f"stages   {folder} ({len(results)} in {duration(sum(r.seconds for r in results if not r.kept))})")


def chosen_of(stages: Stages, only: Sequence[str]) -> tuple[Stage, ...]:
    """These stages and what they are made of; all if none is named. Raises `UserError` at a name that is none."""
    from testbed.scenario.fields import closest

    for name in only:
        if name not in stages.by_name:
            known = list(stages.by_name)
            near = closest(name, known, 0.4) or known[-1]
            raise UserError(f"--only {name}: no such stage (nearest: {near}); there are: {', '.join(known)}")
    return stages.needed_for(only) if only else stages.stages


def plan_lines(stages: Stages, chosen: Sequence[Stage], folder: Path) -> list[str]:
    """Order, what each stage trains, what it reads and what it writes."""
    n, width = len(chosen), max(len(s.name) for s in chosen)
    lines = [f"{stages.name}: {n} stage{'s' * (n != 1)}, in this order"]
    for i, s in enumerate(chosen, 1):
        trains = f"trains a copy of {s.model}" if s.trains else f"measures {s.model} on {s.tasks} tasks, trains nothing"
        parts = [trains, *_read_by(s)]
        if s.trains:
            parts.append(f"writes {folder / 'checkpoints' / s.name}")
        lines.append(f"  {i}. {s.name:{width}}  {s.kind:8}  {'; '.join(parts)}")
    return lines


def _read_by(s: Stage) -> list[str]:
    parts = []
    if isinstance(s.teachers, dict):
        parts.append("reads " + ", ".join(f"{t} (tasks of {kind})" for kind, t in s.teachers.items()))
    elif s.teachers:
        parts.append(f"reads {', '.join(s.teachers)}")
    if s.reward_model:
        parts.append(f"rewards from {s.reward_model}")
    return parts


def said_of_stage(r: StageResult) -> str:
    """One line about a finished stage."""
    parts = []
    if r.answer_probability is not None:
        parts.append(f"answers right with probability {r.answer_probability:.3f} after {r.steps} steps")
    if r.accuracy is not None:
        parts.append(f"{100 * r.accuracy:.0f} % of held-out pairs in the right order")
    if r.first is not None and r.last is not None:
        parts.append(f"reward {r.first.mean:.3f} -> {_interval(r.last)} in {r.steps} batches")
    elif r.kind in ("rl", "opd"):
        parts.append(f"{r.steps} batches")
    if r.first_kl is not None and r.last_kl is not None:
        parts.append(f"KL to the teacher {r.first_kl.mean:.3f} -> {_interval(r.last_kl)}")
    for s in r.scores:
        kl = "" if s.kl is None else f", KL to the teacher {s.kl:.4f}"
        parts.append(f"{s.kind or 'reward'} {_interval(s.reward)}{kl}")
    parts.append("kept, its inputs are the same" if r.kept else duration(r.seconds))
    return f"{r.name}: {', '.join(parts)}"


def _interval(m: Mean) -> str:
    if m.n < 2:
        return f"{m.mean:.3f}"
    return f"{m.mean:.3f} [{m.low:.3f}, {m.high:.3f}]"


def _plain(result: StageResult) -> Any:
    import msgspec

    return msgspec.to_builtins(result)


def _run(stages: Stages, chosen: Sequence[Stage], folder: Path, command: str, *, report: bool) -> list[StageResult]:
    from testbed.cli.real import ready_for_real

    ready_for_real(stages.stages[0].scenario)
    from real.run import versions
    from real.stages import StageFailed, plan_of, run_stages
    from testbed.metrics.stages import read_stage, write_result

    progress = bar()
    line = progress.add_task("starting", total=1, detail="")
    results: list[StageResult] = []

    class Shown:
        def began(self, stage: Stage, steps: int) -> None:
            name = f"{stage.name:.20} {len(results) + 1}/{len(chosen)}"
            progress.reset(line, total=max(steps, 1), description=name, detail=stage.kind)

        def doing(self, what: str) -> None:
            progress.update(line, detail=what)
            if not err.is_terminal:
                complain(what)

        def progress(self, status: Any) -> None:
            detail = f"reward {status.reward:.2f}, trained {status.batches_trained}, deployed {status.deployed}"
            progress.update(line, completed=status.batches_trained, detail=detail)

    folder.mkdir(parents=True, exist_ok=True)
    names = {s.name for s in chosen}
    seed = stages.stages[0].scenario.run.seed
    whole = StagesResult(stages.name, stages.question, command, seed, plan_of(stages), [], versions())

    def write_down() -> None:
        """The whole as far as it is done, stages that were left out this time included."""
        left_out = [read_stage(folder / s.name) for s in stages.stages if s.name not in names]
        done = {r.name: r for r in (*results, *(r for r in left_out if r is not None))}
        whole.results = [done[s.name] for s in stages.stages if s.name in done]
        write_result(folder / STAGES, whole)
        if report:
            from reports.stages import write_stages_report

            write_stages_report(whole, folder)

    write_down()
    try:
        with progress:
            for result in run_stages(stages, chosen, folder, Shown()):
                results.append(result)
                say(f"[{len(results)}/{len(chosen)}] {said_of_stage(result)}")
                if report and not result.kept and result.kind in ("rl", "opd"):
                    _report_run(stages.by_name[result.name], folder / result.name, command, whole.versions)
                write_down()
    except StageFailed as failed:
        hint = f"{len(results)} of {len(chosen)} stages are finished and kept: the same command goes on"
        raise (Interrupted if failed.interrupted else RunFailed)(f"{failed}; {hint}") from None
    return results


def _report_run(stage: Stage, folder: Path, command: str, versions: dict[str, str]) -> None:
    from reports.write import write_run_report
    from testbed.commands.chosen import facts_of
    from testbed.metrics.files import read_summary

    summary = read_summary(folder / SUMMARY)
    if summary.measured_steps:
        write_run_report(
            summary,
            folder / "report",
            question=stage.note or stage.scenario.question,
            command=command,
            versions=versions,
            seconds=summary.wall_s,
            facts=facts_of(stage.scenario, real=True),
        )
