"""Weight updates and phase switches on real engines: an action becomes a control call or a copy, then an event.

It refuses to know who takes part and when a version counts: the core does. Every step may fail; then the core hears
which step of which engine, and an engine that is resumed with a version it does not hold gets that version back
first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec import Struct

from real.errors import EngineGone, EngineRefused, UpdateFailed
from real.fleet import EngineSlot, Fleet
from real.trainer.stats import Moved
from real.trainer.trainer import Trainer
from real.weights.agree import Agreement
from real.weights.handle import EngineHandle
from real.weights.paths import WeightPath
from testbed.core import actions as do
from testbed.core import events as said
from testbed.policies.publication import RENDEZVOUS
from testbed.scenario import Scenario
from testbed.scenario.layout import Layout


class Switched(Struct):
    """One change of phase of a shared pool, seconds measured."""

    t: float
    phase: str
    seconds: float
    engines_s: float
    """Of it, engines giving up or taking back their memory."""
    trainer_bytes: int = 0
    """Of trainer state moved to host memory or back."""
    trainer_s: float = 0.0


class Published(Struct):
    """One version on its way: what a copy of it takes."""

    t: float
    version: int
    path: str
    seconds: float
    bytes: int
    full_bytes: int
    """Parameters x bytes of the engines' type; more than `bytes` where only a delta travels."""
    words: int
    changed_words: int
    """Of `words`, those that differ from the base of a delta."""
    engine_bytes: int
    """Of one engine's weights in the precision it serves, as its format stores them."""
    requantize_s: float = 0.0
    """Of the engine that took longest; 0: nothing to convert."""


