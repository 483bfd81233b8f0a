"""The engines of a real run: turns out as requests, answers in as events.

Responsible for one request per turn, for what a turn's answer means to the core, and for engines that die. It refuses
to know which engine a turn should go to, what a weight update is and where tasks come from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from real.engines.client import Generated, Loads
from real.environments.base import Environment
from real.errors import EngineGone, EngineRefused
from real.store import Conversation, ExperienceStore
from real.weights.handle import EngineHandle
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario


class EngineSlot:
    """One engine as this run sees it: the version it serves, its open requests, and its control calls in order."""

    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        self.index = handle.index
        self.version = 0
        """Published version that new requests are answered with."""
        self.loaded = 0
        """Version of the weights in its memory; differs from `version` between a copy and the resume."""
        self.lost = False
        self.released = False
        """Its memory is lent to the trainer."""
        self.paused = False
        self.turns: dict[int, asyncio.Task[Any]] = {}
        """Trajectory -> its request."""
        self.computed: dict[int, int] = {}
        """First token of a prompt -> oldest version whose KV of it may still be in the cache: what is found of a prompt
        begins with it, and no KV in the cache is computed on older KV than it follows."""
        self.prompt_tokens = self.recomputed_tokens = 0
        """Prompt tokens computed, and those of them that their trajectory had computed before."""
        self.before: Loads | None = None
        """The server's counters when the run started."""
        self._order = asyncio.Lock()

    async def in_order(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Control calls of one engine never overtake each other."""
        async with self._order:
            return await call()

    def forget_kv(self) -> None:
        self.computed.clear()


class Fleet:
    """All engines. `tell` hands an event to the core, `spawn` runs a coroutine of this run, `now` is its clock."""

    def __init__(
        self,
        scenario: Scenario,
        handles: list[EngineHandle],
        store: ExperienceStore,
        environment: Environment,
        tell: Callable[[said.Event], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        now: Callable[[], float],
        to_run_time: Callable[[float], float],
    ) -> None:
        self.slots = [EngineSlot(h) for h in handles]
        self.store = store
        self.tell = tell
        self.spawn = spawn
        self.now = now
        self._to_run_time = to_run_time
        self._environment = environment
        self._members = scenario.members_started
        self._temperature = scenario.real.temperature
        self._kv = scenario.weights.transition.kv
        self._ignore_eos = scenario.rollout.ignore_eos
        self._keeps: set[int] = set()
        """Trajectories whose turn is being taken back and keeps what it has generated."""
        self.finished_turns = 0
        self.drift = 0
        """Prompts that the engine counted differently from us: not one, as ids travel both ways."""

    # --- turns --------------------------------------------------------------------------------------------------------

    def fetch_prefix(self, a: do.FetchPrefix) -> None:
        """The rules of a real run refuse what would ask for it."""
        raise NotImplementedError("real engines fetch no KV from each other")

    def hand_over(self, a: do.HandOver) -> None:
        """As `fetch_prefix`."""
        raise NotImplementedError("real engines hand no KV over")

    def start_turn(self, a: do.StartTurn) -> None:
        slot = self.slots[a.engine]
        c = self.store.open(a.trajectory, a.group, a.task, a.member, self._members)
        slot.turns[a.trajectory] = self.spawn(self._turn(slot, a, c, self.now()))

    async def _turn(self, slot: EngineSlot, a: do.StartTurn, c: Conversation, sent_t: float) -> None:
        limits = self._environment.limits(c.task, c.member, a.turn, len(c.ids))
        version, prompt = slot.version, len(c.ids)
        slot.computed.setdefault(c.ids[0], version)
        try:
            g = await slot.handle.client.generate(
                rid=f"{a.trajectory}-{a.turn}",
                input_ids=c.ids,
                max_new_tokens=limits.max_new_tokens - c.partial,
                temperature=self._temperature,
                stop_token_ids=limits.stop_token_ids,
                ignore_eos=limits.ignore_eos or self._ignore_eos,
                extra_key=f"v{version}" if self._kv == "salt_by_version" else None,
                return_routed_experts=slot.handle.routed_experts,
            )
        except EngineGone:
            self._leave(slot, a.trajectory)
            self.gone(slot)
            return
        except EngineRefused as refused:
            self._leave(slot, a.trajectory)
            self.tell(said.TurnFailed(self.now(), a.trajectory, a.turn, a.engine, f"refused: {refused.message}"))
            return
        keeps = a.trajectory in self._keeps
        self._leave(slot, a.trajectory)
        if slot.lost:
            return
        if g.finish_reason == "abort" and not (keeps and g.output_ids):
            tokens = len(g.output_ids)
            self.tell(said.TurnFailed(self.now(), a.trajectory, a.turn, a.engine, "aborted", tokens))
        elif self.store.find(a.trajectory) is c:
            self._answered(slot, a, c, g, limits.finish_reason or g.finish_reason, version, prompt, sent_t)

    def _leave(self, slot: EngineSlot, trajectory: int) -> None:
        """The turn is over, however it ended."""
        self._keeps.discard(trajectory)
        if slot.turns.get(trajectory) is asyncio.current_task():
            del slot.turns[trajectory]

    def _answered(
        self,
        slot: EngineSlot,
        a: do.StartTurn,
        c: Conversation,
        g: Generated,
        reason: str,
        version: int,
        prompt: int,
        sent_t: float,
    ) -> None:
        now = self.now()
        self.drift += g.prompt_tokens != prompt
        spans = tuple((int(v), start, end) for v, start, end in g.spans)
        recomputed = max(0, min(c.known_tokens, prompt) - g.cached_tokens)
        slot.prompt_tokens += prompt - g.cached_tokens
        slot.recomputed_tokens += recomputed
        cut = g.finish_reason == "abort"
        c.answered(g, spans, whole=not cut)
        call = None if cut else self._environment.after_turn(c.task, c.member, a.turn, c.outputs[-1])
        c.call = call
        self.finished_turns += not cut
        first = self._within(g.first_token_t, sent_t, now)
        self.tell(
            said.TurnFinished(
                now,
                a.trajectory,
                a.turn,
                a.engine,
                prompt,
                len(g.output_ids),
                spans,
                g.cached_tokens,
                first,
                self._within(g.started_t, sent_t, first),
                "abort" if cut else "tool_calls" if call is not None else reason,
                cut or call is not None,
                recomputed,
                (slot.computed.get(c.ids[0], version) if self._kv == "keep" else version) if g.cached_tokens else -1,
                g.retractions,
            )
        )

    def _within(self, t: float | None, low: float, high: float) -> float:
        """A monotonic time of the engine's answer as run time; the end of the interval where it is not known."""
        return high if t is None else min(max(self._to_run_time(t), low), high)

    def abort_turn(self, a: do.AbortTurn) -> None:
        slot = self.slots[a.engine]
        if a.trajectory in slot.turns:
            if a.keep:
                self._keeps.add(a.trajectory)
            self.spawn(self._abort(slot, f"{a.trajectory}-{a.turn}"))

    async def _abort(self, slot: EngineSlot, rid: str) -> None:
        try:
            await slot.handle.client.abort(rid)
        except EngineGone:
            self.gone(slot)

    # --- loads --------------------------------------------------------------------------------------------------------

    async def report(self, slot: EngineSlot) -> None:
        """The engine's counters since the start of the run, as an event."""
        if slot.lost:
            return
        try:
            load = await slot.handle.client.loads()
        except EngineGone:
            self.gone(slot)
            return
        before = slot.before or load
        prefill = load.prefill_s - before.prefill_s
        again = slot.recomputed_tokens / slot.prompt_tokens if slot.prompt_tokens else 0.0
        self.tell(
            said.LoadReported(
                self.now(),
                slot.index,
                load.running,
                load.waiting,
                load.kv_used_tokens,
                load.kv_total_tokens,
                load.retractions - before.retractions,
                prefill * (1 - again),
                prefill * again,
                load.decode_s - before.decode_s,
            )
        )

    async def report_each(self) -> None:
        await asyncio.gather(*(self.report(slot) for slot in self.slots))

    async def begin(self) -> None:
        """Counters start here."""
        for slot in self.slots:
            slot.before = await slot.handle.client.loads()

    @property
    def kv_tokens(self) -> tuple[int, ...]:
        """KV slots of each engine, as it said when the run began."""
        return tuple(slot.before.kv_total_tokens if slot.before is not None else 0 for slot in self.slots)

    # --- losses -------------------------------------------------------------------------------------------------------

    def gone(self, slot: EngineSlot) -> None:
        """The server does not answer any more: the core hears of it once."""
        if slot.lost:
            return
        slot.lost = True
        for task in slot.turns.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._keeps.difference_update(slot.turns)
        slot.turns.clear()
        slot.forget_kv()
        self.tell(said.EngineLost(self.now(), slot.index))

    def joined(self, slot: EngineSlot, handle: EngineHandle, version: int) -> None:
        """A fresh server with the weights of `version` stands where the lost one did."""
        slot.handle = handle
        slot.lost = slot.released = slot.paused = False
        slot.version = slot.loaded = version
        slot.before = None
        self.tell(said.EngineJoined(self.now(), slot.index, version))
