"""What a living trajectory has spent its time on so far, and the tokens it cost. Forgotten when the trajectory retires.

Reads turns, tools, environments and engine pauses. It refuses to know batches and the buffer: `batch` puts those times,
which the `Experience` carries, on top. Queueing is what remains, so that the parts always sum to the whole.
"""

from __future__ import annotations

from collections import deque

from testbed.core.actions import (
    HandOver,
    PauseProgram,
    PrepareEnvironment,
    RestoreProgram,
    RunTool,
    StartTurn,
    SwitchPool,
)
from testbed.core.events import (
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineResumed,
    EnvironmentReady,
    PoolSwitched,
    PrefillFinished,
    ToolFinished,
    TurnFailed,
    TurnFinished,
)
from testbed.metrics.fold import Handlers
from testbed.numbered import Numbered
from testbed.scenario.layout import Layout

_PAUSES_KEPT = 64
"""Pauses of one engine that are remembered. A longer turn's earlier pauses count as paused, but are taken from its
queueing."""


class PauseClock:
    """How long one engine has been held still, by weight updates or because its pool does something else. Seconds."""

    __slots__ = ("_intervals", "_since", "before", "stopped")

    def __init__(self) -> None:
        self.before = 0.0
        """Seconds held still before the present pause."""
        self.stopped: set[str] = set()
        """Why it is held still now."""
        self._since = 0.0
        self._intervals: deque[tuple[float, float]] = deque(maxlen=_PAUSES_KEPT)

    def stop(self, t: float, reason: str) -> None:
        if not self.stopped:
            self._since = t
        self.stopped.add(reason)

    def go(self, t: float, reason: str) -> None:
        if reason in self.stopped:
            self.stopped.remove(reason)
            if not self.stopped:
                self.before += t - self._since
                self._intervals.append((self._since, t))

    def total(self, t: float) -> float:
        """Seconds held still until `t`."""
        return self.before + (t - self._since) if self.stopped else self.before

    def within(self, start: float, end: float) -> float:
        """Seconds held still between two times, the second one not after now."""
        seconds = 0.0
        if self.stopped and end > self._since:
            seconds = end - (self._since if self._since > start else start)
        for since, until in reversed(self._intervals):
            if until <= start:
                break
            if since < end:
                seconds += (until if until < end else end) - (since if since > start else start)
        return seconds


class Life:
    """Sums of one trajectory over its turns, in seconds and tokens."""

    __slots__ = (
        "_busy",
        "_decodes_from",
        "_held_from",
        "_out",
        "_pause_mark",
        "_since",
        "capped",
        "decode",
        "environment",
        "held",
        "lost_tokens",
        "paused",
        "prefill",
        "tokens",
        "tool",
    )

    def __init__(self) -> None:
        self.environment = 0.0
        self.prefill = 0.0
        self.decode = 0.0
        self.tool = 0.0
        self.paused = 0.0
        self.held = 0.0
        self.tokens = 0
        """Output tokens of finished turns."""
        self.lost_tokens = 0
        """Output tokens of model calls that were lost or aborted."""
        self.capped = False
        """Its last turn ended at the length cap."""
        self._since = 0.0
        self._pause_mark = 0.0
        self._decodes_from = -1.0
        """When the turn went over to another engine; -1: it has not."""
        self._busy = False
        """In a model call, with a tool, or getting its environment."""
        self._out = False
        """Its program is paused."""
        self._held_from = -1.0
        """Since when it wants a model call and gets none; -1: it does not."""


