"""What some runs said, to the last bit: one hash of every event and action a run.

`python -m tests.support.fingerprint` prints them, and whether the modules it ran were compiled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.cases import scenario as benchmark
from sim.driver import SimulatedBackend
from testbed.compiled import compiled
from testbed.core.actions import Action
from testbed.core.events import Event
from testbed.scenario import Scenario
from tests.support.scenarios import COLOCATED, scenario

SCENARIOS: dict[str, Scenario] = {
    "single turn": benchmark("single_turn", 1024, engines=8),
    "many turns": benchmark("multi_turn", 1024, engines=2),
    "serving": benchmark("serving", 500),
    "step by step": benchmark("single_turn", 1024, engines=8, tokens=100, mode="iterate"),
    "shared GPUs": scenario(**COLOCATED, simulation__engine_costs={"type": "analytic"}),
    "page of 16": scenario(rollout__engine={"page_size": 16, "max_total_num_tokens": 800}, run__num_rollout=20),
}


def fingerprint(config: Scenario) -> str:
    """SHA-256 over the run's records as JSON (floats in their shortest exact form)."""
    digest, encode = hashlib.sha256(), msgspec.json.encode

    def note(event: Event, actions: Sequence[Action]) -> None:
        digest.update(encode((event, actions)))

    SimulatedBackend(config, Path(), (note,)).run()
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps({"compiled": len(compiled()), **{name: fingerprint(s) for name, s in SCENARIOS.items()}}))
