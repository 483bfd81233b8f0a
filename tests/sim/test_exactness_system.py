"""Whole systems in both modes of the engine model: `iterate` takes every step, `skip` jumps; nothing else may differ.

Times agree to 1e-12 relative, decisions are equal. The scenarios mix multi-turn programs, small KV pools, chunked
prefill, every transition rule and the policies of `random_scenario`. Lengths are random, so that engines do not run in
lock step: the order of two engines' events at the very same instant is decided by rounding, in the real world by
chance, and is not part of the claim.
"""

from __future__ import annotations

import random
from math import isclose
from typing import Any

import msgspec
import pytest

from testbed.core.core import Core
from testbed.scenario import Scenario
from testbed.scenario.rules import check
from tests.support.random_runs import random_scenario
from tests.support.scenarios import COLOCATED, tree
from tests.support.simulated import HERE, Run

COSTS: tuple[dict[str, Any], ...] = (
    {
        "type": "linear",
        "base_s": 0.01,
        "per_sequence_s": 3e-4,
        "per_context_token_s": 1e-6,
        "prefill_base_s": 0.02,
        "prefill_per_token_s": 1e-4,
    },
    {"type": "measured"},
)


def close(a: Any, b: Any) -> bool:
    """Equal, but for times: floats may differ in the last digits."""
    if isinstance(a, float) and isinstance(b, float):
        return isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def in_both_modes(config: dict[str, Any]) -> tuple[Run, Run]:
    runs = []
    for mode in ("skip", "iterate"):
        config["simulation"]["mode"] = mode
        runs.append(Run(Scenario.model_validate(config)).go())
    return runs[0], runs[1]


def assert_same(skip: Run, iterate: Run) -> None:
    """Same events with the same figures and the same actions, one by one; load reports may be a step apart."""

    def plain(run: Run) -> list[Any]:
        records = msgspec.to_builtins(run.records)
        return [r for r in records if r[0]["type"] != "LoadReported"]

    ours, theirs = plain(skip), plain(iterate)
    for a, b in zip(ours, theirs, strict=False):
        assert close(a, b), f"skip {a}\niterate {b}"
    assert len(ours) == len(theirs)


def varied(seed: int) -> dict[str, Any]:
    """A random scenario with random lengths, several turns and an engine that is short of everything."""
    r = random.Random(seed)
    config: dict[str, Any] = random_scenario(r).model_dump(mode="json")
    config["workload"].update(
        prompt={"type": "uniform", "low": 1, "high": 400},
        reply=r.choice(({"type": "uniform", "low": 1, "high": 300}, {"type": "lognormal", "mean": 120, "sigma": 1.0})),
        turns=r.choice(({"type": "fixed", "tokens": 1}, {"type": "geometric", "mean": 2.5})),
        observation=r.choice(({"type": "fixed", "tokens": 37}, {"type": "uniform", "low": 0, "high": 60})),
        tool_time={"type": "exponential", "mean_s": 1.0},
        shared_prefix_tokens=r.choice((0, 130)),
        max_response_length=400,
    )
    config["algorithm"].update(n_samples_per_prompt=r.choice((2, 4, 8)), rollout_batch_size=r.choice((2, 4)))
    config["rollout"]["engine"].update(
        max_total_num_tokens=r.choice((4000, 6000, 100000)),
        max_running_requests=r.choice((2, 4, 16, 256)),
        page_size=r.choice((1, 16)),
        chunked_prefill_size=r.choice((-1, 64, 8192)),
        disable_overlap_schedule=r.choice((False, True)),
        schedule_policy=r.choice(("fcfs", "lpm")),
    )
    config["simulation"]["engine_costs"] = r.choice(COSTS)
    config["training"]["cost"] = {"type": "rate", "samples_per_s": r.choice((1.0, 4.0, 20.0))}
    return config


def runnable(count: int) -> list[int]:
    """The first seeds whose scenario passes every rule."""
    seeds: list[int] = []
    seed = 5000
    while len(seeds) < count:
        if not check(Scenario.model_validate(varied(seed)), HERE):
            seeds.append(seed)
        seed += 1
    return seeds


@pytest.mark.parametrize("seed", runnable(40))
def test_skip_and_iterate_agree_on_whole_systems(seed: int) -> None:
    skip, iterate = in_both_modes(varied(seed))
    assert_same(skip, iterate)
    skip.checked()
    core = Core(skip.scenario)
    for event, actions in skip.records:
        assert core.handle(event) == actions


RULES = tuple(
    (mode, kv)
    for mode in ("finish", "retract", "in_place", "abort")
    for kv in ("flush", "salt_by_version", "keep")
    if (mode, kv) != ("in_place", "flush")
)


@pytest.mark.parametrize(("mode", "kv"), RULES)
def test_skip_and_iterate_agree_under_every_transition_rule(mode: str, kv: str) -> None:
    """Updates arrive in the middle of long replies: pauses, retractions and aborts cut runs of decode steps."""
    config = tree(
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 2},
        workload__prompt={"type": "uniform", "low": 50, "high": 300},
        workload__reply={"type": "lognormal", "mean": 300, "sigma": 0.8},
        workload__turns={"type": "geometric", "mean": 2.0},
        workload__observation={"type": "uniform", "low": 5, "high": 60},
        workload__tool_time={"type": "exponential", "mean_s": 0.5},
        rollout__admission={"type": "one_step_ahead"},
        rollout__engine={"max_total_num_tokens": 7000, "max_running_requests": 3},
        weights__transition={"pause_generation_mode": mode, "kv": kv},
        simulation__engine_costs=COSTS[0],
        training__cost={"type": "rate", "samples_per_s": 4.0},
        run__num_rollout=4,
    )
    skip, iterate = in_both_modes(config)
    assert_same(skip, iterate)
    cut = [e for _, e, _ in skip.turns() if len(e.spans) > 1]
    assert bool(cut) == (mode in ("retract", "in_place")), "these two go on with the tokens they have"


def test_skip_and_iterate_agree_on_a_colocated_system_with_measured_costs() -> None:
    config = tree(
        **COLOCATED,
        algorithm={"n_samples_per_prompt": 8, "rollout_batch_size": 4},
        workload__reply={"type": "lognormal", "mean": 400, "sigma": 1.0},
        workload__max_response_length=2000,
        simulation__engine_costs={"type": "measured"},
    )
    skip, iterate = in_both_modes(config)
    assert_same(skip, iterate)
    assert skip.backend.fleet.wake_ups * 5 < iterate.backend.fleet.wake_ups, "that is what skipping is for"
