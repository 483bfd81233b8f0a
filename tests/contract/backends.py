"""The backends that the contract suite runs against: a name, and a function from scenario and faults to the pairs it
produced.

A third backend is one more entry. `faults` are events that happen to the run (`EngineLost`, `EngineJoined`) at their
times; a backend that cannot produce them at will declares so with `faults=False` and is not asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.driver import SimulatedBackend
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from tests.support.invariants import Record
from tests.support.scripted import Scripted


@dataclass(frozen=True)
class Backend:
    name: str
    tag: str
    """CORE, SIM or REAL, as in the requirements."""
    run: Callable[[Scenario, Sequence[said.Event]], list[Record]]
    adapted: Callable[[Scenario], Scenario] = lambda config: config
    """The suite's scenario as this backend can run it: smaller, never another system."""
    lacks: frozenset[str] = frozenset()
    """Systems of the suite that it does not have."""
    faults: bool = True
    deterministic: bool = True


def scripted(scenario: Scenario, faults: Sequence[said.Event]) -> list[Record]:
    """Constants around the core; several turns if the scenario wants them."""
    mean = getattr(getattr(scenario.workload, "turns", None), "tokens", 1)
    kv_tokens = scenario.rollout.engine.max_total_num_tokens or 10_000
    backend = Scripted(scenario, turn=lambda a: 4.0 + a.trajectory * 7 % 11, turns=mean, kv_tokens=kv_tokens // 3)
    for fault in faults:
        if isinstance(fault, said.EngineLost):
            backend.lose(fault.t, fault.engine)
        elif isinstance(fault, said.EngineJoined):
            backend.join(fault.t, fault.engine, fault.version)
    return backend.run().records


def simulated(scenario: Scenario, faults: Sequence[said.Event]) -> list[Record]:
    """The discrete-event simulator; virtual time."""
    records: list[Record] = []

    def observe(event: said.Event, actions: list[do.Action]) -> None:
        records.append((event, list(actions)))

    SimulatedBackend(scenario, Path(__file__).parent, [observe], faults).run()
    return records


BACKENDS: tuple[Backend, ...] = (Backend("scripted", "CORE", scripted), Backend("sim", "SIM", simulated))
