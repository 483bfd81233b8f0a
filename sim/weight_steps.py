"""Weight updates and phase switches on simulated engines: an action takes what its path or link says, then an event.

It refuses to know who takes part and when a version counts: the core does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.agenda import Call
from sim.clock import COMPLETE, WEIGHTS, Clock
from sim.engine import EngineModel
from sim.fleet import Fleet
from sim.weight_paths import WeightPaths
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from testbed.scenario.layout import Layout


class WeightSteps:
    """`tell` hands an event to the core."""

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        clock: Clock,
        fleet: Fleet,
        paths: WeightPaths,
        tell: Callable[[said.Event], None],
    ) -> None:
        self.clock = clock
        self.fleet = fleet
        self.paths = paths
        self.tell = tell
        self._layout = layout
        placement: Any = scenario.placement
        self._clears_kv = placement.mode != "disaggregated" and placement.switch.clear_kv
        self._path = ""
        """Of the publication under way."""
        self._updating: dict[int, int] = {}
        """Engine -> version it is paused for."""
        self._preparing: list[Call] = []
        """What the preparation under way will say, unless it fails."""
        self._left_to_copy: dict[int, set[int]] = {}

    def preparation_failed(self) -> None:
        """It says nothing any more."""
        for call in self._preparing:
            call.cancel()

    def prepare_weights(self, a: do.PrepareWeights) -> None:
        self._path = a.path
        prepared = self.paths.prepare(self.clock.now, a.path, a.participants)
        seconds = prepared.ready_t - self.clock.now
        event = said.WeightsPrepared(prepared.ready_t, a.version, seconds, prepared.bytes)
        self._preparing = [self.clock.at(prepared.ready_t, WEIGHTS, self.tell, event)]
        if prepared.trainer_released_t is None:
            self._left_to_copy[a.version] = set(a.participants)
        else:
            released = said.TrainerReleased(prepared.trainer_released_t, a.version)
            self._preparing.append(self.clock.at(prepared.trainer_released_t, WEIGHTS, self.tell, released))

    def pause_engine(self, a: do.PauseEngine) -> None:
        slot = self.fleet.slots[a.engine]
        self._updating[a.engine] = a.version
        seconds = self.paths.pause_seconds(self._path, a.mode)
        if seconds:
            self.clock.at(self.clock.now + seconds, WEIGHTS, self._pause, (a, slot.model))
        else:
            slot.model.pause(self.fleet.message_t(), a.mode)
            self.fleet.schedule(slot)

    def _pause(self, arg: tuple[do.PauseEngine, EngineModel]) -> None:
        a, model = arg
        slot = self.fleet.slots[a.engine]
        if slot.model is model:  # else it was lost meanwhile
            model.pause(self.clock.now, a.mode)
            self.fleet.schedule(slot)

    def copy_weights(self, a: do.CopyWeights) -> None:
        end = self.paths.copy(self.clock.now, a.path, a.participants, a.engine)
        self.clock.at(end, WEIGHTS, self._copied, a)

    def _copied(self, a: do.CopyWeights) -> None:
        self.tell(said.WeightsCopied(self.clock.now, a.engine, a.version))
        left = self._left_to_copy.get(a.version)
        if left is not None:
            left.discard(a.engine)
            if not left:
                del self._left_to_copy[a.version]
                self.tell(said.TrainerReleased(self.clock.now, a.version))

    def requantize(self, a: do.RequantizeWeights) -> None:
        end = self.paths.requantize(self.clock.now, a.engine)
        self.clock.at(end, WEIGHTS, self.tell, said.EngineReady(end, a.engine, a.version))

    def flush_cache(self, a: do.FlushCache) -> None:
        if not self.fleet.slots[a.engine].model.flush(self.clock.now):
            reason = "flush refused: a batch is running"
            self.tell(said.WeightUpdateFailed(self.clock.now, a.engine, self._updating[a.engine], "flush", reason))

    def resume_engine(self, a: do.ResumeEngine) -> None:
        end = self.clock.now + self.paths.resume_seconds(self._path)
        self.clock.at(end, WEIGHTS, self._resumed, (a, self.fleet.slots[a.engine].model))

    def _resumed(self, arg: tuple[do.ResumeEngine, EngineModel]) -> None:
        a, model = arg
        slot, now = self.fleet.slots[a.engine], self.clock.now
        if slot.model is not model:
            return  # it was lost meanwhile
        self.fleet.serve(slot, a.version)
        slot.model.resume(now)
        self.tell(said.EngineResumed(now, a.engine, a.version))
        self.fleet.schedule(slot)

    def switch_pool(self, a: do.SwitchPool) -> None:
        now = self.clock.now
        if a.phase == "train" and self._clears_kv:
            for index in self._layout.pools[a.pool].engines:
                slot = self.fleet.slots[index]
                self.fleet.take_in(slot)
                slot.model.release_memory(now)
                slot.released = True
        self.clock.at(now + self.paths.switch_seconds(a.phase), COMPLETE, self._switched, a)

    def _switched(self, a: do.SwitchPool) -> None:
        now = self.clock.now
        if a.phase == "generate" and self._clears_kv:
            for index in self._layout.pools[a.pool].engines:
                slot = self.fleet.slots[index]
                slot.model.resume_memory(now)
                slot.released = False
        self.tell(said.PoolSwitched(now, a.pool, a.phase))
