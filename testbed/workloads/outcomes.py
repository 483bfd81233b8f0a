"""What every workload needs beside lengths: rewards, verification times and environment times, in chunks of tasks.

Responsible for the difficulty model of a task. It refuses to know what the trajectories say.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from testbed.scenario.workload import FixedTime, Rewards, Tools
from testbed.workloads.distributions import duration_sampler, stream

CHUNK = 256
"""Tasks drawn at once: a draw costs tens of nanoseconds, and how many tasks are used changes none of them."""

Outcome = tuple[float, float, float, float]
"""(reward, reward_s, prepare_s, release_s) of one member."""
Columns = tuple[list[float], list[float], list[float], list[float]]


def needs_environment(tools: Tools) -> bool:
    """Whether the scenario says anything about environments."""
    free = FixedTime(seconds=0.0)
    return tools.environments > 0 or tools.environment_prepare != free or tools.environment_release != free


def outcomes(rewards: Rewards, tools: Tools, members: int, seed: int) -> Iterator[Outcome]:
    """Endless outcomes, one per member, the members of a task side by side.

    A task's success rate p is drawn from Beta(m c, (1 - m) c) with mean m = `success_rate` and c = `concentration`;
    each member's reward is 1 with probability p, else 0.
    """
    columns = outcome_columns(rewards, tools, members, seed)
    return chain.from_iterable(zip(*chunk, strict=True) for chunk in columns)


def outcome_columns(rewards: Rewards, tools: Tools, members: int, seed: int) -> Iterator[Columns]:
    """`outcomes` by the chunk: the values of CHUNK x members members, column by column."""
    difficulty, answers = stream(seed, "difficulty"), stream(seed, "rewards")
    verifier, environments = stream(seed, "verifier"), stream(seed, "environments")
    latency = duration_sampler(rewards.latency)
    prepare, release = duration_sampler(tools.environment_prepare), duration_sampler(tools.environment_release)
    mean, concentration = rewards.success_rate, rewards.concentration
    n = CHUNK * members
    while True:
        if 0.0 < mean < 1.0:
            rates = difficulty.beta(mean * concentration, (1.0 - mean) * concentration, CHUNK)
        else:
            rates = np.full(CHUNK, mean)
        values = (answers.random(n) < np.repeat(rates, members)).astype(float).tolist()
        prepare_s, release_s = prepare(environments, n).tolist(), release(environments, n).tolist()
        yield values, latency(verifier, n).tolist(), prepare_s, release_s