class WeightSteps:
    """`paths`: by name, those the scenario can choose (and `cuda_ipc` for pools that share GPUs)."""

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        fleet: Fleet,
        trainer: Trainer,
        paths: dict[str, WeightPath],
        agreement: Agreement,
        tell: Callable[[said.Event], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        now: Callable[[], float],
    ) -> None:
        self.fleet = fleet
        self.trainer = trainer
        self.paths = paths
        self.agreement = agreement
        self.tell = tell
        self.spawn = spawn
        self.now = now
        self._layout = layout
        self._requantizes = scenario.weights.requantize != "none"
        placement: Any = scenario.placement
        self._lends_memory = placement.mode != "disaggregated" and placement.switch.clear_kv
        self._offloads = placement.mode != "disaggregated" and placement.switch.offload
        self._left_to_copy: dict[int, set[int]] = {}
        self._collectives: dict[tuple[int, tuple[int, ...]], asyncio.Task[None]] = {}
        self._away = False
        """The trainer's state is in host memory."""
        self.switches: list[Switched] = []
        self.published: list[Published] = []
        self._oldest = 0
        """Oldest version that is kept."""

    # --- preparation --------------------------------------------------------------------------------------------------

    def prepare_weights(self, a: do.PrepareWeights) -> None:
        self.spawn(self._prepare(a))

    async def _prepare(self, a: do.PrepareWeights) -> None:
        path = self.paths[a.path]
        try:
            engines = self._handles(a.participants)
            prepared = await path.prepare(a.version, engines)
            self.agreement.expect(a.version, prepared.expected)
            words = (prepared.bytes, prepared.full_bytes, prepared.words, prepared.changed_words)
            engine_bytes = prepared.full_bytes  # until an engine says what its format makes of them
            self.published.append(Published(self.now(), a.version, a.path, prepared.seconds, *words, engine_bytes))
        except UpdateFailed as failed:
            self.tell(said.WeightUpdateFailed(self.now(), -1, a.version, failed.stage, failed.reason))
            return
        if not path.releases_trainer_after_prepare:
            self._left_to_copy[a.version] = set(a.participants)
        await self._forget(path)
        self.tell(said.WeightsPrepared(self.now(), a.version, prepared.seconds, prepared.bytes))
        if path.releases_trainer_after_prepare:
            self.tell(said.TrainerReleased(self.now(), a.version))

    async def _forget(self, path: WeightPath) -> None:
        """Drop versions that no engine serves any more: none of them can be restored or copied again."""
        oldest = min((slot.version for slot in self.fleet.slots if not slot.lost), default=0)
        while self._oldest < oldest:
            await path.forget(self._oldest)
            self.agreement.forget(self._oldest)
            self._oldest += 1

    def _handles(self, engines: tuple[int, ...]) -> list[EngineHandle]:
        return [self.fleet.slots[i].handle for i in engines if not self.fleet.slots[i].lost]

    # --- one engine's steps -------------------------------------------------------------------------------------------

    def _step(self, engine: int, version: int, stage: str, step: Callable[[EngineSlot], Awaitable[None]]) -> None:
        self.spawn(self._guarded(self.fleet.slots[engine], version, stage, step))

    async def _guarded(
        self, slot: EngineSlot, version: int, stage: str, step: Callable[[EngineSlot], Awaitable[None]]
    ) -> None:
        if slot.lost:
            return
        try:
            await slot.in_order(lambda: step(slot))
        except EngineGone:
            self.fleet.gone(slot)
        except EngineRefused as refused:
            self._failed(slot, version, stage, refused.message)
        except UpdateFailed as failed:
            self._failed(slot, version, failed.stage, failed.reason)

    def _failed(self, slot: EngineSlot, version: int, stage: str, reason: str) -> None:
        if not slot.lost:
            self.tell(said.WeightUpdateFailed(self.now(), slot.index, version, stage, reason))

    def pause_engine(self, a: do.PauseEngine) -> None:
        async def pause(slot: EngineSlot) -> None:
            await slot.handle.client.pause(a.mode)
            slot.paused = True
            if a.mode == "abort":  # their ends come first: nothing is in flight on a paused engine
                await asyncio.gather(*slot.turns.values(), return_exceptions=True)
            self.tell(said.EnginePaused(self.now(), a.engine))

        self._step(a.engine, a.version, "pause", pause)

    def flush_cache(self, a: do.FlushCache) -> None:
        slot = self.fleet.slots[a.engine]
        version = slot.version + 1

        async def flush(slot: EngineSlot) -> None:
            if await slot.handle.client.flush():
                slot.forget_kv()
            else:
                self._failed(slot, version, "flush", "flush refused: requests are held")

        self._step(a.engine, version, "flush", flush)

    def copy_weights(self, a: do.CopyWeights) -> None:
        if a.path not in RENDEZVOUS:
            self._step(a.engine, a.version, "copy", lambda slot: self._copy(a, [slot]))
            return
        key = (a.version, a.participants)
        running = self._collectives.get(key)
        if running is None or running.done():
            self._collectives[key] = self.spawn(self._copy_together(a, key))

    async def _copy_together(self, a: do.CopyWeights, key: tuple[int, tuple[int, ...]]) -> None:
        slots = [self.fleet.slots[i] for i in a.participants if not self.fleet.slots[i].lost]
        try:
            await self._copy(a, slots)
        except (EngineGone, EngineRefused, UpdateFailed) as problem:
            stage = problem.stage if isinstance(problem, UpdateFailed) else "copy"
            for slot in slots:
                if isinstance(problem, EngineGone) and not await slot.handle.client.health():
                    self.fleet.gone(slot)
                elif slot.loaded != a.version:
                    self._failed(slot, a.version, stage, str(problem))
        finally:
            if self._collectives.get(key) is asyncio.current_task():
                del self._collectives[key]

    async def _copy(self, a: do.CopyWeights, slots: list[EngineSlot]) -> None:
        by_handle = {slot.index: slot for slot in slots}
        for slot in slots:
            slot.loaded = -1  # torn until the copy is over
        done: list[Awaitable[None]] = []
        await self.paths[a.path].copy(
            a.version,
            [slot.handle for slot in slots],
            lambda handle: done.append(self.spawn(self._copied(a, by_handle[handle.index]))),
        )
        await asyncio.gather(*done)

    async def _copied(self, a: do.CopyWeights, slot: EngineSlot) -> None:
        """Copied: without a conversion to come, the tensors are compared here, with it afterwards."""
        if not self._requantizes:
            await self.agreement.check(slot.handle, a.version, "none")
        slot.loaded = a.version
        self.tell(said.WeightsCopied(self.now(), a.engine if len(a.participants) == 1 else slot.index, a.version))
        left = self._left_to_copy.get(a.version)
        if left is not None:
            left.discard(slot.index)
            left -= {s.index for s in self.fleet.slots if s.lost}
            if not left:
                del self._left_to_copy[a.version]
                self.tell(said.TrainerReleased(self.now(), a.version))

    def requantize(self, a: do.RequantizeWeights) -> None:
        async def convert(slot: EngineSlot) -> None:
            digest = await self.agreement.check(slot.handle, a.version, a.quantization)
            for row in (p for p in self.published if p.version == a.version):
                row.engine_bytes, row.requantize_s = digest.stored_bytes, max(row.requantize_s, digest.requantize_s)
            self.tell(said.EngineReady(self.now(), a.engine, a.version))

        self._step(a.engine, a.version, "requantize", convert)

    def resume_engine(self, a: do.ResumeEngine) -> None:
        async def resume(slot: EngineSlot) -> None:
            if slot.loaded != a.version:
                await self.agreement.restore(slot.handle, a.version)
                slot.loaded = a.version
            await self.agreement.commit(slot.handle, a.version)
            slot.version = a.version
            await slot.handle.client.resume()
            slot.paused = False
            self.tell(said.EngineResumed(self.now(), a.engine, a.version))

        self._step(a.engine, a.version, "resume", resume)

    # --- shared pools -------------------------------------------------------------------------------------------------

    def switch_pool(self, a: do.SwitchPool) -> None:
        self.spawn(self._switch(a))

    async def _switch(self, a: do.SwitchPool) -> None:
        slots = [self.fleet.slots[i] for i in self._layout.pools[a.pool].engines if not self.fleet.slots[i].lost]
        started = self.now()
        if a.phase == "train":
            await self._each(slots, self._release)
            engines_s = self.now() - started
            moved = await self.trainer.onload() if self._away else None
            self._away = False
        else:
            moved = await self._lend()
            moved_t = self.now()
            await self._each(slots, self._take_back)
            engines_s = self.now() - moved_t
        what = (moved.bytes, moved.seconds) if moved is not None else (0, 0.0)
        self.switches.append(Switched(started, a.phase, self.now() - started, engines_s, *what))
        self.tell(said.PoolSwitched(self.now(), a.pool, a.phase))

    async def _lend(self) -> Moved | None:
        """The trainer's state leaves the GPUs that engines are about to use."""
        if not self._offloads:
            return None
        self._away = True
        return await self.trainer.offload()

    async def begin(self) -> None:
        """A shared pool starts in the phase of generation."""
        await self._lend()

    async def end(self) -> None:
        """Leave the trainer ready for whatever comes next."""
        if self._away:
            self._away = False
            await self.trainer.onload()

    async def _each(self, slots: list[EngineSlot], step: Callable[[EngineSlot], Awaitable[None]]) -> None:
        async def one(slot: EngineSlot) -> None:
            try:
                await slot.in_order(lambda: step(slot))
            except EngineGone:
                self.fleet.gone(slot)

        await asyncio.gather(*(one(slot) for slot in slots))

    async def _release(self, slot: EngineSlot) -> None:
        if self._lends_memory:
            await asyncio.gather(*slot.turns.values(), return_exceptions=True)  # aborted ones are about to end
            await slot.handle.client.release_memory()
            slot.released = True
            slot.forget_kv()

    async def _take_back(self, slot: EngineSlot) -> None:
        if slot.released:
            await slot.handle.client.resume_memory()
            slot.released = False
