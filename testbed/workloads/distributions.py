"""Random streams and samplers: lengths in tokens, durations in seconds, vectorised.

Responsible for drawing exactly what the scenario's distribution says, including the mean *after* a cut. It refuses
to know tasks, turns and files. Every stream is a function of (seed, cause), so changing one distribution leaves all
other draws as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from testbed.scenario.workload import (
    Duration,
    ExponentialTime,
    FixedLength,
    FixedTime,
    GeometricLength,
    LognormalLength,
    QuantileLength,
    ReplyLength,
    UniformLength,
)

CAUSES: tuple[str, ...] = (
    "prompts",
    "turns",
    "reply_tasks",
    "replies",
    "observation_tasks",
    "observations",
    "tools",
    "environments",
    "difficulty",
    "rewards",
    "verifier",
    "arrivals",
)
"""One stream each. Append only: the position is part of the seed."""

Tokens = NDArray[np.int64]
LengthSampler = Callable[[Generator, Generator, Tokens], Tokens]
"""(per-task stream, own stream, counts[tasks]) -> tokens[sum(counts)], the values of a task side by side."""
DurationSampler = Callable[[Generator, int], NDArray[np.float64]]
"""(stream, n) -> seconds[n]."""


def stream(seed: int, cause: str) -> Generator:
    """The random stream of one cause. Raises ValueError for an unknown cause."""
    return Generator(PCG64(SeedSequence(entropy=seed, spawn_key=(CAUSES.index(cause),))))


def solve_lognormal(
    mean: float, cap: int | None, sigma: float | None = None, capped_share: float | None = None
) -> tuple[float, float]:
    """(mu, sigma) of the logarithm of X, so that tokens = min(round(X), cap) have this mean, with `sigma` or
    `capped_share` given.

    A draw is capped if X >= c = cap - 1/2. With z = (ln c - mu) / sigma and capped share q = Phi(-z),

        mean = c exp(sigma^2 / 2 - sigma z) Phi(z - sigma) + cap q

    (partial expectation of a lognormal; rounding keeps the mean of the uncut part, but for draws below one token). It
    falls in z at fixed sigma and in sigma at fixed z, so each root is the only one. Without a cap
    mu = ln mean - sigma^2 / 2. Raises ValueError if no such lognormal exists.
    """
    if cap is None:
        if sigma is None:
            raise ValueError("`capped_share` needs a cap, and there is none for these lengths: give `sigma`")
        return math.log(mean) - sigma * sigma / 2, sigma
    if mean >= cap:
        raise ValueError(f"the mean after the cut ({mean:g}) must be below the cap ({cap})")
    from scipy.optimize import brentq  # slow to import, and only needed here
    from scipy.special import log_ndtr, ndtr, ndtri

    c = cap - 0.5

    def excess(z: float, s: float) -> float:
        return c * math.exp(s * s / 2 - s * z + float(log_ndtr(z - s))) + cap * float(ndtr(-z)) - mean

    if sigma is not None:
        z = brentq(excess, -40.0, 40.0 + 10.0 * sigma + math.log(cap) / sigma, args=(sigma,), xtol=1e-13)
    else:
        assert capped_share is not None
        z = -float(ndtri(capped_share))
        low, high = 1e-6, 20.0
        if excess(z, low) < 0 or excess(z, high) > 0:
            raise ValueError(
                f"no lognormal has mean {mean:g} and a share of {capped_share:g} at the cap {cap}: the mean must lie "
                f"between {capped_share * cap:g} (all others at 0) and {cap} (all others just below the cap)"
            )
        sigma = float(brentq(lambda s: excess(z, s), low, high, xtol=1e-13))
    return math.log(c) - sigma * z, sigma


def length_sampler(config: ReplyLength, cap: int | None, least: int) -> LengthSampler:
    """Whole numbers in [least, cap]. Lognormal is solved for its mean after the cut; the others are drawn and then cut.

    Raises ValueError if the distribution cannot have the parameters asked for.
    """
    top = cap if cap is not None else np.iinfo(np.int64).max

    def fixed(tasks: Generator, own: Generator, counts: Tokens) -> Tokens:
        return np.full(int(counts.sum()), min(max(config.tokens, least), top), dtype=np.int64)  # type: ignore[union-attr]

    def uniform(tasks: Generator, own: Generator, counts: Tokens) -> Tokens:
        return np.clip(own.integers(config.low, config.high + 1, int(counts.sum())), least, top)  # type: ignore[union-attr]

    def geometric(tasks: Generator, own: Generator, counts: Tokens) -> Tokens:
        return np.clip(own.geometric(1.0 / config.mean, int(counts.sum())), least, top)  # type: ignore[union-attr]

    if isinstance(config, FixedLength):
        return fixed
    if isinstance(config, UniformLength):
        if config.low > config.high:
            raise ValueError(f"`low` ({config.low}) is above `high` ({config.high})")
        return uniform
    if isinstance(config, GeometricLength):
        if config.mean < 1:
            raise ValueError(f"the mean of a geometric length is at least 1, not {config.mean:g}")
        return geometric
    if isinstance(config, QuantileLength):
        return _by_quantiles(config, least, int(top))
    return _lognormal(config, cap, least, int(top))


def _by_quantiles(config: QuantileLength, least: int, top: int) -> LengthSampler:
    """The inverse of the distribution function, linear between its points."""
    shares, values = (np.array(column, dtype=np.float64) for column in zip(*config.points, strict=True))

    def sample(tasks: Generator, own: Generator, counts: Tokens) -> Tokens:
        drawn = np.interp(own.random(int(counts.sum())), shares, values)
        return np.clip(np.floor(drawn + 0.5), least, top).astype(np.int64)

    return sample


def _lognormal(config: LognormalLength, cap: int | None, least: int, top: int) -> LengthSampler:
    """ln X = mu + sigma (sqrt(rho) Z_task + sqrt(1 - rho) Z_own): rho is the share of the log-variance a task's
    draws share."""
    mu, sigma = solve_lognormal(config.mean, cap, config.sigma, config.capped_share)
    common = sigma * math.sqrt(config.group_correlation)
    rest = sigma * math.sqrt(1.0 - config.group_correlation)

    def sample(tasks: Generator, own: Generator, counts: Tokens) -> Tokens:
        logs = own.standard_normal(int(counts.sum()))
        logs *= rest
        logs += np.repeat(mu + common * tasks.standard_normal(len(counts)), counts)
        return np.clip(np.floor(np.exp(np.minimum(logs, 43.0)) + 0.5), least, min(top, 1 << 62)).astype(np.int64)

    return sample


def duration_sampler(config: Duration) -> DurationSampler:
    """Seconds. Lognormal has mean `mean_s`: ln X ~ N(ln mean_s - sigma^2 / 2, sigma^2)."""
    if isinstance(config, FixedTime):
        seconds = config.seconds
        return lambda rng, n: np.full(n, seconds)
    if isinstance(config, ExponentialTime):
        mean_s = config.mean_s
        return lambda rng, n: rng.exponential(mean_s, n)
    mu, sigma = math.log(config.mean_s) - config.sigma * config.sigma / 2, config.sigma
    return lambda rng, n: rng.lognormal(mu, sigma, n)
