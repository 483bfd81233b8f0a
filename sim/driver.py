"""The simulated backend: a virtual clock around the core. Actions become calls on models, models' results become
events.

It carries out and never decides. One pending wake-up per engine, trainer, link and tool; no process per request.
Observers (journal, metrics) see every event with its actions, in order.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from sim.clock import REPORT, TIMER, WATCHDOG, WEIGHTS, Clock
from sim.costs import cost_model
from sim.engine_kind import engine_options
from sim.errors import StuckError
from sim.experience_store import ExperienceStore
from sim.fleet import Fleet
from sim.kv_transfer import KvTransfers
from sim.services import Services
from sim.shared_machine import shared_machine
from sim.trainer import TrainerModel
from sim.weight_calibrated import weight_paths
from sim.weight_steps import WeightSteps
from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.core import Core
from testbed.dispatch import dispatch_table
from testbed.scenario import Scenario
from testbed.scenario.catalogue import engine_memory_of, gpu_spec, model_spec
from testbed.workloads import Workload, workload

Observer = Callable[[said.Event, list[do.Action]], None]
Progress = Callable[[float, int, int], None]
"""Called now and then with (simulated seconds, batches trained, events so far)."""


COLLECT_EVERY = 500_000
"""Clock events between two collections of reference cycles (flushed prefix trees)."""


class SimulatedBackend:
    """Runs one scenario in virtual time.

    `faults`: events to inject at given times (`EngineLost`, `EngineJoined`, `WeightUpdateFailed`), for tests and
    what-if studies. Raises `StuckError` when nothing moves any more, `WorkloadError` and `CostError` before the run
    starts.
    """

    def __init__(
        self,
        scenario: Scenario,
        base_dir: Path,
        observers: Sequence[Observer] = (),
        faults: Iterable[said.Event] = (),
    ) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.core = Core(scenario)
        self._observers = tuple(observers)
        model = model_spec(scenario.model, base_dir)
        gpu = gpu_spec(scenario.cluster.gpu)
        layout = self.core.layout
        self.workload: Workload = workload(scenario, base_dir)
        self.store = ExperienceStore(self.workload)
        self.costs = cost_model(scenario, model, gpu, base_dir)
        self.paths = weight_paths(scenario, layout, model, gpu, base_dir)
        self.fleet = Fleet(
            scenario,
            layout,
            engine_options(scenario, model, gpu),
            self.costs,
            self.clock,
            self.store,
            self.tell,
            KvTransfers(scenario, layout, gpu, engine_memory_of(scenario, model, gpu).kv_bytes_per_token),
        )
        self.engines = self.fleet.slots
        trainer = TrainerModel(scenario, layout, model, gpu, base_dir=base_dir)
        self.services = Services(
            scenario, self.clock, self.store, self.workload, trainer, self.tell, self.fleet.report_each
        )
        self.fleet.machine = self.services.machine = shared_machine(
            scenario, self.clock, self.costs, len(self.engines), self.fleet.use_costs
        )
        self.weights = WeightSteps(scenario, layout, self.clock, self.fleet, self.paths, self.tell)
        self._pending: deque[said.Event] = deque()
        self._telling = False
        self._seen_completed = -1
        self._faults = tuple(faults)
        self.finish_reason = ""
        self._do = dispatch_table(
            self.fleet, self.services, self.weights, set_timer=self._set_timer, finish=self._finish
        )

    def use(self, observers: Sequence[Observer]) -> None:
        """Replace the observers; before the run starts."""
        self._observers = tuple(observers)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, progress: Progress | None = None, every: int = 4_000) -> str:
        """Run to the end; returns the reason that the core gave for finishing."""
        self.start()
        collects = gc.isenabled()
        gc.disable()  # finished records are freed by reference counts; scanning for cycles costs a quarter of a run
        try:
            self._loop(progress, every)
        finally:
            if collects:
                gc.enable()
        return self.finish_reason

    def _loop(self, progress: Progress | None, every: int) -> None:
        clock, core = self.clock, self.core
        limit = self.scenario.simulation.max_simulated_s
        collect_at = COLLECT_EVERY
        while not core.finished:
            clock.run_events(every, limit)
            if clock.stopped:
                return
            if clock.next_t == inf:
                raise StuckError(f"nothing is scheduled at {clock.now:.3f} s: {core.explain()}")
            if clock.next_t > limit:
                raise StuckError(f"the run is longer than max_simulated_s = {limit} s: {core.explain()}")
            if clock.events >= collect_at:
                collect_at = clock.events + COLLECT_EVERY
                gc.collect()
            if progress is not None:
                progress(clock.now, core.context.progress.batches_trained, clock.events)

    def start(self) -> None:
        """Schedule what happens by itself, and tell the core that the engines are up."""
        clock, scenario = self.clock, self.scenario
        for fault in self._faults:
            clock.at(fault.t, WEIGHTS, self._fault, fault)
        clock.at(scenario.simulation.watchdog_s, WATCHDOG, self._watchdog)
        interval = self.core.rollouts.concurrency.report_interval_s
        if interval:
            clock.at(interval, REPORT, self.fleet.report_all, interval)
        wanted = scenario.weights.path
        paths = wanted.among if wanted.type == "cheapest" else ()
        kv_tokens = tuple(slot.model.kv_total for slot in self.engines)
        self.tell(said.RunStarted(clock.now, tuple(self.paths.expected(p) for p in paths), kv_tokens))
        self.services.start()

    def tell(self, event: said.Event) -> None:
        """Hand an event to the core and carry out what follows; events that follow at once are told in order."""
        pending = self._pending
        if self._telling:
            pending.append(event)
            return
        self._telling = True
        core, observers, table = self.core, self._observers, self._do
        try:
            while True:
                actions = core.handle(event)
                for observe in observers:
                    observe(event, actions)
                for action in actions:
                    table[type(action)](action)
                if not pending:
                    break
                event = pending.popleft()
        finally:
            self._telling = False

    def _finish(self, a: do.Finish) -> None:
        self.finish_reason = a.reason
        self.clock.stop()
        self._pending.clear()

    def _watchdog(self, _: Any) -> None:
        completed = self.fleet.finished_turns + self.services.completed
        if completed == self._seen_completed:
            raise StuckError(
                f"nothing finished between {self.clock.now - self.scenario.simulation.watchdog_s:.0f} s and "
                f"{self.clock.now:.0f} s (simulated): {self.core.explain()}"
            )
        self._seen_completed = completed
        self.clock.at(self.clock.now + self.scenario.simulation.watchdog_s, WATCHDOG, self._watchdog)

    def _fault(self, event: said.Event) -> None:
        if isinstance(event, said.EngineLost):
            self.fleet.lost(event.engine)
        elif isinstance(event, said.EngineJoined):
            self.fleet.serve(self.engines[event.engine], event.version)
        elif isinstance(event, said.WeightUpdateFailed) and event.engine < 0:
            self.weights.preparation_failed()
        self.tell(event)

    def _set_timer(self, a: do.SetTimer) -> None:
        self.clock.at(a.at, TIMER, self._timer, a.timer)

    def _timer(self, timer: int) -> None:
        self.tell(said.TimerFired(self.clock.now, timer))
