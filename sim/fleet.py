"""The engines of a simulated run: one model each with one pending wake-up; requests in, notices out as events.

It refuses to know what a weight update is and where tasks come from. Request ids are trajectory and turn in one number.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import Any, Final

from sim.agenda import Call, Callback
from sim.clock import ARRIVE, ENGINE, REPORT, Clock
from sim.costs.base import CostModel
from sim.costs.speculation import SpeculativeCosts
from sim.engine import Aborted, EngineModel, EngineModelOptions, Finished, Paused, Request
from sim.experience_store import ExperienceStore
from sim.kv_transfer import KvTransfers
from sim.prefill_decode import Prefilled, decode_part, prefill_part, prefilled, whole_turn
from sim.shared_machine import SharedMachine
from testbed.core import actions as do
from testbed.core import events as said
from testbed.fields import fields_of
from testbed.scenario import Scenario
from testbed.scenario.layout import Layout

FORM: Final = ENGINE + 5
"""An engine forms its next batch. After all engines have said what ended at this instant: it takes in what they
free."""

# Globals that are Final are no look-up where this is compiled.
_Finished: Final = Finished
_TurnFinished: Final = said.TurnFinished
_TURN_BITS: Final = 20
_TURN_MASK: Final = (1 << 20) - 1
"""Request id = trajectory << 20 | turn."""


class EngineSlot:
    """One engine model with its pending wake-up."""

    __slots__ = ("arrived_t", "fires", "index", "model", "namespace", "on_way", "released", "scheduled")

    def __init__(self, index: int, model: EngineModel) -> None:
        self.index = index
        self.model = model
        self.scheduled = inf
        """The model's `wake_at` that its wake-up was scheduled for."""
        self.fires = inf
        """When that is. A wake-up of another time is void."""
        self.namespace = 0
        self.released = False
        """Its GPUs train."""
        self.arrived_t = 0.0
        """When its way in is free for the next request."""
        self.on_way: dict[int, Call] = {}
        """Request id -> its arrival, while it is on its way."""


