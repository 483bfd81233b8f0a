"""How `testbed validate` gets from a scenario to its comparison: real runs made, journals replayed, simulations run.

It refuses to know options and what is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from testbed.commands.errors import Interrupted, RunFailed, UserError
from testbed.console import complain, err, run_bar
from testbed.run_files import JOURNAL

PROFILES = "profiles"
"""Folder of those made on the way."""


@dataclass(frozen=True)
class Wanted:
    """One scenario to validate."""

    scenario: Any
    base_dir: Path
    """What file names in it are relative to."""
    name: str
    question: str
    folder: Path
    """Of its runs, simulations and report."""


def with_profile(scenario: Any, profiles: Sequence[Path]) -> Any:
    """The scenario simulated with the coefficients of calibration profiles: engine and weight updates of the one with
    as many engines side by side as the scenario has (else the first), the trainer of the same if it has one."""
    from sim.costs.calibrated import read_profile
    from testbed.scenario.layout import layout_of
    from testbed.scenario.run import CalibratedCosts
    from testbed.scenario.training import CalibratedTrainer

    known = [(str(path.resolve()), read_profile(path)) for path in profiles]
    engines = len(layout_of(scenario).engines)
    ordered = sorted(known, key=lambda one: one[1].engines != engines)
    trained = next((path for path, p in ordered if p.trainer is not None), ordered[0][0])
    simulation = scenario.simulation.model_copy(update={"engine_costs": CalibratedCosts(profile=ordered[0][0])})
    training = scenario.training.model_copy(update={"cost": CalibratedTrainer(profile=trained)})
    return scenario.model_copy(update={"simulation": simulation, "training": training})


def precheck(wanted: Wanted) -> None:
    """Raise what the simulations would, before minutes are spent on real runs."""
    from sim.driver import SimulatedBackend

    config = wanted.scenario
    _refuse_foreign_profile(config, wanted.base_dir, None)
    if config.run.journal != "full":
        raise UserError(f"run.journal: {config.run.journal}: a validation needs the whole journal (nearest: full)")
    SimulatedBackend(config, wanted.base_dir)


def _refuse_foreign_profile(config: Any, base_dir: Path, real_versions: dict[str, str] | None) -> None:
    """A calibration of another engine version, or of another machine than the one that is to run, says nothing here.
    `real_versions`: of a run that was made already; None: of one to be made on this machine."""
    costs = config.simulation.engine_costs
    if costs.type != "calibrated":
        return
    from sim.costs.calibrated import read_profile, refuse_other

    profile = read_profile(base_dir / costs.profile)
    if real_versions is None:
        from testbed.machine import machine
        from testbed.recording import versions_of

        refuse_other(profile, costs.profile, versions_of(profile.versions), machine())
    else:
        refuse_other(profile, costs.profile, real_versions)


@dataclass(frozen=True)
class Calibration:
    """One that was made on the way. `name`: of the scenario on whose deployment."""

    profile: Path
    fitted: Any
    name: str


@dataclass
class RealSide:
    """Journals by name, what went wrong by name, and calibrations that were made on the way."""

    journals: dict[str, list[Path]]
    problems: dict[str, str] = field(default_factory=dict)
    calibrations: list[Calibration] = field(default_factory=list)


def made(work: Sequence[Wanted], repeats: int, calibrate: int | None, folder: Path) -> RealSide:
    """Make the real runs: those that one deployment serves follow each other, every scenario once before the second
    repeat begins, so that the spread of repeats holds the machine's drift. `calibrate`: measurements of every
    experiment on the deployments that are new in what they measure; profiles go below `folder`."""
    from testbed.cli.calibrating import on_the_way
    from testbed.cli.real import ready_for_real, real_runs

    ready_for_real(work[0].scenario)
    from real.deployment import deployment_key

    together: dict[str, list[Wanted]] = {}
    for w in work:
        together.setdefault(deployment_key(w.scenario), []).append(w)
    places = [(w, w.folder / f"real-{i}") for ws in together.values() for i in range(1, repeats + 1) for w in ws]
    jobs = [(w.scenario, w.base_dir, place, w.name) for w, place in places]
    plans = on_the_way([(s, base, deployment_key(s)) for s, base, _, _ in jobs], calibrate) if calibrate else {}
    measured: dict[int, Any] = {}
    results, _ = real_runs(jobs, machine_speed=True, plans=plans, calibrations=measured)
    calibrations = _calibrations(measured, {index: places[index][0] for index in measured}, folder)
    if len(results) < len(places) or any(r.problem == "interrupted" for r in results):
        complete = [str(place) for (_, place), r in zip(places, results, strict=False) if not r.problem]
        profiles = "".join(f" --profile {c.profile}" for c in calibrations)
        hint = f"; testbed validate --run {' --run '.join(complete)}{profiles} takes those" if complete else ""
        raise Interrupted(f"interrupted, {len(complete)} of {len(places)} real runs are complete{hint}")
    journals: dict[str, list[Path]] = {w.name: [] for w in work}
    problems: dict[str, str] = {}
    for (w, place), result in zip(places, results, strict=True):
        if result.problem:
            problems.setdefault(w.name, result.problem)
        else:
            journals[w.name].append(place / JOURNAL)
    return RealSide(journals, problems, calibrations)


def _calibrations(measured: Mapping[int, Any], firsts: Mapping[int, Wanted], folder: Path) -> list[Calibration]:
    """One for each number of engines side by side. `firsts`: the scenario that was measured on each deployment."""
    from testbed.cli.calibrating import fitted_to, store

    by_engines: dict[int, list[int]] = {}
    for index in measured:
        by_engines.setdefault(measured[index].engines, []).append(index)
    found = []
    for engines, indices in by_engines.items():
        first = firsts[indices[0]]
        fitted = fitted_to([measured[i] for i in indices], first.scenario, first.base_dir)
        place = folder / PROFILES / f"{engines}-engine{'s' * (engines > 1)}"
        found.append(Calibration(store(fitted, measured[indices[0]], place), fitted, first.name))
    return found


def compared(journals: Sequence[Path], wanted: Wanted) -> Any:
    """Replay, simulate and compare the real runs of one scenario."""
    from sim.run import versions
    from testbed.commands.recorded import scenario_of
    from testbed.journal import read_journal
    from testbed.scenario.layout import layout_of
    from testbed.scenario.load import scenario_hash
    from testbed.validation import result as found

    config, runs = wanted.scenario, []
    for journal in journals:
        header, _ = read_journal(journal)
        own = scenario_of(journal, header)
        _same_experiment(config, own, str(journal.parent), wanted.name)
        _refuse_foreign_profile(config, wanted.base_dir, header.versions)
        runs.append((journal, own, header))
    sides = Sides()
    for i, (journal, own, header) in enumerate(runs, 1):
        _compare(journal, own, header.backend, wanted, f"{i}/{len(runs)}", sides)
    real, timing, full, sims = sides.real, sides.timing, sides.full, sides.sims
    turns, worst = found.turns_of([str(j.parent) for j in journals], real, timing)
    measure = config.experience.staleness.measure
    return found.Validation(
        name=wanted.name,
        question=wanted.question,
        runs=[str(j.parent) for j in journals],
        measure=measure,
        steps=real[0].summary.measured_steps,
        engines=len(layout_of(config).engines),
        decisions=sides.decisions,
        rows=found.rows_of(real, timing, full),
        staleness=found.staleness_of(measure, real, timing, full),
        turns=turns,
        repeated=found.repeated_turns(real),
        worst=worst,
        running={"real": found.running_of(real[0]), "timing": found.running_of(timing[0])},
        kinds=dict(sims[0].summary.kinds) | {"work": sims[-1].summary.kinds.get("reply_lengths", "assumed")},
        marks={k: max(s.summary.marks.get(k, 0.0) for s in sims) for k in sims[0].summary.marks},
        real_versions=dict(runs[0][2].versions),
        versions=versions(),
        scenario=scenario_hash(config),
        speeds=sides.speeds,
        trainer_speeds=sides.trainer_speeds,
        seconds=sum(s.cpu_s for s in sims),
        remarks=sides.remarks,
    )


@dataclass
class Sides:
    """What the real runs of one scenario, and their simulations, gave, run by run."""

    decisions: list[Any] = field(default_factory=list)
    real: list[Any] = field(default_factory=list)
    timing: list[Any] = field(default_factory=list)
    full: list[Any] = field(default_factory=list)
    sims: list[Any] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    """How many times as long everything took as when the profile was made."""
    trainer_speeds: list[float] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def _compare(journal: Path, own: Any, backend: str, wanted: Wanted, number: str, sides: Sides) -> None:
    """Replay one run, and simulate it with its own work and in full. `own`: the scenario that it ran."""
    from testbed.validation import plan
    from testbed.validation.observed import observe

    config, run = wanted.scenario, str(journal.parent)
    if backend != "real":
        sides.remarks.append(f"{run} is a simulated run: this checks the validation, not the simulator")
    sides.decisions.append(_replayed(journal, own, run))
    observed = observe(journal, own)
    if observed.truncated:
        sides.remarks.append(f"{observed.truncated}; compared up to there")
    sides.real.append(observed)
    batches = len(observed.summary.steps)
    config = _at_speed(config, wanted, journal.parent, int(number.partition("/")[0]), sides)
    forced = plan.forces_lengths(own, backend)
    for kind, side, scenario in (
        ("timing", sides.timing, plan.timing(config, own, batches, journal, forced)),
        ("full", sides.full, plan.full(config, own, batches, forced)),
    ):
        folder = wanted.folder / f"{kind}-{number.partition('/')[0]}"
        done = _simulated(scenario, wanted.base_dir, folder, f"{wanted.name}: {kind} {number}")
        sides.sims.append(done)
        if done.summary.finish_reason == "tasks_exhausted":
            trained = len(done.summary.steps)
            sides.remarks.append(
                f"{kind} {number.partition('/')[0]}: the tasks of the real run gave {trained} of its {batches} "
                "batches: groups that it left unfinished at its end have no lengths"
            )
        side.append(observe(folder / journal.name, scenario))


def _at_speed(config: Any, wanted: Wanted, run: Path, number: int, sides: Sides) -> Any:
    """The scenario with its calibrated times as the machine was around that run, as far as probes before and after it
    say; the factors are noted."""
    from sim.costs.calibrated import read_profile
    from sim.serving.traffic import in_traffic
    from testbed.calibration.profile import write_profile
    from testbed.calibration.speed import at_speed, read_speed

    costs, trainer = config.simulation.engine_costs, config.training.cost
    try:
        speed = read_speed(run)
    except ValueError as broken:
        raise UserError(f"{broken} (nearest: delete it, for the speed of the calibration)") from None
    if speed is None or costs.type != "calibrated":
        return config
    probes = [*speed.before, *speed.after]
    profile = read_profile(wanted.base_dir / costs.profile)
    factor = median(in_traffic(profile, config, wanted.base_dir, probe.loop) for probe in probes)
    sides.speeds.append(factor)
    updates = [probe.update_s for probe in probes if probe.update_s is not None]
    trained = read_profile(wanted.base_dir / trainer.profile) if trainer.type == "calibrated" else profile
    of_updates = median(updates) / trained.probe_s if updates and trained.probe_s else None
    if of_updates is not None:
        sides.trainer_speeds.append(of_updates)

    def scaled(name: str, of: Any) -> str:
        path = wanted.folder / f"{name}-{number}.json"
        write_profile(path, at_speed(of, factor, of_updates))
        return str(path.resolve())

    engine_costs = costs.model_copy(update={"profile": scaled("profile", profile)})
    simulation = config.simulation.model_copy(update={"engine_costs": engine_costs})
    training = config.training
    if trainer.type == "calibrated":
        cost = trainer.model_copy(update={"profile": scaled("trainer-profile", trained)})
        training = training.model_copy(update={"cost": cost})
    return config.model_copy(update={"simulation": simulation, "training": training})


def _same_experiment(config: Any, own: Any, run: str, name: str) -> None:
    from testbed.validation.plan import first_difference

    different = first_difference(config, own)
    if different:
        raise UserError(
            f"{run}: not a run of {name}: {different} (nearest: testbed validate --run {run}, which simulates "
            "what the run says of itself)"
        )


def _replayed(journal: Path, own: Any, run: str) -> Any:
    from testbed.journal.replay import replay
    from testbed.validation.result import Decisions

    try:
        found = replay(journal, own)
    except LookupError as lost:
        return Decisions(run, 0, 0, f"an event names what this run does not have ({lost!r})")
    difference = "" if found.difference is None else str(found.difference)
    return Decisions(run, found.events, found.actions, difference, found.truncated)


def _simulated(scenario: Any, base_dir: Path, folder: Path, name: str) -> Any:
    from sim.run import simulate
    from testbed.commands import folders
    from testbed.commands.jobs import stoppable

    if not err.is_terminal:
        complain(f"simulating {name}")
    with run_bar(scenario.run.num_rollout) as progress, stoppable(progress) as tick:
        done = simulate(scenario, base_dir, folder, progress=tick, name=name)
    folders.drop_report(folder)
    if done.problem == "interrupted":
        raise Interrupted(f"{name}: interrupted; the real runs are whole (nearest: testbed validate --run FOLDER)")
    if done.problem:
        raise RunFailed(f"{name}: the simulation did not come to its end: {done.problem}")
    return done
