"""The overheads of a step, fitted to a stated part of the measured points (`Point.fitted`); the others are predicted.

A point's TPOT is all but linear in the three overheads, so their effect is taken from one simulation each. Least
squares of relative errors, none negative; large errors count linearly, so that a strange measurement does not decide.
It refuses to know what the fit is good for on other points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import astuple
from scipy.optimize import least_squares

from sim.costs.overheads import NONE, Fitted, Overheads
from sim.serving.points import scheduling, simulate
from testbed.commands.serving_points import Case

STEPS_S = (1e-3, 2e-5, 5e-6)
"""How much of each overhead is tried."""
LINEAR_FROM = 0.1
"""Relative errors above this count linearly."""


def fit(cases: Sequence[Case], path: Path, tick: Callable[[], None]) -> dict[str, Fitted]:
    """Fit to those of `cases` that are for fitting, write the coefficients, `tick` after each point."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    for case in cases:
        if case.point.fitted:
            rows.setdefault(scheduling(case), []).append(_effects(case))
            tick()
    found = {mode: _solve(np.array(r)) for mode, r in sorted(rows.items())}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return found


def _effects(case: Case) -> tuple[float, ...]:
    """(relative error without overheads, relative change per `STEPS_S` of each)."""
    measured = case.point.tpot_ms * 1e-3
    bare = simulate(case, NONE).tpot_s
    tried = [Overheads(*(s if i == j else 0.0 for j, s in enumerate(STEPS_S))) for i in range(len(STEPS_S))]
    return (bare / measured - 1, *((simulate(case, o).tpot_s - bare) / measured for o in tried))


def _solve(rows: np.ndarray) -> Fitted:
    error, effect = rows[:, 0], rows[:, 1:]
    done = least_squares(
        lambda x: error + effect @ x, np.full(3, 0.5), bounds=(0, np.inf), loss="soft_l1", f_scale=LINEAR_FROM
    )
    left = error + effect @ done.x
    variance = float(left @ left) / max(len(rows) - 3, 1)
    spread = 1.96 * np.sqrt(variance * np.diag(np.linalg.pinv(effect.T @ effect)))
    scale = np.array(STEPS_S) * 1e6
    value = (done.x * scale).round(2).tolist()
    return Fitted(value[0], value[1], value[2], tuple((spread * scale).round(2).tolist()), len(rows))


def overheads_text(found: dict[str, Fitted]) -> list[str]:
    """One line per way of scheduling."""
    return [
        f"{mode}: {', '.join(f'{x:g}' for x in astuple(f)[:3])} us of {f.points} points" for mode, f in found.items()
    ]
