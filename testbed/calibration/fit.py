"""Coefficients from measurements: least squares of relative errors, none negative, with 95 % intervals.

It refuses to know what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from testbed.calibration.profile import Interval, Quality

Points = Sequence[tuple[Sequence[float], float]]
"""(values of the terms, measured seconds) each."""
Floats = NDArray[np.float64]


def fit(names: Sequence[str], points: Points) -> Quality:
    """seconds = sum of coefficient x term.

    Raises `ValueError` for fewer points than coefficients, or a measured time of 0.
    """
    from scipy.optimize import nnls

    if len(points) < len(names):
        raise ValueError(f"{len(points)} measurements are too few for {len(names)} coefficients")
    terms = np.array([x for x, _ in points], float)
    measured = np.array([y for _, y in points], float)
    if measured.min() <= 0:
        raise ValueError("a measured time is not above 0")
    relative: Floats = terms / measured[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    values = nnls(relative / scale, np.ones(len(measured)))[0] / scale
    residual = relative @ values - 1.0
    spread = _spread(relative, residual, values > 0)
    return Quality(
        points=len(points),
        coefficients={
            name: Interval(float(v), float(max(v - s, 0.0)), float(v + s))
            for name, v, s in zip(names, values, spread, strict=True)
        },
        residual_median=float(np.median(np.abs(residual))),
        residual_max=float(np.abs(residual).max()),
    )


def _spread(relative: Floats, residual: Floats, used: NDArray[np.bool_]) -> Floats:
    """Half the 95 % intervals: Student's t times the standard errors, of the terms that are used (others are at their
    bound of 0)."""
    from scipy.stats import t

    free = len(residual) - int(used.sum())
    spread = np.zeros(len(used))
    if free > 0 and used.any():
        part = relative[:, used]
        variance = float(residual @ residual) / free
        spread[used] = t.ppf(0.975, free) * np.sqrt(variance * np.diag(np.linalg.pinv(part.T @ part)))
    return spread


def value(quality: Quality, name: str) -> float:
    return quality.coefficients[name].value


def fitted(quality: Quality, terms: Sequence[float]) -> float:
    """Seconds of one point."""
    return sum(c.value * x for c, x in zip(quality.coefficients.values(), terms, strict=True))


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians by name: single pauses of a machine do not decide."""
    return {name: float(np.median(v)) for name, v in values.items() if len(v)}
