"""Files and folders of runs: what may be written where, and what is found below a path.

A run folder holds `scenario.yaml`, `journal.jsonl.zst`, `metrics.parquet`, `summary.json` and `report/`; a comparison
holds `study.json` and one run folder per variant and seed. It refuses to know what the files say.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from testbed.commands.errors import UserError
from testbed.run_files import JOURNAL, METRICS, SCENARIO, SUMMARY

STUDY = "study.json"
_WRITTEN = (SCENARIO, JOURNAL, METRICS, SUMMARY)
_REPORT = ("index.html", "report.md", "table.csv", "gpu_time.csv")
_FIGURES = ("reward.svg", "reward.png", "kl.svg", "kl.png")


# --- scenarios --------------------------------------------------------------------------------------------------------


def shipped(kind: str) -> Path:
    """The folder `scenarios/KIND` here, or beside the package in a checkout."""
    here = Path("scenarios") / kind
    beside = Path(__file__).resolve().parents[2] / here
    return here if here.is_dir() or not beside.is_dir() else beside


# --- names ------------------------------------------------------------------------------------------------------------


def slug(name: str) -> str:
    """A file name that says the same."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def slugs(names: Iterable[str]) -> list[str]:
    """One folder name per variant, all different, also where case does not count, and none the report's."""
    taken = {"report"}
    found = []
    for name in names:
        plain = slug(name)
        free, n = plain, 2
        while free.lower() in taken:
            free, n = f"{plain}-{n}", n + 1
        taken.add(free.lower())
        found.append(free)
    return found


# --- before a run: may this be written? -------------------------------------------------------------------------------


def fresh(folder: Path, marker: str) -> Path:
    """The folder, if it is missing, empty, or an older result (it holds `marker`). Raises `UserError` otherwise."""
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / marker).is_file():
            raise UserError(f"--out {folder}: the folder holds something else (nearest: --out {_free(folder)})")
        if not os.access(folder, os.W_OK):
            raise UserError(f"--out {folder}: no permission to write into this folder")
        return folder
    if folder.exists():
        raise UserError(f"--out {folder}: this is a file, not a folder (nearest: --out {_free(folder)})")
    _writable("--out", folder)
    return folder


def target(option: str, path: Path | None) -> None:
    """Raise `UserError` if a file cannot be written there. Missing folders above it are made when it is written."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder, not a file (nearest: {option} {path / 'FILE'})")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{option} {path}: no permission to write this file")
    _writable(option, path)


def _writable(option: str, path: Path) -> None:
    above = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not above.is_dir():
        raise UserError(f"{option} {path}: {above} is a file, not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{option} {path}: no permission to write into {above}")


def _free(folder: Path) -> Path:
    n = 2
    while (free := folder.absolute().with_name(f"{folder.absolute().name}-{n}")).exists():
        n += 1
    return free if folder.is_absolute() else folder.with_name(free.name) if folder.name else free


# --- writing ----------------------------------------------------------------------------------------------------------


def write_json(path: Path | None, figures: Any) -> None:
    """Write plain data; nothing if there is no path. What is no number (infinite, undefined) becomes null."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain(figures), indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def drop_report(folder: Path) -> None:
    """Take away the report of an earlier run in this folder, and nothing else."""
    _drop(folder / "report" / "figures", _FIGURES)
    _drop(folder / "report", _REPORT)


def drop_run(folder: Path) -> None:
    """Take away a run folder's own files, and the folders if nothing else is in them."""
    drop_report(folder)
    _drop(folder, _WRITTEN)


def drop_other_runs(comparison: Path, keep: Collection[Path]) -> None:
    """Take away the runs of an earlier comparison in this folder that the new one does not write."""
    for scenario in sorted(comparison.glob(f"*/seed-*/{SCENARIO}")):
        if scenario.parent not in keep:
            drop_run(scenario.parent)
            _drop(scenario.parent.parent, ())


def _drop(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


# --- finding ----------------------------------------------------------------------------------------------------------


def journals(paths: Sequence[Path]) -> list[Path]:
    """Journals: files as they are given, else those at or below the folders. Raises `UserError` where there is none."""
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        below = _runs(path, (JOURNAL,))
        if not below:
            raise UserError(
                f"{path}: holds no {JOURNAL} (a run with `run.journal: off` has none and cannot be replayed)"
            )
        found += [folder / JOURNAL for folder in below]
    return list(dict.fromkeys(found))


def runs(paths: Sequence[Path]) -> list[Path]:
    """Run folders at or below the given ones. Raises `UserError` where there is none."""
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            raise UserError(f"{path}: this is a file, not a run folder (nearest: {path.parent})")
        below = _runs(path, (SUMMARY, JOURNAL))
        if not below:
            raise UserError(f"{path}: holds no {SUMMARY} (a run folder is what `testbed run` writes)")
        found += below
    return list(dict.fromkeys(found))


def _runs(path: Path, marks: Sequence[str]) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path}: no such run folder{_beside(path)}")
    if any((path / mark).is_file() for mark in marks):
        return [path]
    return sorted({found.parent for mark in marks for found in path.rglob(mark)})


def _beside(path: Path) -> str:
    """The folder beside `path` whose name is most like it, for a message."""
    from testbed.scenario.fields import closest

    try:
        near = closest(path.name, sorted(p.name for p in path.absolute().parent.iterdir() if p.is_dir()))
    except OSError:
        return ""
    return f" (nearest: {path.parent / near})" if near else ""
