"""Which scenarios a command runs: of a file, a study, several files; with which seeds; what a comparison remembers.

Raises `UserError` and `ScenarioError`. It refuses to know how runs are made and shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.commands.errors import UserError
from testbed.console import notes
from testbed.scenario import Scenario
from testbed.scenario.fields import closest
from testbed.scenario.load import load_scenario
from testbed.scenario.precisions import PLAIN
from testbed.scenario.study import Study, Variant, is_study, load_study
from testbed.scenario.training import TrainerCost

MAX_SEEDS = 1000


@dataclass(frozen=True)
class Chosen:
    """One scenario to run."""

    scenario: Scenario
    base_dir: Path
    """What file names in it are relative to."""
    name: str
    question: str


def one(path: Path, overrides: Sequence[str], variant: str | None, *, simulated: bool = True) -> Chosen:
    """The scenario of a scenario file, or one variant of a study (None: its baseline). Prints remarks."""
    if not is_study(path):
        if variant is not None:
            raise UserError(f"--variant {variant}: {path} is a scenario and has no variants (nearest: leave it out)")
        loaded = load_scenario(path, overrides, simulated=simulated)
        notes(loaded.remarks)
        name = loaded.scenario.name if loaded.scenario.name != "unnamed" else path.stem
        return Chosen(loaded.scenario, loaded.base_dir, name, loaded.scenario.question)
    study = load_study(path, overrides, simulated=simulated)
    wanted = named([variant or study.baseline], study.variants, "--variant")[0]
    if variant is None:
        notes(
            [f"{path} is a study: this runs its baseline, {wanted.name!r} (another: --variant; all: testbed compare)"]
        )
    notes(wanted.remarks)
    return _of(study, wanted)


def every(path: Path, overrides: Sequence[str], variant: str | None, *, simulated: bool = True) -> list[Chosen]:
    """The scenario of a scenario file, or all variants of a study (or the one that is named). Prints remarks."""
    if not is_study(path):
        return [one(path, overrides, variant, simulated=simulated)]
    study = load_study(path, overrides, simulated=simulated)
    wanted = study.variants if variant is None else named([variant], study.variants, "--variant")
    notes([f"{v.name}: {remark}" for v in wanted for remark in v.remarks])
    return [_of(study, v) for v in wanted]


def _of(study: Study, v: Variant) -> Chosen:
    return Chosen(v.scenario, study.base_dir, f"{study.name}-{v.name}", study.question)


def named(names: Sequence[str], variants: Sequence[Variant], option: str) -> list[Variant]:
    """The variants of these names, in the order of the study. Raises `UserError` at a name that is none."""
    known = [v.name for v in variants]
    for name in names:
        if name not in known:
            near = closest(name, known, 0.4) or known[0]
            listed = "".join(f"\n  {k!r}" for k in known)
            raise UserError(f"{option} {name}: no such variant (nearest: {near!r}); there are:{listed}")
    return [v for v in variants if v.name in names]


def with_seed(scenario: Scenario, seed: int) -> Scenario:
    """The scenario with another seed."""
    return scenario.model_copy(update={"run": scenario.run.model_copy(update={"seed": seed})})


def study_of(files: Sequence[Path], overrides: Sequence[str], several_seeds: bool, *, simulated: bool = True) -> Study:
    """A study file, or scenario files as variants of one."""
    if len(files) == 1 and is_study(files[0]):
        return load_study(files[0], overrides, simulated=simulated)
    loaded = [(f, load_scenario(f, overrides, simulated=simulated)) for f in files]
    if len(files) == 1 and not several_seeds:
        raise UserError(
            f"{files[0]}: one scenario has nothing to be compared with "
            f"(nearest: testbed run {files[0]}, a second scenario, or --seeds 1..5 for its spread)"
        )
    names = [one.scenario.name if one.scenario.name != "unnamed" else f.stem for f, one in loaded]
    if len(set(names)) != len(names):
        raise UserError(
            f"two of the scenarios have the same name: {', '.join(names)} (nearest: give each its own `name`)"
        )
    folders = {one.base_dir.resolve() for _, one in loaded}
    if len(folders) > 1:
        raise UserError("scenarios to compare lie in one folder: file names in them are relative to it")
    first = loaded[0][1].scenario
    variants = [Variant(n, "", {}, one.scenario, one.remarks) for n, (_, one) in zip(names, loaded, strict=True)]
    study = "-against-".join(names[:2]) if len(names) > 1 else names[0]
    return Study(study, first.question, (first.run.seed,), names[0], variants, loaded[0][1].base_dir)


def seeds_of(text: str | None, default: Sequence[int]) -> list[int]:
    """`3`, `1,2,3` or `1..5`; None: the default. Raises `UserError`."""
    if text is None:
        return list(default)
    try:
        first, dots, last = text.partition("..")
        ends = (int(first), int(last)) if dots else (0, 0)
        wanted = [] if dots else [int(x) for x in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text}: not seeds (nearest: --seeds 1..5 or --seeds 1,2,3)") from None
    if max(ends[1] - ends[0] + 1, len(wanted)) > MAX_SEEDS:
        near = f"{ends[0]}..{ends[0] + MAX_SEEDS - 1}" if dots else f"1..{MAX_SEEDS}"
        raise UserError(f"--seeds {text}: more than {MAX_SEEDS} seeds (nearest: --seeds {near})")
    wanted = list(range(ends[0], ends[1] + 1)) if dots else wanted
    if not wanted or min(wanted) < 0:
        raise UserError(f"--seeds {text}: seeds are whole numbers >= 0, at least one (nearest: --seeds 1..5)")
    unique = list(dict.fromkeys(wanted))
    if len(unique) < len(wanted):
        near = ",".join(map(str, unique))
        raise UserError(f"--seeds {text}: a seed is given twice, the repeats would be equal (nearest: --seeds {near})")
    return unique


def about_comparison(
    study: Study, variants: Sequence[Variant], seeds: Sequence[int], command: str, *, real: bool = False
) -> dict[str, Any]:
    """What `study.json` says: enough to make the report again from the runs."""
    names = [v.name for v in variants]
    if study.baseline not in names:
        notes([f"the baseline {study.baseline!r} is left out: differences are against {names[0]!r}"])
    return {
        "study": study.name,
        "question": study.question,
        "command": command,
        "seeds": list(seeds),
        "baseline": study.baseline if study.baseline in names else names[0],
        "allow_unequal": list(study.allow_unequal),
        "alternatives": study.alternatives and one_framework(v.scenario for v in variants),
        "facts": facts_of(*(v.scenario for v in variants), real=real),
        "variants": [{"name": v.name, "note": v.note, "changes": dict(v.changes)} for v in variants],
    }


def one_framework(scenarios: Iterable[Scenario]) -> bool:
    """Whether no two of these are presets of different frameworks: of those none may be named the best, since what
    runs is their schedules on one engine and one trainer, and no framework at all."""
    return len({s.provenance.framework for s in scenarios if s.provenance is not None}) < 2


def _emulated(precisions: Iterable[str]) -> str:
    """What real runs do where a format is asked for."""
    formats = dict.fromkeys(p for p in precisions if p not in PLAIN)
    return f"; {', '.join(formats)} emulated: values are rounded, arithmetic and memory stay plain" if formats else ""


def _trainer_fact(cost: TrainerCost) -> str:
    if cost.type == "analytic":
        return f"6 N FLOPs a token at {100 * cost.mfu:.0f} % MFU"
    if cost.type == "calibrated":
        return "coefficients fitted to one machine"
    return "coefficients fitted to published step times" if cost.type == "fitted" else "a given rate"


def facts_of(scenario: Scenario, *others: Scenario, real: bool = False) -> dict[str, str]:
    """Sentences for the part of the report that says what the figures rest on. `others`: compared with `scenario`."""
    compared = (scenario, *others)
    presets = dict.fromkeys(
        f"{p.framework} ({p.repository} at {p.commit[:9]})" for s in compared if (p := s.provenance) is not None
    )
    presets_fact = {"presets": f"defaults of {', '.join(presets)}"} if presets else {}
    price = f"{scenario.cluster.price_usd_per_gpu_hour:.2f} USD per GPU-hour"
    if real:
        return {
            "engine_step": f"SGLang engines on {scenario.cluster.gpu}, wall clock"
            + _emulated(s.rollout.engine.weight_precision for s in compared),
            "trainer": f"FSDP2 trainer on {scenario.cluster.gpu}, wall clock"
            + _emulated(s.training.precision for s in compared),
            "links": "weights really copied, wall clock",
            "price": price,
            **presets_fact,
        }
    costs = scenario.simulation.engine_costs
    tables = {
        "measured": f"aiconfigurator step latencies of SGLang kernels on {scenario.cluster.gpu}",
        "analytic": f"roofline of {scenario.cluster.gpu}",
        "linear": "linear coefficients of the scenario",
        "calibrated": "coefficients fitted to one machine",
    }
    trainer = scenario.training.cost
    facts = {
        "engine_step": tables[costs.type],
        "trainer": _trainer_fact(trainer),
        "price": price,
        **presets_fact,
    }
    source = getattr(getattr(scenario.workload, "reply", None), "source", "")
    if source:
        facts["reply_lengths"] = source
    return facts