class Lives:
    """The fold: trajectory -> `Life`, from its environment or first turn until `pop`."""

    def __init__(self, layout: Layout) -> None:
        self._lives: Numbered[Life] = Numbered()
        self._clocks = [PauseClock() for _ in layout.engines]
        self._of_pool = [[self._clocks[e] for e in p.engines] for p in layout.pools]
        for pool in layout.pools:
            if pool.phase != "generate":
                self._hold_pool(0.0, pool.index)
        self.handlers: Handlers = {
            PrepareEnvironment: self._prepare_environment,
            EnvironmentReady: self._environment_ready,
            StartTurn: lambda t, a: self.start_turn(t, a.trajectory, a.engine),
            TurnFinished: self._turn_finished,
            PrefillFinished: self._prefill_finished,
            HandOver: self._hand_over,
            TurnFailed: self._turn_failed,
            RunTool: self._run_tool,
            PauseProgram: self._pause_program,
            RestoreProgram: self._restore_program,
            ToolFinished: self._tool_finished,
            EnginePaused: lambda t, e: self._clocks[e.engine].stop(t, "update"),
            EngineResumed: lambda t, e: self._clocks[e.engine].go(t, "update"),
            EngineLost: lambda t, e: self._clocks[e.engine].go(t, "update"),
            EngineJoined: lambda t, e: self._clocks[e.engine].go(t, "update"),
            SwitchPool: lambda t, a: self._hold_pool(t, a.pool),
            PoolSwitched: self._pool_switched,
        }

    def __len__(self) -> int:
        return len(self._lives)

    def get(self, trajectory: int) -> Life | None:
        return self._lives.get(trajectory)

    def pop(self, trajectory: int) -> Life | None:
        """Forget a trajectory whose life is over."""
        return self._lives.pop(trajectory)

    def _life(self, trajectory: int) -> Life:
        """Begun, if it is not yet."""
        life = self._lives.get(trajectory)
        if life is None:
            life = self._lives[trajectory] = Life()
        return life

    def start_turn(self, t: float, trajectory: int, engine: int) -> None:
        life = self._life(trajectory)
        clock = self._clocks[engine]
        life._pause_mark = clock.total(t) if clock.stopped else clock.before
        life._decodes_from = -1.0
        life._busy = True

    def _prefill_finished(self, t: float, e: PrefillFinished) -> None:
        life = self._lives.get(e.trajectory)
        if life is not None:
            clock = self._clocks[e.engine]
            life.paused += clock.total(t) - life._pause_mark
            life.prefill -= clock.within(e.started_t, t)

    def _hand_over(self, t: float, a: HandOver) -> None:
        life = self._lives.get(a.trajectory)
        if life is not None:
            life._pause_mark = self._clocks[a.to].total(t)
            life._decodes_from = t

    def _turn_finished(self, t: float, e: TurnFinished) -> None:
        capped = e.finish_reason == "length" and not e.continues
        self.finish_turn(t, e.trajectory, e.engine, e.output_tokens, e.started_t, e.first_token_t, capped)

    def finish_turn(
        self, t: float, trajectory: int, engine: int, outputs: int, started_t: float, first_t: float, capped: bool
    ) -> None:
        """`capped`: it is the last one, and ended at the length cap."""
        life = self._lives.get(trajectory)
        if life is None:
            return
        clock = self._clocks[engine]
        paused = (clock.total(t) if clock.stopped else clock.before) - life._pause_mark
        life.prefill += first_t - started_t
        life.decode += t - first_t
        if paused > 0:
            life.paused += paused
            if life._decodes_from < 0:
                life.prefill -= clock.within(started_t, first_t)
                life.decode -= clock.within(first_t, t)
            else:
                life.decode -= clock.within(life._decodes_from, t)
        life.tokens += outputs
        life.capped = capped
        life._busy = False

    def _turn_failed(self, t: float, e: TurnFailed) -> None:
        """The time of a lost model call is waiting: nothing of it was kept. So it stays with queueing."""
        life = self._lives.get(e.trajectory)
        if life is not None:
            life.lost_tokens += e.output_tokens
            self._wants_call(t, life)

    def _prepare_environment(self, t: float, a: PrepareEnvironment) -> None:
        life = self._life(a.trajectory)
        life._since = t
        self._occupied(t, life)

    def _environment_ready(self, t: float, e: EnvironmentReady) -> None:
        life = self._lives.get(e.trajectory)
        if life is not None:
            life.environment += t - life._since
            self._wants_call(t, life)

    def _run_tool(self, t: float, a: RunTool) -> None:
        life = self._lives.get(a.trajectory)
        if life is not None:
            life._since = t
            self._occupied(t, life)

    def _tool_finished(self, t: float, e: ToolFinished) -> None:
        life = self._lives.get(e.trajectory)
        if life is not None:
            life.tool += t - life._since
            self._wants_call(t, life)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _pause_program(self, t: float, a: PauseProgram) -> None:
        life = self._life(a.trajectory)
        life._out = True
        if not life._busy:
            life._held_from = t

    def _restore_program(self, t: float, a: RestoreProgram) -> None:
        life = self._lives.get(a.trajectory)
        if life is not None:
            life._out = False
            self._count_held(t, life)

    def _occupied(self, t: float, life: Life) -> None:
        """A tool or the preparation of its environment begins: that is what its time goes into, paused or not."""
        life._busy = True
        self._count_held(t, life)

    def _wants_call(self, t: float, life: Life) -> None:
        life._busy = False
        if life._out:
            life._held_from = t

    def _count_held(self, t: float, life: Life) -> None:
        if life._held_from >= 0:
            life.held += t - life._held_from
            life._held_from = -1.0

    def _hold_pool(self, t: float, pool: int) -> None:
        for clock in self._of_pool[pool]:
            clock.stop(t, "phase")

    def _pool_switched(self, t: float, e: PoolSwitched) -> None:
        if e.phase == "generate":
            for clock in self._of_pool[e.pool]:
                clock.go(t, "phase")