class Fleet:
    """All engines. `tell` hands an event to the core."""

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        options: EngineModelOptions,
        costs: CostModel,
        clock: Clock,
        store: ExperienceStore,
        tell: Any,
        transfers: KvTransfers,
    ) -> None:
        self.clock = clock
        self._agenda = clock.agenda
        self.store = store
        self.tell = tell
        self.costs = costs
        self._scenario = scenario
        self._options = options
        self._transfers = transfers
        self.machine: SharedMachine | None = None
        """That engines and trainer share, if they slow each other down."""
        self._prefill_engines = layout.prefill_engines
        self._prefilled: dict[int, Prefilled] = {}
        """Request id -> its computed prompt, from then on until the turn ends."""
        self._whole: dict[int, Request] = {}
        """Request id -> the turn that a prefill engine has the first part of."""
        self._fetches: dict[int, do.FetchPrefix] = {}
        """Request id -> what is to be fetched before it starts."""
        self._keeps: set[int] = set()
        """Request ids of turns that are being taken back and keep what they have generated."""
        self._sources: dict[int, int] = {}
        """Request id -> engine that its KV is on the way from."""
        self.slots = [EngineSlot(e.index, self._new_model(costs)) for e in layout.engines]
        self._drafts = costs if isinstance(costs, SpeculativeCosts) else None
        self._keeps_kv = scenario.weights.transition.kv == "keep"
        self._salt = scenario.weights.transition.kv == "salt_by_version"
        self._max_new = scenario.workload.max_response_length
        self._ignore_eos = scenario.rollout.ignore_eos or scenario.simulation.forced_lengths  # as a real run asks
        self._forced = scenario.simulation.forced_lengths
        self._overlap = not scenario.rollout.engine.disable_overlap_schedule
        self._forming = False
        self._on_wake: Callback = self._wake
        self._on_form: Callback = self._form
        """Made once: a bound method is an object."""
        self._arrival = (costs.arrival_base_s, costs.arrival_per_request_s)
        self._arrives_at_once = not any(self._arrival)
        self.wake_ups = 0
        """Engine wake-ups that did something."""
        self.stale = 0
        """Wake-ups that something had made void meanwhile (a run cut by an arrival)."""
        self.finished_turns = 0

    def _new_model(self, costs: CostModel) -> EngineModel:
        return EngineModel(self._options, costs, self._scenario.simulation.mode)

    def use_costs(self, index: int, costs: CostModel) -> None:
        """The engine takes its steps from these."""
        slot = self.slots[index]
        slot.model.use_costs(self.message_t(), costs)
        self.schedule(slot)

    def schedule(self, slot: EngineSlot) -> None:
        model = slot.model
        wake = model.wake_at
        if self.machine is not None:
            self.machine.engine_works(slot.index, wake != inf)
        if wake != slot.scheduled:
            slot.scheduled = slot.fires = wake
            if wake != inf:
                agenda = self._agenda
                now = agenda.now
                if wake < now:
                    slot.fires = wake = now
                if model.forms_next:
                    agenda.put(wake, FORM, self._on_form, slot)
                else:
                    agenda.put(wake, ENGINE, self._on_wake, slot)

    def _wake(self, slot: EngineSlot) -> None:
        now = self._agenda.now
        if slot.fires != now:
            self.stale += 1
            return
        model = slot.model
        if model.forms_next:
            self._agenda.put(now, FORM, self._on_form, slot)
            return
        slot.scheduled = slot.fires = inf
        self.wake_ups += 1
        for notice in model.advance(now):
            self.notice(slot, notice)
        if model.wake_at != inf or self.machine is not None:
            self.schedule(slot)

    def _form(self, slot: EngineSlot) -> None:
        now = self._agenda.now
        if slot.fires != now:
            self.stale += 1
            return
        slot.scheduled = slot.fires = inf
        self.wake_ups += 1
        notices = slot.model.advance(now)
        if notices:
            self._forming = True
            for notice in notices:
                self.notice(slot, notice)
            self._forming = False
        self.schedule(slot)

    def message_t(self) -> float:
        """When a message that is sent now reaches an engine. What follows from the start of an iteration comes after
        all iterations that start at this instant, whichever of them were formed already."""
        now = self._agenda.now
        return nextafter(now, inf) if self._forming else now

    def notice(self, slot: EngineSlot, n: Finished | Aborted | Paused) -> None:
        now = self._agenda.now
        if self._prefill_engines and not isinstance(n, Paused):
            part = self._part_of_turn(slot, n)
            if part is None:
                return
            n = part
        if self._keeps and not isinstance(n, Paused) and n.rid in self._keeps:
            self._keeps.discard(n.rid)
            if isinstance(n, Aborted) and n.output_tokens:
                whole = self._ended_anyhow(n)
                if whole is None:
                    self._cut_short(slot, n)
                    return
                n = whole
        if type(n) is _Finished:
            self.finished_turns += 1
            # all fields at once: one by one each is looked up by its name
            rid, _, output_tokens, spans, cached, started_t, first_t, reason, again, kv_version, retractions = (
                fields_of(n)
            )
            request: int = rid
            trajectory, turn = request >> _TURN_BITS, request & _TURN_MASK
            c = self.store.conversation(trajectory)
            if c.done:
                c.done = 0
            prompt = c.prompt_tokens
            outputs: int = output_tokens
            seen_late = self._overlap and reason == "stop"
            if self._forced and c.stops[turn]:
                reason = "stop"
            continues = turn + 1 < len(c.output_tokens)
            if continues:
                # under overlap a stop token is seen one step late, and that step has computed its KV
                self.store.answered(c, outputs, outputs - (not seen_late))
                reason = "tool_calls"
            else:
                c.prompt_tokens = prompt + outputs
            self.tell(
                _TurnFinished(
                    now,
                    trajectory,
                    turn,
                    slot.index,
                    prompt,
                    output_tokens,
                    spans,
                    cached,
                    first_t,
                    started_t,
                    reason,
                    continues,
                    again,
                    kv_version,
                    retractions,
                )
            )
        elif type(n) is Aborted:
            trajectory, turn = n.rid >> _TURN_BITS, n.rid & _TURN_MASK
            self.tell(said.TurnFailed(now, trajectory, turn, slot.index, n.reason, n.output_tokens))
        else:
            self.tell(said.EnginePaused(now, slot.index))

    def _ended_anyhow(self, n: Aborted) -> Finished | None:
        """The end of a turn whose last token was the one that its abort came with; else None."""
        c, turn = self.store.conversation(n.rid >> _TURN_BITS), n.rid & _TURN_MASK
        if n.output_tokens < c.output_tokens[turn] - c.done:
            return None
        return Finished(
            n.rid,
            n.t,
            n.output_tokens,
            n.spans,
            n.cached_tokens,
            n.started_t,
            n.first_token_t,
            "stop" if c.stops[turn] else "length",
            n.recomputed_tokens,
            n.kv_version,
            n.retractions,
        )

    def _cut_short(self, slot: EngineSlot, n: Aborted) -> None:
        trajectory, turn = n.rid >> _TURN_BITS, n.rid & _TURN_MASK
        c = self.store.conversation(trajectory)
        prompt = c.prompt_tokens
        self.store.cut_short(c, n.output_tokens)
        self.tell(
            said.TurnFinished(
                self._agenda.now,
                trajectory,
                turn,
                slot.index,
                prompt,
                n.output_tokens,
                n.spans,
                n.cached_tokens,
                n.first_token_t,
                n.started_t,
                "abort",
                True,
                n.recomputed_tokens,
                n.kv_version,
                n.retractions,
            )
        )

    def start_turn(self, a: do.StartTurn) -> None:
        trajectory: int
        turn: int
        engine: int
        trajectory, turn, engine, group, task, member, _, _ = fields_of(a)
        slot = self.slots[engine]
        c = self.store.begin_turn(trajectory, group, task, member)
        model = slot.model
        output_tokens, stops = c.output_tokens[turn] - c.done, c.stops[turn] and not self._forced
        request = Request(
            trajectory << _TURN_BITS | turn,
            c.content,
            c.prompt_tokens,
            output_tokens,
            self._max_new - c.done if stops else output_tokens,
            stops,
            self._ignore_eos,
            c.output_content,
            None,
            slot.namespace,
            c.known_tokens,
        )
        if self._prefill_engines and request.output_tokens > 1:
            self._whole[request.rid] = request
            request = prefill_part(request)
        if self._fetches and request.rid in self._fetches:
            self._fetch(slot, request)
            return
        if not self._arrives_at_once:
            self._send(slot, request)
            return
        model.submit(self.message_t(), request)
        if model.wake_at != slot.scheduled:
            self.schedule(slot)

    def _send(self, slot: EngineSlot, request: Request) -> None:
        """Requests of one engine pass its way in one after another."""
        base_s, each_s = self._arrival
        slot.arrived_t = max(slot.arrived_t, self._agenda.now) + each_s
        slot.on_way[request.rid] = self.clock.at(slot.arrived_t + base_s, ARRIVE, self._arrive, (slot, request))

    # --- KV between engines -------------------------------------------------------------------------------------------

    def fetch_prefix(self, a: do.FetchPrefix) -> None:
        """The turn that starts next waits for this."""
        self._fetches[a.trajectory << _TURN_BITS | a.turn] = a

    def _fetch(self, slot: EngineSlot, request: Request) -> None:
        """Send what the source really has and this engine has not; the request arrives with it."""
        a, arrives = self._fetches.pop(request.rid), self.message_t()
        there = self.slots[a.source].model.held_prefix(request, a.tokens)
        missing = there[0] - slot.model.held_prefix(request, a.tokens)[0]
        if missing > 0:
            request.brought = there
            arrives = self._transfers.send(self._agenda.now, a.source, a.engine, missing)
            self._sources[request.rid] = a.source
        slot.on_way[request.rid] = self.clock.at(arrives, ARRIVE, self._arrive, (slot, request))

    def _part_of_turn(self, slot: EngineSlot, n: Finished | Aborted) -> Finished | Aborted | None:
        """What the end of one part says of the whole turn; None: it goes on elsewhere."""
        whole = self._whole.pop(n.rid, None)
        if whole is not None and isinstance(n, Finished):
            self._prompt_done(slot, whole, n)
            return None
        prompt = None if whole is not None else self._prefilled.pop(n.rid, None)
        return n if prompt is None else whole_turn(prompt, n)

    def _prompt_done(self, slot: EngineSlot, whole: Request, n: Finished) -> None:
        p = self._prefilled[n.rid] = prefilled(whole, n, slot.index)
        trajectory, turn = n.rid >> _TURN_BITS, n.rid & _TURN_MASK
        self.tell(said.PrefillFinished(self._agenda.now, trajectory, turn, slot.index, n.started_t, p.version))

    def hand_over(self, a: do.HandOver) -> None:
        """The KV of a prompt goes to a decode engine, and the rest of the turn with it."""
        rid = a.trajectory << _TURN_BITS | a.turn
        slot, p = self.slots[a.to], self._prefilled[rid]
        end = self._transfers.send(self._agenda.now, a.engine, a.to, p.request.prompt_tokens)
        self._sources[rid] = a.engine
        slot.on_way[rid] = self.clock.at(end, ARRIVE, self._arrive, (slot, decode_part(p)))

    def _arrive(self, arg: tuple[EngineSlot, Request]) -> None:
        slot, request = arg
        del slot.on_way[request.rid]
        if request.brought is not None:
            self._sources.pop(request.rid, None)
            if request.brought[1] != slot.model.version and not self._keeps_kv:
                request.brought = None  # its weights have changed meanwhile
        slot.model.submit(self._agenda.now, request)
        self.schedule(slot)

    def abort_turn(self, a: do.AbortTurn) -> None:
        slot, rid = self.slots[a.engine], a.trajectory << _TURN_BITS | a.turn
        call = slot.on_way.pop(rid, None)
        if call is not None:
            call.cancel()
            self._forget(rid)
            self.tell(said.TurnFailed(self._agenda.now, a.trajectory, a.turn, a.engine, "aborted"))
            return
        if a.keep:
            self._keeps.add(rid)
        slot.model.abort(self.message_t(), rid)
        self.schedule(slot)

    def report(self, slot: EngineSlot) -> None:
        m = slot.model
        m.sync(self._agenda.now)
        self.schedule(slot)
        self.tell(
            said.LoadReported(
                self._agenda.now,
                slot.index,
                m.running,
                m.waiting,
                m.kv_used,
                m.kv_total,
                m.retractions,
                m.prefill_s,
                m.recompute_s,
                m.decode_s,
            )
        )

    def report_each(self) -> None:
        """Every engine reports its load."""
        for slot in self.slots:
            self.report(slot)

    def report_all(self, interval: float) -> None:
        """As `report_each`, and again every `interval` seconds."""
        self.report_each()
        self.clock.at(self._agenda.now + interval, REPORT, self.report_all, interval)

    # --- losses and versions ------------------------------------------------------------------------------------------

    def lost(self, index: int) -> None:
        """The server is gone; a fresh one stands in until it joins again."""
        slot = self.slots[index]
        slot.model = self._new_model(self.costs if self.machine is None else self.machine.joins(slot.index))
        for call in slot.on_way.values():
            call.cancel()
        for rid in slot.on_way:
            self._sources.pop(rid, None)
        slot.on_way.clear()
        for rid in [rid for rid, source in self._sources.items() if source == index]:
            self._source_lost(rid)
        slot.scheduled = slot.fires = inf
        self.schedule(slot)
        if slot.released:
            slot.model.release_memory(self._agenda.now)

    def _source_lost(self, rid: int) -> None:
        """The engine that a turn's KV was coming from is gone: the turn is lost, wherever it was going."""
        slot = next(slot for slot in self.slots if rid in slot.on_way)
        slot.on_way.pop(rid).cancel()
        self._forget(rid)
        self._agenda.put(
            self._agenda.now,
            ARRIVE,
            self.tell,
            said.TurnFailed(self._agenda.now, rid >> _TURN_BITS, rid & _TURN_MASK, slot.index, "engine_lost"),
        )

    def _forget(self, rid: int) -> None:
        """A turn whose KV was on its way does not arrive."""
        for held in (self._whole, self._prefilled, self._sources):
            held.pop(rid, None)

    def serve(self, slot: EngineSlot, version: int) -> None:
        """From now on the engine serves `version`; new requests see KV by the transition rule."""
        slot.model.set_version(self._agenda.now, version)
        if self._drafts is not None:
            slot.model.costs = self._drafts.at_version(version)
        if self._salt:
            slot.namespace = version

    def take_in(self, slot: EngineSlot) -> None:
        """Let an idle engine handle messages that came too late (an abort of a request that ended by itself)."""
        for notice in slot.model.advance(self._agenda.now):
            self.notice(slot, notice)
        self.schedule(slot)
