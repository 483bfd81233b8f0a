"""Random scenarios on every backend: all policies mixed, engines lost and back; the invariants hold and a replay
agrees."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from testbed.core import events as said
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of
from testbed.scenario.rules import check
from tests.contract.backends import Backend
from tests.contract.test_contract import TOOLS, VARIED
from tests.support.invariants import replayed, watched
from tests.support.random_runs import random_scenario
from tests.support.scenarios import scenario


def drawn(seed: int) -> tuple[random.Random, Scenario] | None:
    """A random scenario with workload, and the generator for the rest; None if it cannot run on real GPUs."""
    r = random.Random(seed)
    config = random_scenario(r)
    data = config.model_dump()
    stage = config.workload.rewards.stage
    data["workload"] = scenario(**VARIED, **(TOOLS if r.random() < 0.4 else {})).workload.model_dump()
    data["workload"]["rewards"]["stage"] = stage
    if config.weights.requantize != "none":
        data["rollout"]["engine"]["weight_precision"] = config.weights.requantize
    full = Scenario.model_validate(data)
    return None if check(full, Path(__file__).parent) else (r, full)


@pytest.mark.parametrize("seed", [s for s in range(40) if drawn(s)])
def test_random_scenarios_keep_the_contract(backend: Backend, seed: int) -> None:
    found = drawn(seed)
    assert found is not None
    r, config = found
    last = len(layout_of(config).engines) - 1
    faults: list[said.Event] = []
    if backend.faults and last > 0 and r.random() < 0.6:
        engine, t = r.randint(1, last), r.uniform(1, 20)
        faults = [said.EngineLost(t, engine), said.EngineJoined(t + r.uniform(1, 10), engine, 0)]
    records = backend.run(config, faults)
    assert watched(config, records).finished == "completed"
    replayed(config, records)
