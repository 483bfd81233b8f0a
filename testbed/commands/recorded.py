"""What run folders hold, read back for a report: figures, scenarios, and which runs are seeds of one variant.

It refuses to know how a report looks, and says in a remark whatever it had to leave out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from testbed.commands.errors import UserError
from testbed.commands.folders import STUDY
from testbed.core.actions import Finish
from testbed.journal import JournalError, JournalHeader, read_journal
from testbed.metrics.files import read_summary, summary_from_journal
from testbed.metrics.summary import RunSummary
from testbed.run_files import JOURNAL, SCENARIO, SUMMARY
from testbed.scenario import Scenario

FINISHED = ("completed", "tasks_exhausted", "no_engine_left")
"""Reasons of the core's own. Others say that a run was broken off."""

Recorded = tuple[RunSummary, Scenario | None, list[str]]
"""Figures, the scenario if it can still be read, remarks."""


def gather(folders: Sequence[Path]) -> list[Recorded]:
    """The runs of these folders. Without `summary.json` the figures are folded from the journal.

    Raises `JournalError` if neither can be used.
    """
    return [_read(folder) for folder in folders]


def _read(folder: Path) -> Recorded:
    scenario = _scenario(folder / SCENARIO)
    remarks = [] if scenario is not None else [f"{folder / SCENARIO} is missing or cannot be read"]
    if (folder / SUMMARY).is_file():
        return read_summary(folder / SUMMARY), scenario, remarks
    header, records = read_journal(folder / JOURNAL)
    scenario = scenario or (scenario_of(folder / JOURNAL, header) if header.scenario else None)
    name = scenario.name if scenario is not None else folder.name
    reasons = [a.reason for record in records for a in record.actions if isinstance(a, Finish)]
    reason = reasons[-1] if reasons else records.truncated or "interrupted"
    summary = summary_from_journal(folder / JOURNAL, name=name, finish_reason=reason)
    return summary, scenario, [*remarks, f"{folder / SUMMARY} is missing: the figures are made from the journal"]


def _scenario(path: Path) -> Scenario | None:
    try:
        return Scenario.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError):
        return None


def scenario_of(journal: Path, header: JournalHeader) -> Scenario:
    """The scenario in a journal's header. Raises `JournalError`."""
    try:
        return Scenario.model_validate(header.scenario)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        what = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
        raise JournalError(journal, 1, f"the header's scenario cannot be used ({what})") from None


def about_of(folder: Path) -> dict[str, Any] | None:
    """What `testbed compare` wrote about the comparison in this folder; None if it is none."""
    path = folder / STUDY
    if not path.is_file():
        return None
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = [about[key] for key in ("study", "question", "seeds", "baseline", "allow_unequal", "facts")]
        _ = [(v["name"], v["note"], v["changes"]) for v in about["variants"]]
    except (ValueError, TypeError, KeyError) as wrong:
        raise UserError(f"{path}: not what `testbed compare` writes ({wrong!r})") from None
    return about


def variants_of(
    runs: Sequence[Recorded], folders: Sequence[Path]
) -> tuple[list[tuple[str, list[RunSummary]]], list[str]]:
    """(name, runs) of each variant, and remarks.

    Runs that share a name, a backend and a scenario up to its seed are seeds of one variant; if runs of one name have
    different scenarios, different backends or the same seed, each is a variant called by its folder. Runs that did not
    come to their end, and seeds that not every variant has, are left out. Raises `UserError` if nothing is left.
    """
    remarks = [remark for _, _, found in runs for remark in found]
    kept: dict[str, list[tuple[Path, RunSummary, Scenario | None]]] = {}
    for folder, (summary, scenario, _) in zip(folders, runs, strict=True):
        if summary.finish_reason not in FINISHED:
            remarks.append(f"{folder} is left out: {summary.finish_reason}")
        elif not summary.workload_hash:
            remarks.append(f"{folder} is left out: a journal does not say whether the work was the same")
        else:
            kept.setdefault(summary.name, []).append((folder, summary, scenario))
    variants: list[tuple[str, list[RunSummary]]] = []
    for name, same in kept.items():
        one_backend = len({s.backend for _, s, _ in same}) == 1
        each_once = len({s.seed for _, s, _ in same}) == len(same)
        if one_backend and each_once and all(_alike(same[0][2], other) for _, _, other in same):
            variants.append((name, [s for _, s, _ in same]))
        else:
            variants += [(str(folder), [s]) for folder, s, _ in same]
    if not variants:
        raise UserError("\n".join(["none of these runs is complete, there is nothing to compare", *remarks]))
    common = set.intersection(*({s.seed for s in of_name} for _, of_name in variants))
    left_out = sorted({s.seed for _, of_name in variants for s in of_name} - common)
    if not common:
        seeds = "; ".join(f"{name}: {', '.join(str(s.seed) for s in of_name)}" for name, of_name in variants)
        raise UserError(f"no seed is common to these variants ({seeds}): a comparison has equal seeds")
    if left_out:
        remarks.append(f"seeds {', '.join(map(str, left_out))} are left out: not every variant has them")
    return [(name, [s for s in of_name if s.seed in common]) for name, of_name in variants], remarks


def _alike(a: Scenario | None, b: Scenario | None) -> bool:
    """Whether two scenarios differ in nothing but the seed; unknown ones are taken to be alike."""
    if a is None or b is None:
        return True
    return a.model_copy(update={"run": b.run}) == b and a.run.model_copy(update={"seed": b.run.seed}) == b.run
