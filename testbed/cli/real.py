"""The command that makes a run on actual engines and a trainer, and what `compare --backend real` needs of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.app import Json, Out, Overrides, Seed, VariantName, WithReport, app, command_of
from testbed.commands.errors import Interrupted, RunFailed, UserError
from testbed.console import bar, complain, err, figures_of, said_of, say, show_run
from testbed.run_files import SCENARIO


@app.command(short_help="Run a scenario, or a graph of training stages, on real engines and a real trainer.")
def real(
    ctx: typer.Context,
    scenario: Annotated[
        Path, typer.Argument(metavar="FILE", help="A scenario, a study with --variant, or a graph of stages.")
    ],
    set_: Overrides = None,
    out_: Out = None,
    json_: Json = None,
    variant: VariantName = None,
    seed: Seed = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Of a graph: only this stage and what it is made of; may be given again."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Of a graph: say what would run in which order, and end.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A Ray cluster to run on (default: one is started).")
    ] = None,
    report_: WithReport = True,
) -> None:
    """Run the scenario that `testbed run` simulates on actual SGLang engines and an actual torch trainer.

    Writes the same run folder; all its times are measured. Ctrl-C ends the run early; what it did until then is in the
    folder. A graph of stages (a file with the key `stages`) is run stage by stage into one folder; finished stages are
    kept when the command is repeated.
    """
    from testbed.commands import folders
    from testbed.commands.chosen import facts_of, one, with_seed
    from testbed.scenario.stages import is_stages

    overrides = [*(set_ or ()), *([f"real.ray_address={address}"] if address else [])]
    if is_stages(scenario):
        from testbed.cli.stages import real_stages

        if variant is not None:
            raise UserError(f"--variant {variant}: {scenario} is a graph of stages (nearest: --only STAGE)")
        overrides += [f"run.seed={seed}"] if seed is not None else []
        command = command_of(ctx)
        real_stages(scenario, overrides, only or (), out_, json_, command, plan_only=plan, report=report_)
        return
    for option, given in (("--only", only), ("--plan", plan)):
        if given:
            raise UserError(f"{option}: {scenario} is no graph of stages (nearest: leave it out)")
    chosen = one(scenario, overrides, variant, simulated=False)
    config = chosen.scenario if seed is None else with_seed(chosen.scenario, seed)
    folder = folders.fresh(out_ or Path("runs") / f"{folders.slug(chosen.name)}-real", SCENARIO)
    folders.target("--json", json_)
    results, versions = real_runs([(config, chosen.base_dir, folder, chosen.name)])
    if not results:
        raise Interrupted(f"{chosen.name}: interrupted before the run began")
    [done] = results
    show_run(done.summary)
    decided, observed = 100 * done.core_share, 100 * done.observers_share
    say(f"decided  in {decided:.2f} % of the run's time; journal and metrics took {observed:.2f} %")
    if learnt := _learnt(done):
        say(f"learnt   {learnt}")
    folders.write_json(
        json_,
        {
            **figures_of(done.summary),
            "rewards": done.rewards,
            "core_share": done.core_share,
            "observers_share": done.observers_share,
            "problem": done.problem,
            "folder": str(folder),
        },
    )
    if report_ and done.summary.measured_steps:
        from reports.write import write_run_report

        paths = write_run_report(
            done.summary,
            folder / "report",
            question=chosen.question,
            command=command_of(ctx),
            versions=versions,
            seconds=done.wall_s,
            facts=facts_of(config, real=True),
        )
        say(f"report   {paths['index']}")
    say(f"run      {folder}")
    if done.problem == "interrupted":
        raise Interrupted(f"{chosen.name}: interrupted; {folder} holds what it did until then")
    if done.problem:
        raise RunFailed(f"{chosen.name}: {done.problem}")


def _learnt(result: Any) -> str:
    """Mean reward of the first and of the last fifth of the batches, and on held-out tasks before and after; what there
    is of it."""
    from testbed.metrics.scores import fifth

    parts, rewards = [], result.rewards
    if rewards:
        n = fifth(len(rewards))
        first, last = sum(rewards[:n]) / n, sum(rewards[-n:]) / n
        parts.append(f"reward {first:.3f} in the first {n} batches, {last:.3f} in the last {n}")
    if len(result.summary.held_out) == 2:
        before, after = (s.reward.mean for s in result.summary.held_out)
        parts.append(f"held out {before:.3f} before, {after:.3f} after")
    return "; ".join(parts)


def ready_for_real(scenario: Any) -> None:
    """Before the first import of the real backend. Raises `UserError` where it is not installed."""
    from testbed.commands.real_parts import how_to_get_real, missing_for_real

    lacking = missing_for_real(scenario.real.engine_command)
    if lacking:
        raise UserError(f"the real backend needs {', '.join(lacking)} (nearest: {how_to_get_real()})")
    # An old torchvision, there for its import alone, warns of the image codecs that it cannot load.
    warnings.filterwarnings("ignore", message="Failed to load image Python extension")


def real_runs(
    work: Sequence[tuple[Any, Path, Path, str]],
    *,
    machine_speed: bool = False,
    plans: Mapping[int, Any] | None = None,
    calibrations: dict[int, Any] | None = None,
) -> tuple[list[Any], dict[str, str]]:
    """(scenario, base folder, run folder, name) each, one after another; with the versions of what made them.
    `machine_speed`: with a closed loop on the engines before and after each. `plans`: calibrations on the way, by index
    of the first run of a deployment; what they measured goes into `calibrations`.

    Fewer results than `work` after Ctrl-C. Raises `UserError` where the real backend is not installed.
    """
    from testbed.commands import folders

    ready_for_real(work[0][0])
    from real.run import versions
    from real.session import Job, run_jobs
    from testbed.calibration.design import engine_size, traffic

    for _, _, folder, _ in work:
        folders.drop_report(folder)
    steps = [w[0].run.num_rollout for w in work]
    progress = bar()
    line = progress.add_task("starting", total=sum(steps), detail="")
    before = 0

    def stage(what: str) -> None:
        progress.update(line, detail=what)
        if not err.is_terminal:
            complain(what)

    def keep(index: int, found: Any) -> None:
        if calibrations is not None:
            calibrations[index] = found

    def part(what: str) -> None:
        progress.update(line, detail=f"calibrating: {what}")

    def status(index: int, s: Any) -> None:
        detail = (
            f"reward {s.reward:.2f}, trained {s.batches_trained}, deployed {s.deployed}, "
            f"engines {'+'.join(map(str, s.loads))}, waiting {s.waiting}"
        )
        name = f"{work[index][3]:.24} {index + 1}/{len(work)}" if len(work) > 1 else "step"
        progress.update(line, description=name, completed=sum(steps[:index]) + s.batches_trained, detail=detail)

    def done(index: int, result: Any) -> None:
        nonlocal before
        before += 1
        if not err.is_terminal:
            complain(f"[{before}/{len(work)}] {said_of(work[index][3], result)}; {_learnt(result)}".rstrip("; "))

    with progress:
        jobs = [
            Job(*w, traffic(*engine_size(w[0], w[1])) if machine_speed else None, (plans or {}).get(i))
            for i, w in enumerate(work)
        ]
        results = run_jobs(jobs, stage=stage, progress=status, done=done, measured=part, calibrated=keep)
    return results, versions()
