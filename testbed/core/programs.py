"""Programs of one run: who is let in, paused and restored, and when that is looked at.

Keeps the line of programs that wait and what each engine's KV holds by the core's account; asks
`testbed.policies.programs` for the rule. It refuses to know queues of turns: it says which trajectories are to be held
and which may go on, and `rollouts` does it."""

from __future__ import annotations

from testbed.core import actions as do
from testbed.core.context import Context
from testbed.core.errors import ProtocolError
from testbed.core.events import RunStarted
from testbed.core.records import Trajectory
from testbed.core.states import step
from testbed.policies.programs import WAITING, Program, SpaceTime
from testbed.scenario.programs import ThunderAgent


class Programs:
    """Memory of the engines is known when the run has started."""

    def __init__(self, ctx: Context, config: ThunderAgent, num_engines: int) -> None:
        self._ctx = ctx
        self.rule = SpaceTime(config)
        self._config = config
        self.live: dict[int, Program] = {}
        self.waiting: dict[int, Program] = {}
        """Those that are not let in, or paused."""
        self._capacity = [0] * num_engines
        """KV tokens of each engine; 0: the engine is lost."""
        self._whole = self._capacity
        """The same of engines that live."""
        self._held = [0] * num_engines
        """Sum of what its active programs need if all of them compute."""
        self.timer = -1
        """The next look at memory; -1: none, as there is no program."""
        self.tick_s = config.tick_s

    def _move(self, p: Program, given: str) -> None:
        p.state = step("program", p.id, p.state, given)

    def run_started(self, event: RunStarted) -> None:
        """Raises `ProtocolError` if the backend does not say how much KV its engines have."""
        n = len(self._capacity)
        if len(event.kv_tokens) < n:
            raise ProtocolError(f"programs are paused by KV, and RunStarted tells of {len(event.kv_tokens)} engines")
        self._whole = list(event.kv_tokens[:n])
        self._capacity = list(self._whole)

    # --- what happens to programs -----------------------------------------------------------------------------------

    def arrives(self, t: Trajectory) -> bool:
        """A program begins. Returns whether it is let in at once: there is room, and nobody waits."""
        group = t.group
        p = self.live[t.id] = Program(t.id, group.id, group.prompt_tokens, t.submitted_index)
        if self.timer < 0:
            self._arm()
        if not self.waiting:
            free = [c * self._config.pause_above - h for c, h in zip(self._capacity, self._held, strict=True)]
            place = self.rule.room_for(p, free, self._ctx.now)
            if place >= 0:
                self._move(p, "restore")
                self._put(p, place)
                t.home = place
                return True
        self._wait(p, "no_room")
        return False

    def holds(self, id: int) -> bool:
        """Whether the program may get no model call now."""
        return id in self.waiting

    def reasons(self, t: Trajectory, engine: int) -> None:
        """Its call was sent to this engine."""
        p = self.live[t.id]
        if p.place != engine:
            self._take(p)
            self._put(p, engine)

    def acts(self, t: Trajectory) -> None:
        """Its call is over and its tool starts."""
        p = self.live[t.id]
        self._grows(p, t)
        p.acting_since = self._ctx.now
        marked = p.state == "marked"
        self._move(p, "act")
        if marked:
            self._wait(p, "marked")

    def answered(self, t: Trajectory) -> bool:
        """Its tool is over. Returns whether it may get a model call."""
        p = self.live[t.id]
        self._grows(p, t)
        self._move(p, "reason")
        return p.state == "reasoning"

    def over(self, id: int) -> None:
        """It has ended, however: what it held is free."""
        p = self.live.pop(id, None)
        if p is not None:
            self._move(p, "end")
            self.waiting.pop(id, None)
            self._take(p)

    def lost(self, engine: int) -> None:
        """The engine's KV is gone, and so is its room."""
        self._capacity[engine] = 0
        for p in self.live.values():
            if p.place == engine:
                self._take(p)

    def joined(self, engine: int) -> None:
        """The engine is back, with an empty cache."""
        self._capacity[engine] = self._whole[engine]

    def _grows(self, p: Program, t: Trajectory) -> None:
        tokens = t.prompt_tokens + t.output_tokens + t.observation_tokens
        if p.place >= 0:
            self._held[p.place] += tokens - p.tokens
        p.tokens = tokens

    def _put(self, p: Program, engine: int) -> None:
        p.place = engine
        self._held[engine] += self.rule.need(p)

    def _take(self, p: Program) -> None:
        if p.place >= 0:
            self._held[p.place] -= self.rule.need(p)
            p.place = -1

    def _wait(self, p: Program, why: str) -> None:
        self._ctx.out.append(do.PauseProgram(p.id, p.place, why))
        self._take(p)
        p.waiting_since = self._ctx.now
        self.waiting[p.id] = p

    # --- the look at memory -----------------------------------------------------------------------------------------

    def tick(self) -> tuple[list[int], list[int]]:
        """(trajectories to hold from now on, trajectories that may go on), by the rule."""
        held: list[int] = []
        freed: list[int] = []
        if self._config.tick_order == "pause_first":
            self._pause(held)
            self._restore(freed)
        else:
            self._restore(freed)
            self._pause(held)
        if self.live:
            self._arm()
        else:
            self.timer = -1
        return held, freed

    def _arm(self) -> None:
        self.timer = self._ctx.next_timer()
        self._ctx.out.append(do.SetTimer(self.timer, self._ctx.now + self.tick_s))

    def _by_place(self) -> list[list[Program]]:
        places: list[list[Program]] = [[] for _ in self._capacity]
        for p in self.live.values():
            if p.place >= 0 and p.state not in WAITING:
                places[p.place].append(p)
        return places

    def _pause(self, held: list[int]) -> None:
        now = self._ctx.now
        for active, capacity in zip(self._by_place(), self._capacity, strict=True):
            if not capacity:
                continue
            for p in self.rule.to_pause(active, capacity, now):
                if p.state == "reasoning" and self._config.pause_reasoning == "next_tool":
                    self._move(p, "mark")
                    continue
                self._move(p, "pause")
                self._wait(p, "over_capacity")
                held.append(p.id)

    def _restore(self, freed: list[int]) -> None:
        if not self.waiting:
            return
        now, rule, places = self._ctx.now, self.rule, self._by_place()
        free = [
            c * self._config.pause_above - rule.used(active, now, True) if c else -1.0
            for active, c in zip(places, self._capacity, strict=True)
        ]
        busy = [bool(active) for active in places]
        for p in rule.line(self.waiting.values()):
            overdue = rule.overdue(p, now)
            place = rule.room_for(p, free, now)
            why = "overdue" if overdue else "room"
            if place < 0:
                place, why = self._anyhow(free, busy, overdue)
            if place < 0:
                if rule.config.restore_order == "shortest_first":
                    return  # the others are longer, or only act
                continue
            free[place] -= rule.weight(p, now, True)
            busy[place] = True
            self._move(p, "restore")
            del self.waiting[p.id]
            self._put(p, place)
            self._ctx.trajectories[p.id].home = place
            self._ctx.out.append(do.RestoreProgram(p.id, place, why))
            freed.append(p.id)

    def _anyhow(self, free: list[float], busy: list[bool], overdue: bool) -> tuple[int, str]:
        """(engine, why) for one that fits nowhere: it has waited too long, or an engine has nothing to do."""
        known = [e for e, c in enumerate(self._capacity) if c]
        idle = [e for e in known if not busy[e]]
        if idle:
            return max(idle, key=lambda e: (free[e], -e)), "alone"
        if overdue and known:
            return max(known, key=lambda e: (free[e], -e)), "overdue"
        return -1, ""

    def near(self) -> list[int]:
        """Programs whose environments may be prepared now, though they wait."""
        ahead = self._config.prepare_ahead
        line = self.rule.line(p for p in self.waiting.values() if p.state == "new")
        return [p.id for p in (line if ahead is None else line[:ahead])]

    def counts(self) -> dict[str, int]:
        """Programs by state."""
        found: dict[str, int] = {}
        for p in self.live.values():
            found[p.state] = found.get(p.state, 0) + 1
        return found
