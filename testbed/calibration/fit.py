"""Coefficients from measurements: robust least squares of relative errors, none negative, with 95 % intervals.

A machine that others use pauses now and then: a measurement far off counts less (Huber 1964), so that one of many does
not bend the fit.

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
HUBER = 1.345
"""Standard deviations from which on a measurement counts less: 95 % of the efficiency of least squares if errors are
normal."""
ROUNDS = 50
TINY = 1e-12


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
    weights: Floats = np.ones(len(measured))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        values = nnls(relative / scale * root[:, None], root)[0] / scale
        residual = relative @ values - 1.0
        bound = HUBER * _typical(residual)
        before, weights = weights, np.minimum(1.0, bound / np.maximum(np.abs(residual), TINY))
        if np.allclose(weights, before, atol=1e-3):
            break
    spread = _spread(relative, residual, values > 0, bound)
    return Quality(
        points=len(points),
        coefficients={
            name: Interval(float(v), float(max(v - s, 0.0)), float(v + s))
            for name, v, s in zip(names, values, spread, strict=True)
        },
        residual_median=float(np.median(np.abs(residual))),
        residual_max=float(np.abs(residual).max()),
    )


def _typical(residual: Floats) -> float:
    """The standard deviation of normal errors with this median size; of exact measurements what rounding leaves."""
    return max(1.4826 * float(np.median(np.abs(residual))), TINY)


def _spread(relative: Floats, residual: Floats, used: NDArray[np.bool_], bound: float) -> Floats:
    """Half the 95 % intervals: Student's t times the standard errors, of the terms that are used (others are at their
    bound of 0). Residuals beyond `bound` count as that much, and the information they lack is divided out (Huber,
    Robust Statistics 1981, section 7.6)."""
    from scipy.stats import t

    free = len(residual) - int(used.sum())
    spread = np.zeros(len(used))
    if free > 0 and used.any():
        part = relative[:, used]
        bounded = np.clip(residual, -bound, bound)
        counted = float(np.mean(np.abs(residual) <= bound))
        variance = float(bounded @ bounded) / free / counted**2
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
